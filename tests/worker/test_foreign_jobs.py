"""Jobs of a client that makes mistakes: each has a name, and none of them is anybody else's."""

from __future__ import annotations

from typing import Any

import pytest

from tokenfleet.producer.connection import ResponseError
from tokenfleet.producer.fleet import FleetReader
from tokenfleet.producer.keys import new_job_id
from tokenfleet.producer.protocol import JobRequest
from tokenfleet.producer.scripts import SUBMIT
from tokenfleet.worker.commands.admin import Admin

FIELDS = (
    *("id", "request", "model", "priority", "tenant", "deadline", "delay", "max_failures"),
    *("on_disconnect", "digest", "key", "traceparent"),
)
ID = "01a22c95-1db3-72eb-9f22-6fa35b7cdb76"


def job(**changes: Any) -> list[Any]:
    """The fields of one job as `submit` takes them."""
    packed = JobRequest(model="m", prompt="x").pack()
    fields = [new_job_id(0), packed, "m", "default", "default", 0, 0, "", "continue", "", "", ""]
    return list({**dict(zip(FIELDS, fields, strict=True)), **changes}.values())


async def submit(lab: Any, *jobs: list[Any], width: int = 12) -> list[Any]:
    keys = [lab.keys.delay, lab.keys.deadline, lab.keys.queue("m", "default")]
    args = [width, *(field for fields in jobs for field in fields)]
    replies: list[Any] = await lab.connection.run(SUBMIT, 0, keys, args, patience_s=9.0)
    return replies


NO_UTF8 = (
    b"m\xff",
    b"\xc3",
    b"\xe1\xc3\xa9\x80\x80",
    b"\xed\xa0\x80",
    b"\xe0\x80\x80",
    b"\xf5\x80\x80\x80",
)

WRONG = [
    ("id", "x", "id must be a job id"),
    ("id", "", "id must be a job id"),
    ("id", b"\xff\xfe", "id must be a job id"),
    ("id", f"{ID.upper()}.0", "id must be a job id"),
    ("id", f"{ID}.7", "of this partition"),
    ("id", f"{ID}.00", "of this partition"),
    ("model", "", "model must be 1 to 1024 bytes"),
    ("model", "a\nb", "without control characters"),
    *(("model", odd, "must be 1 to 1024 bytes of UTF-8") for odd in NO_UTF8),
    ("priority", "urgent", "must be interactive, default or batch; got 'urgent'"),
    ("priority", "default ", "must be interactive, default or batch"),
    ("tenant", "a:b", "tenant must be 1 to 64 letters"),
    ("tenant", "*", "tenant must be 1 to 64 letters"),
    ("tenant", "", "tenant must be 1 to 64 letters"),
    ("tenant", "a" * 65, "tenant must be 1 to 64 letters"),
    ("deadline", "soon", "deadline must be whole ms"),
    ("deadline", "1.5", "deadline must be whole ms"),
    ("deadline", "inf", "deadline must be whole ms"),
    ("deadline", "-1", "deadline must be whole ms"),
    ("deadline", "1" * 13, "deadline must be whole ms"),
    ("delay", "nan", "delay must be whole ms"),
    ("max_failures", "many", "max failures must be 0 to 1000"),
    ("max_failures", "1001", "max failures must be 0 to 1000"),
    ("on_disconnect", "", "on_disconnect must be continue or cancel"),
]


async def test_a_field_of_a_wrong_form_is_refused_by_name_and_nothing_of_its_call_is_accepted(lab):
    for field, value, said in WRONG:
        with pytest.raises(ResponseError, match=rf"^BADJOB job 2: .*{said}"):
            await submit(lab, job(), job(**{field: value}), job())
    assert await lab.raw.keys(f"{lab.keys.prefix}:*") == []


async def test_a_call_with_too_few_fields_or_without_a_digest_is_refused(lab):
    for fields, width in ((job()[:11], 11), (job()[:11], 12), (job(), "x"), ([*job(), 1], 12)):
        with pytest.raises(ResponseError, match=r"^BADJOB a job has 12 fields"):
            await submit(lab, fields, width=width)
    for digest in ("", "two words"):
        with pytest.raises(ResponseError, match=r"^BADJOB job 1: payload digest must be a word"):
            await submit(lab, job(key="k", digest=digest))
    assert await lab.raw.keys(f"{lab.keys.prefix}:*") == []


