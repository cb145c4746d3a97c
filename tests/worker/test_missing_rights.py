"""A user who lacks one right: each script does all of its work, or none of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tokenfleet.producer import AsyncClient, BrokerUnsupported
from tokenfleet.producer.kinds import samples
from tokenfleet.producer.protocol import Choice, JobResult
from tokenfleet.producer.rights import producer_rules
from tokenfleet.worker.claims import flat
from tokenfleet.worker.queue import JobQueue
from tokenfleet.worker.rights import worker_rules

RESULT = JobResult(choices=(Choice(text="ab", token_ids=(1, 2), finish_reason="length"),))
NEEDED_TO_ASK = {"+eval", "+evalsha", "+select", "+ping"}
LIMITED = "t"
"""The jobs are of a tenant with limits: then scripts write most."""


def without_each(rules: list[str], prefix: str) -> list[list[str]]:
    """The rules without one command, for each; and with the keys of all sorts but one, for each."""
    commands = [rule for rule in rules if rule.startswith("+") and rule not in NEEDED_TO_ASK]
    fewer = [[rule for rule in rules if rule != command] for command in commands]
    keys = [key.removesuffix(":x") for key in samples(prefix, None)]
    others = [rule for rule in rules if not rule.startswith("~")]
    return fewer + [
        [*others, *(f"~{one}*" for one in keys if not one.startswith(key))] for key in keys
    ]


EVERYTHING = """
local found, keys = {}, redis.call('KEYS', ARGV[1] .. ':*')
table.sort(keys)
for i, key in ipairs(keys) do
  found[i] = { key, redis.call('DUMP', key), redis.call('PEXPIRETIME', key) }
end
return found
"""


async def everything(lab: Any) -> Any:
    """All that the namespace holds, groups and their consumers too."""
    return await lab.raw.eval(EVERYTHING, 0, lab.keys.prefix)


class User:
    """One whose rights change, and whoever works as him."""

    def __init__(self, lab: Any) -> None:
        self._lab = lab
        self.url = lab.server.url.replace("//", f"//{lab.namespace}:pw@")

    async def may(self, rules: list[str]) -> None:
        await self._lab.raw.execute_command(
            "ACL", "SETUSER", self._lab.namespace, "reset", "on", ">pw", *rules
        )

    async def dismiss(self) -> None:
        await self._lab.raw.execute_command("ACL", "DELUSER", self._lab.namespace)


@pytest.fixture
async def user(lab):
    user = User(lab)
    await lab.connection.execute("HSET", lab.keys.limits, LIMITED, "1000 1000")
    yield user
    await user.dismiss()


async def whole_or_nothing(lab: Any, move: Callable[[], Awaitable[Any]]) -> bool:
    """Whether the move was made; where it was refused, by name, nothing has changed."""
    before, refusal = await everything(lab), ""
    try:
        await move()
    except BrokerUnsupported as error:
        refusal = str(error)
    if refusal:
        assert "tokenfleet acl" in refusal
        assert await everything(lab) == before, refusal
    return not refusal


async def test_a_client_that_lacks_a_right_leaves_nothing_half_written(lab, user):
    options = {"namespace": lab.namespace, "tenant": LIMITED}
    outcomes = set()
    for rules in without_each(producer_rules(lab.namespace), lab.keys.prefix):
        await user.may(rules)
        waiting = await lab.submit(tenant=LIMITED)
        async with AsyncClient(user.url, **options) as client:
            asked = {"idempotency_key": "k", "deadline_s": 60}
            for move in (
                lambda client=client, asked=asked: client.submit(model="m", prompt="x", **asked),
                lambda client=client, waiting=waiting: client.job(waiting).status(),
                lambda client=client, waiting=waiting: client.job(waiting).cancel(),
            ):
                outcomes.add(await whole_or_nothing(lab, move))
        await lab.raw.delete(*await lab.raw.keys(f"{lab.keys.prefix}:[eji]*"))
    assert outcomes == {True, False}


async def moves_of_a_worker(lab: Any, queue: JobQueue) -> list[Callable[[], Awaitable[Any]]]:
    """Each as it comes in a life of jobs; what they begin with was made by somebody who may."""
    able = await lab.queue(queue.worker_id)
    for _ in range(6):
        await lab.submit(tenant=LIMITED)
    jobs = await able.claim(4)
    token = lab.token(0, 1, 2)
    return [
        lambda: queue.claim(1),
        lambda: queue.renew(jobs),
        lambda: queue.emit([lab.emission(jobs[0], 0, token)]),
        lambda: queue.finish(jobs[1], flat([token]), RESULT),
        lambda: queue.release([jobs[2]], "test"),
        lambda: queue.fail(jobs[3], "code", "words", retryable=True),
        lambda: queue.release_phantoms(set()),
        lambda: queue.reclaim(),
        lambda: queue.heartbeat({}),
    ]


async def test_a_worker_that_lacks_a_right_leaves_nothing_half_written(lab, user):
    outcomes = set()
    for rules in without_each(worker_rules(lab.namespace), lab.keys.prefix):
        await user.may(rules)
        queue = JobQueue(user.url, namespace=lab.namespace, model_name="m", worker_id="w1")
        for move in await moves_of_a_worker(lab, queue):
            outcomes.add(await whole_or_nothing(lab, move))
        await queue.aclose()
        await lab.raw.delete(*await lab.raw.keys(f"{lab.keys.prefix}:[!l]*"))
    assert outcomes == {True, False}


async def test_a_worker_says_at_its_start_which_right_is_missing(lab, user):
    for missing in ("+xclaim", "+srandmember", "+xgroup|delconsumer"):
        rules = [rule for rule in worker_rules(lab.namespace) if rule != missing]
        await user.may(rules)
        queue = JobQueue(user.url, namespace=lab.namespace, model_name="m", worker_id="w1")
        name = missing.removeprefix("+").replace("|", " ").upper()
        with pytest.raises(BrokerUnsupported, match=name):
            await queue.ensure()
        await queue.aclose()


async def test_rights_that_are_taken_away_later_are_asked_for_again_after_the_first_refusal(
    lab, user
):
    rules = worker_rules(lab.namespace)
    await user.may(rules)
    queue = JobQueue(user.url, namespace=lab.namespace, model_name="m", worker_id="w1")
    await queue.ensure()
    await user.may([rule for rule in rules if rule != "+evalsha"])
    with pytest.raises(BrokerUnsupported):
        await queue.claim(1)
    await user.may([rule for rule in rules if rule != "+hincrby"])
    await lab.submit()
    assert not await whole_or_nothing(lab, lambda: queue.claim(1))
    await user.may(rules)
    assert len(await queue.claim(1)) == 1
    await queue.aclose()
