"""Requests whose grammar is being compiled, beside the steps and never in one.

A request is here from its arrival until its grammar is ready, refused, or too slow; then it is
opened or ended. The time limit counts from the start of its own compilation, so a slow grammar
costs those behind it time and nothing else.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from tokenfleet.engine.constraints import COMPILE_LIMIT_S, Constraint, ConstraintCompiler
from tokenfleet.engine.errors import InvalidRequest
from tokenfleet.engine.request import EngineRequest

_IDLE_WAIT_S = 0.01
"""How long an otherwise idle step waits for a grammar."""
_KEPT = 64
"""Compiled grammars that are remembered."""
_PATIENCE_S = 10 * COMPILE_LIMIT_S
"""How long a request waits for its turn."""


@dataclass(slots=True)
class _Pending:
    request: EngineRequest
    key: str
    arrived: float
    started: float | None = None
    """Set by the thread when it begins."""
    result: Future[Constraint] = field(default_factory=Future)


class Compiling:
    """Compiles in one thread, in order of arrival, and remembers what it compiled."""

    def __init__(self, compiler: ConstraintCompiler | None) -> None:
        self._compiler = compiler
        self._pending: dict[str, _Pending] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._known: OrderedDict[str, Constraint] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._pending)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    @property
    def num_choices(self) -> int:
        """Sequences that will want a slot."""
        return sum(pending.request.params.n for pending in self._pending.values())

    def prepare(self) -> None:
        """Build in the background what the first grammar needs: for a second it holds up all
        Python of this process, once."""
        if self._compiler is not None and self._threads is None:
            self._executor().submit(
                self._compiler.compile, {"regex": "a"}
            )  # what fails here fails there

    def start(self, request: EngineRequest) -> None:
        """Begin to compile.

        Raises:
            InvalidRequest: `unsupported`: this engine was started without a compiler;
                `unsupported_grammar`: it is nothing that JSON can hold.
        """
        wanted = request.params.structured_outputs
        if self._compiler is None or wanted is None:
            raise InvalidRequest("unsupported", "this engine was started without structured output")
        pending = _Pending(request, _key(wanted), time.monotonic())
        known = self._known.get(pending.key)
        if known is not None:
            pending.result.set_result(known)
        else:
            self._submit(pending, self._compiler)
        self._pending[request.id] = pending

    def cancel(self, request_id: str) -> EngineRequest | None:
        """Take out a request that is here."""
        pending = self._pending.pop(request_id, None)
        if pending is None:
            return None
        if not pending.result.cancel() and not pending.result.done():
            self._leave_thread_behind()
        return pending.request

    def ready(
        self, *, wait_for_one: bool
    ) -> Iterator[tuple[EngineRequest, Constraint | InvalidRequest]]:
        """Requests whose fate is known, taken out as they are given."""
        if wait_for_one:
            futures = [pending.result for pending in self._pending.values()]
            wait(futures, timeout=_IDLE_WAIT_S, return_when=FIRST_COMPLETED)
        now = time.monotonic()
        for request_id, pending in list(self._pending.items()):
            if not pending.result.done() and not _too_late(pending, now):
                continue
            del self._pending[request_id]
            if not pending.result.done() and pending.started is not None:
                self._leave_thread_behind()
            yield pending.request, self._fate(pending)

    def _submit(self, pending: _Pending, compiler: ConstraintCompiler) -> None:
        def work() -> Constraint:
            pending.started = time.monotonic()
            return compiler.compile(pending.request.params.structured_outputs or {})

        pending.result = self._executor().submit(work)

    def _executor(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        return self._threads

    def _leave_thread_behind(self) -> None:
        """A thread cannot be ended: let it run out, and give those behind it another one."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._threads = None
        for pending in self._pending.values():
            if pending.result.cancelled() and self._compiler is not None:
                self._submit(pending, self._compiler)

    def _fate(self, pending: _Pending) -> Constraint | InvalidRequest:
        if not pending.result.done() or pending.result.cancelled():
            pending.result.cancel()
            return InvalidRequest(
                "unsupported_grammar",
                f"the grammar was not compiled within {COMPILE_LIMIT_S:g} s; make it simpler",
            )
        error = pending.result.exception()
        if error is None:
            self._remember(pending.key, pending.result.result())
            return pending.result.result()
        if isinstance(error, InvalidRequest):
            return error
        return InvalidRequest("unsupported_grammar", f"the grammar cannot be compiled: {error}")

    def _remember(self, key: str, constraint: Constraint) -> None:
        self._known[key] = constraint
        self._known.move_to_end(key)
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)


def _key(wanted: Mapping[str, Any]) -> str:
    """Equal for equal grammars.

    Raises:
        InvalidRequest: `unsupported_grammar`: it contains itself, say.
    """
    try:
        return json.dumps(wanted, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            "unsupported_grammar", f"structured_outputs is no JSON: {error}"
        ) from error


def _too_late(pending: _Pending, now: float) -> bool:
    if pending.started is None:
        return now - pending.arrived > _PATIENCE_S
    return now - pending.started > COMPILE_LIMIT_S
