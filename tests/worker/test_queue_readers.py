"""Jobs that end with their readers: gone is who stays away, not who has lost a connection."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

from tokenfleet.producer import channel_line


async def test_a_waiting_job_is_run_whose_reader_has_only_just_lost_its_connection(valkey_lab):
    queue = await valkey_lab.queue()
    job_id = await _watched(valkey_lab)
    assert [job.id for job in await queue.claim(1)] == [job_id]


async def test_a_waiting_job_whose_reader_stays_away_is_not_run(valkey_lab):
    queue = await valkey_lab.queue()
    job_id = await _watched(valkey_lab)
    await _alone_for(valkey_lab, job_id, 3600)
    assert await queue.claim(1) == []
    assert await valkey_lab.state(job_id) == "cancelled"


async def test_a_renewal_ends_a_job_whose_reader_stays_away_only(valkey_lab):
    queue = await valkey_lab.queue()
    job_id = await _watched(valkey_lab)
    jobs = await queue.claim(1)
    await queue.renew(jobs)
    assert "cancel" not in await valkey_lab.fields(job_id)
    await _alone_for(valkey_lab, job_id, 3600)
    await queue.renew(jobs)
    assert "cancel" in await valkey_lab.fields(job_id)


async def test_an_absence_is_counted_anew_where_the_clock_was_set_back(valkey_lab):
    queue = await valkey_lab.queue()
    job_id = await _watched(valkey_lab)
    jobs = await queue.claim(1)
    await _alone_for(valkey_lab, job_id, -3600)
    await queue.renew(jobs)
    fields = await valkey_lab.fields(job_id)
    assert int(fields["alone"]) <= await valkey_lab.server_ms()
    assert "cancel" not in fields


async def test_a_reader_that_came_back_is_not_held_its_absence_against(valkey_lab, until):
    queue = await valkey_lab.queue()
    job_id = await _watched(valkey_lab)
    jobs = await queue.claim(1)
    await _alone_for(valkey_lab, job_id, 3600)
    reader = valkey_lab.client().link.reader
    await reader.subscribe(job_id)
    await queue.renew(jobs)
    fields = await valkey_lab.fields(job_id)
    assert "cancel" not in fields
    assert "alone" not in fields


def test_a_reader_has_time_for_two_of_its_longest_pauses_and_a_slot_is_free_within_a_second():
    common = files("tokenfleet.producer.lua").joinpath("common.lua").read_text()
    (grace_ms,) = re.findall(r"GRACE_MS = (\d+)", common)
    assert 2000 * max(channel_line._PAUSES_S) <= int(grace_ms) < 1000


async def _watched(lab: Any) -> str:
    """A job that ends with its readers, had one, and has none."""
    job_id: str = await lab.submit(on_disconnect="cancel")
    await lab.raw.hset(lab.keys.job(job_id), "watched", 1)
    return job_id


async def _alone_for(lab: Any, job_id: str, seconds: float) -> None:
    since = await lab.server_ms() - int(seconds * 1000)
    await lab.raw.hset(lab.keys.job(job_id), "alone", since)