async def test_the_largest_and_smallest_that_this_library_lets_through_are_taken(lab):
    decade_s = 10 * 365 * 86400.0
    largest = {"model": "\U0001f600" * 256, "tenant": "a" * 64, "idempotency_key": "\u00e9 " * 128}
    times = {"deadline_s": decade_s, "delay_s": decade_s, "max_failures": 1000}
    await lab.submit(**largest, **times, priority="batch", on_disconnect="cancel")
    await lab.submit(model=" ", tenant="-", deadline_s=0.001, delay_s=1e-9, max_failures=0)


async def test_fields_of_later_versions_are_passed_over(lab):
    later = job()
    ((outcome, job_id),) = await submit(lab, [*later, "new"], width=13)
    assert (outcome, job_id.decode()) == (0, later[0])


@pytest.mark.parametrize("job_id", ["x", "", b"\xff\xfe", f"{ID}.7", "a:b c"])
async def test_a_job_under_an_impossible_id_fails_alone_where_it_is_met(lab, job_id):
    queue = await lab.queue()
    good, planted = await lab.submit(), lab.keys.job("") + str(job_id)
    if isinstance(job_id, bytes):
        planted = lab.keys.job("").encode() + job_id
    await lab.raw.copy(lab.keys.job(good), planted)
    entry = await lab.raw.xadd(lab.keys.queue("m", "default"), {"j": job_id})
    await lab.raw.hset(planted, mapping={"entry": entry})
    assert [claimed.id for claimed in await queue.claim(9)] == [good]
    fields = await lab.raw.hmget(planted, "state", "error_code", "attempt")
    assert fields == [b"failed", b"undecodable", b"0"]
    assert await lab.entries() == 1
    assert await queue.reclaim() == 0


async def test_a_limit_that_is_no_number_is_the_workers_own_and_stops_no_reclaim(lab):
    queue = await lab.queue(max_failures=0)
    ids = [await lab.submit() for _ in range(3)]
    for job_id in ids:
        await lab.raw.hset(lab.keys.job(job_id), "max_failures", "many")
    first, *others = await queue.claim(3)
    assert await queue.fail(first, "oom", "no memory", retryable=True) == "failed"
    for claimed in others:
        await lab.expire_lease(claimed)
    assert await queue.reclaim() == 2
    assert [await lab.state(job_id) for job_id in ids] == ["failed"] * 3


async def test_a_log_that_nobody_can_read_fails_its_job_alone(lab):
    queue = await lab.queue()
    bad, good = await lab.submit(), await lab.submit()
    (claimed,) = await queue.claim(1)
    await queue.emit([(bad, 1, [0, b"\x82\xa1v\x01\xa9token_ids\x05", 1])])
    await queue.release([claimed], "test")
    assert [one.id for one in await queue.claim(2)] == [good]
    assert (await lab.fields(bad))["error_code"] == "undecodable"


async def test_bytes_that_are_no_text_hide_nothing_from_who_looks_at_the_fleet(lab):
    queue = await lab.queue()
    given = job(model="m\u00e9 \u65e5\U0001f600", key=b"k\xff", digest="d")
    await submit(lab, given)
    await lab.raw.xadd(lab.keys.queue("m", "default").encode() + b"\xff", {"j": "x"})
    await lab.submit()
    await queue.claim(1)
    depths = {(q.model, q.priority): q for q in await FleetReader(lab.connection).queues()}
    assert depths["m", "default"].running == 1
    assert depths["m\u00e9 \u65e5\U0001f600", "default"].waiting == 1
    assert ("m", "default\ufffd") in depths
    assert (await lab.client().job(given[0]).status()).state == "waiting"


async def test_a_dead_letter_that_nobody_can_read_is_listed_and_not_replayed(lab):
    queue = await lab.queue()
    wrong = job(request=b"hello")
    await submit(lab, wrong)
    assert await queue.claim(1) == []
    admin = Admin(lab.connection)
    assert [letter.job_id for letter in await admin.dead()] == [wrong[0]]
    with pytest.raises(ValueError, match="cannot be read"):
        await admin.replay(wrong[0])
