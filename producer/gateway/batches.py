"""/v1/files and /v1/batches, as OpenAI's clients speak them.

Invariant: a caller sees files and batches of its own tenant only.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from tokenfleet.producer.batch import ENDPOINTS
from tokenfleet.producer.gateway.answers import GatewayError, refused
from tokenfleet.producer.gateway.body import json_body, limited
from tokenfleet.producer.gateway.context import caller_of, gateway_of, note
from tokenfleet.producer.gateway.desk import TERMINAL, Desk
from tokenfleet.producer.gateway.store import (
    BatchRecord,
    FileRecord,
    TenantStore,
    new_batch_id,
)

FORM_BYTES = 16_384
"""What a form may have around its file."""
MOST_LISTED = 10_000
WINDOW = re.compile(r"([1-9]\d{0,3})([mhd])")
_UNITS_S = {"m": 60, "h": 3600, "d": 86_400}
_ORDERS = (None, "", "asc", "desc")
_OF_A_FILE = ("file", "purpose")
_OF_A_BATCH = ("input_file_id", "endpoint", "completion_window", "metadata")
_KEPT = "files are kept until they are deleted: {name!r} is not supported here; leave it out"
_METADATA = "metadata must map up to 16 names to texts of up to 512 characters"


async def upload(request: Request) -> Response:
    """POST /v1/files."""
    store = _store(request)
    limit = gateway_of(request).settings.max_file_bytes
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise refused(415, "unsupported_media_type", "a file comes as multipart/form-data")
    body = limited(request, limit + FORM_BYTES)
    try:
        form = await MultiPartParser(request.headers, body, max_files=1, max_fields=8).parse()
    except MultiPartException as error:
        raise refused(400, "invalid_form", error.message) from None
    try:
        _only(_OF_A_FILE, form)
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise refused(400, "missing_required_parameter", "missing the file", "file")
        if purpose != "batch":
            message = "purpose must be batch: no other files are of use here"
            raise refused(400, "invalid_value", message, "purpose")
        record = await asyncio.to_thread(store.keep, file.file, file.filename or "")
    finally:
        await form.close()
    note(request, file=record.id, bytes=record.bytes)
    return JSONResponse(record.as_api())


async def list_files(request: Request) -> Response:
    """GET /v1/files."""
    records = await asyncio.to_thread(_store(request).files)
    purpose = request.query_params.get("purpose")
    kept = [record for record in records if purpose in (None, "", record.purpose)]
    return _page(request, kept, MOST_LISTED)


async def show_file(request: Request) -> Response:
    """GET /v1/files/{file_id}."""
    return JSONResponse((await _file(request)).as_api())


async def delete_file(request: Request) -> Response:
    """DELETE /v1/files/{file_id}."""
    record = await _file(request)
    await asyncio.to_thread(_store(request).forget, record)
    return JSONResponse({"id": record.id, "object": "file", "deleted": True})


async def file_content(request: Request) -> Response:
    """GET /v1/files/{file_id}/content."""
    record = await _file(request)
    path = _store(request).path(record)
    return FileResponse(path, media_type="application/jsonl", filename=record.filename)


async def create_batch(request: Request) -> Response:
    """POST /v1/batches."""
    store, desk = _store(request), _desk(request)
    body = await json_body(request, gateway_of(request).settings.max_body_bytes)
    if not isinstance(body, dict):
        raise refused(400, "invalid_type", "the body must be a JSON object")
    _only(_OF_A_BATCH, {name: value for name, value in body.items() if value is not None})
    endpoint = body.get("endpoint")
    if endpoint not in ENDPOINTS:
        known = " or ".join(ENDPOINTS)
        raise refused(400, "invalid_value", f"endpoint must be {known}", "endpoint")
    source = await asyncio.to_thread(store.file, str(body.get("input_file_id")))
    if source is None:
        raise refused(404, "not_found", "there is no such file", "input_file_id")
    window_s = _window_s(body.get("completion_window"))
    now = int(time.time())
    record = BatchRecord(
        id=new_batch_id(),
        endpoint=str(endpoint),
        input_file_id=source.id,
        completion_window=body["completion_window"],
        created_at=now,
        expires_at=now + window_s,
        metadata=_metadata(body.get("metadata")),
    )
    await asyncio.to_thread(store.begin, record, source)
    desk.drive(store, record)
    note(request, batch=record.id)
    return JSONResponse(record.as_api())


async def list_batches(request: Request) -> Response:
    """GET /v1/batches."""
    store, desk = _store(request), _desk(request)
    records = await asyncio.to_thread(
        lambda: [desk.counts(store, record) for record in store.batches()]
    )
    return _page(request, records, 20)


async def show_batch(request: Request) -> Response:
    """GET /v1/batches/{batch_id}."""
    record = await _batch(request)
    found = await asyncio.to_thread(_desk(request).counts, _store(request), record)
    return JSONResponse(found.as_api())


async def cancel_batch(request: Request) -> Response:
    """POST /v1/batches/{batch_id}/cancel."""
    record = await _batch(request)
    if record.status in TERMINAL:
        message = f"the batch is {record.status} and cannot be cancelled any more"
        raise refused(409, "batch_ended", message)
    found = await _desk(request).cancel(_store(request), record)
    return JSONResponse(found.as_api())


def _only(known: Sequence[str], given: Iterable[str]) -> None:
    """Raises GatewayError 400 for a field that would be dropped in silence."""
    for name in given:
        if name.partition("[")[0] in ("expires_after", "output_expires_after"):
            raise refused(400, "unsupported_parameter", _KEPT.format(name=name[:80]), name[:80])
        if name not in known:
            raise refused(400, "unknown_parameter", f"unknown parameter: {name[:80]!r}", name[:80])


def _desk(request: Request) -> Desk:
    desk = gateway_of(request).desk
    if desk is None:
        message = "no files are kept here: the gateway was started without --files-dir"
        raise refused(404, "not_found", message)
    return desk


def _store(request: Request) -> TenantStore:
    caller = caller_of(request)
    return _desk(request).store(caller.tenant)


async def _file(request: Request) -> FileRecord:
    file_id = request.path_params["file_id"]
    record = await asyncio.to_thread(_store(request).file, file_id)
    if record is None:
        raise _not_there("file", file_id)
    return record


async def _batch(request: Request) -> BatchRecord:
    batch_id = request.path_params["batch_id"]
    record = await asyncio.to_thread(_store(request).batch, batch_id)
    if record is None:
        raise _not_there("batch", batch_id)
    return record


def _not_there(what: str, name: str) -> GatewayError:
    return refused(404, "not_found", f"there is no {what} {name[:80]!r}")


def _window_s(window: object) -> int:
    match = WINDOW.fullmatch(window) if isinstance(window, str) else None
    if match is None:
        message = "completion_window must be a time such as 24h, 90m or 7d"
        raise refused(400, "invalid_value", message, "completion_window")
    return int(match[1]) * _UNITS_S[match[2]]


def _metadata(value: object) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > 16:
        raise refused(400, "invalid_value", _METADATA, "metadata")
    for name, text in value.items():
        if len(name) > 64 or not isinstance(text, str) or len(text) > 512:
            raise refused(400, "invalid_value", _METADATA, "metadata")
    return value


def _page(
    request: Request, records: Sequence[FileRecord] | Sequence[BatchRecord], usual: int
) -> Response:
    """One page of a list, newest first, behind the id that `after` names."""
    query = request.query_params
    said = query.get("limit", str(usual))
    if len(said) > 9 or not said.isdecimal() or not 1 <= int(said) <= MOST_LISTED:
        raise refused(400, "invalid_value", f"limit must be 1 to {MOST_LISTED}", "limit")
    if query.get("order") not in _ORDERS:
        raise refused(400, "invalid_value", "order must be asc or desc", "order")
    ordered: list[Any] = list(reversed(records)) if query.get("order") == "asc" else list(records)
    after = query.get("after")
    if after:
        ids = [record.id for record in ordered]
        ordered = ordered[ids.index(after) + 1 :] if after in ids else []
    shown = ordered[: int(said)]
    found = {
        "object": "list",
        "data": [record.as_api() for record in shown],
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": len(ordered) > len(shown),
    }
    return JSONResponse(found)
