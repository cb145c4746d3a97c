"""What a kill costs: a job goes on where its log ends, and little is computed twice."""

from __future__ import annotations

import asyncio

from tokenfleet.producer import semconv

DECODED, PREFILLED = f"{semconv.DECODE_TOKENS}_total", f"{semconv.PREFILL_TOKENS}_total"


async def test_a_job_killed_at_300_of_400_tokens_goes_on_and_repeats_less_than_5_percent(
    model_fleet,
) -> None:
    first = await model_fleet.start(flush_interval_ms=25)
    prompt = "a prompt of some length"
    job = await model_fleet.submit(prompt, 400)
    following = asyncio.ensure_future(model_fleet.follow(job))
    while await first.metric(DECODED) < 300:  # noqa: ASYNC110 - a scrape has no event to wait for
        await asyncio.sleep(0.005)
    decoded = await first.metric(DECODED)
    await first.kill()
    second = await model_fleet.start(flush_interval_ms=25)
    (followed,) = await following
    again, prefilled = await second.metric(DECODED), await second.metric(PREFILLED)
    resumed_at = next(e.offset for e in followed.events if e.attempt > 1)
    twice = max(0, decoded + again - 400)
    print(
        f"killed after {decoded:.0f} tokens (last scrape), went on at {resumed_at} with "
        f"{prefilled:.0f} tokens re-prefilled: {twice:.0f} of 400 output tokens decoded twice "
        f"({twice / 400:.1%})"
    )
    assert resumed_at > 200
    assert prefilled >= len(prompt) + resumed_at - 1
    assert again <= 400 - resumed_at + 1  # nothing before the log's end is decoded again
    assert twice < 0.05 * 400
