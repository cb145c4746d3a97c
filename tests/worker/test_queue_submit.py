"""Submitting: once however often it is repeated, and idempotency keys."""

from __future__ import annotations

from typing import Any

import pytest

from tokenfleet.producer.errors import IdempotencyMismatch
from tokenfleet.producer.keys import keys_of, new_job_id
from tokenfleet.producer.protocol import Choice, JobRequest, JobResult

RESULT = JobResult(choices=(Choice(text="ab", token_ids=(1, 2), finish_reason="length"),))


async def test_a_repeated_submit_makes_one_job(lab):
    draft = lab.submission.draft(_request())
    first = await lab.submission.send([draft])
    second = await lab.submission.send([draft])
    assert first == second
    assert await lab.entries() == 1


async def test_an_idempotency_key_brings_back_the_first_job_also_after_its_end(lab):
    queue = await lab.queue()
    first = await lab.submit(idempotency_key="k")
    (job,) = await queue.claim(1)
    assert await queue.finish(job, [], RESULT)
    (again,) = await lab.submission.send([lab.submission.draft(_request(idempotency_key="k"))])
    assert (again.id, again.deduplicated) == (first, True)


async def test_an_idempotency_key_with_another_payload_is_refused(lab):
    await lab.submit(idempotency_key="k")
    with pytest.raises(IdempotencyMismatch, match="k"):
        await lab.submit(idempotency_key="k", prompt="something else")


async def test_an_idempotency_key_whose_job_is_gone_counts_as_new(lab):
    first = await lab.submit(idempotency_key="k")
    await lab.raw.delete(lab.keys.job(first))
    assert await lab.submit(idempotency_key="k", prompt="something else") != first


async def test_tenants_have_idempotency_keys_of_their_own(lab):
    ids = {await lab.submit(idempotency_key="k", tenant=tenant) for tenant in ("a", "b")}
    assert len(ids) == 2


async def test_the_trace_does_not_count_as_payload(lab):
    draft = lab.submission.draft(_request(idempotency_key="k"), {"traceparent": "00-a-b-01"})
    other = lab.submission.draft(_request(idempotency_key="k"), {"traceparent": "00-c-d-01"})
    first, second = await lab.submission.send([draft]), await lab.submission.send([other])
    assert first[0].id == second[0].id


async def test_a_job_id_names_its_partition(lab):
    job_id = new_job_id(3)
    assert keys_of("n", job_id).prefix == "{n:3}"


def _request(**fields: Any) -> Any:
    return JobRequest(**{"model": "m", "prompt": "x", **fields})
