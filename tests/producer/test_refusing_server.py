"""A server that is there and takes nothing for now: the call may be made again."""

from __future__ import annotations

import pytest

from tokenfleet.producer.errors import BrokerUnavailable


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [("min-replicas-to-write", 1, "NOREPLICAS"), ("maxmemory", 1, "out of memory")],
)
async def test_a_server_that_takes_no_writes_is_unavailable(bare_lab, setting, value, said):
    client = bare_lab.client()
    job = await client.submit(model="m", prompt="x")
    await bare_lab.raw.config_set(setting, value)
    with pytest.raises(BrokerUnavailable, match=said) as found:
        await client.submit(model="m", prompt="x")
    assert found.value.retryable
    await bare_lab.raw.config_set(setting, 0)
    assert await job.cancel() == "cancelled"
