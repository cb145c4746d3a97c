"""Queues, workers and dead letters seen from outside, and what the doctor finds."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tokenfleet.producer.connection import Connection
from tokenfleet.producer.embedded import EmbeddedServer
from tokenfleet.producer.errors import InvalidJob, JobExpired
from tokenfleet.producer.keys import GROUP, partition_for_key, partition_of
from tokenfleet.producer.protocol import SamplingParams
from tokenfleet.producer.rights import producer_rules
from tokenfleet.worker.commands import doctor_server
from tokenfleet.worker.commands.admin import Admin, QueueDepth
from tokenfleet.worker.commands.doctor import BAD, GOOD, WARN, Doctor, Finding
from tokenfleet.worker.commands.doctor_server import ServerChecks
from tokenfleet.worker.rights import operator_rules


async def a_dead_job(lab: Any, **fields: Any) -> str:
    queue = await lab.queue()
    await lab.submit(max_failures=0, **fields)
    (job,) = await queue.claim(1)
    await queue.fail(job, "engine_died", "the engine process died", retryable=True)
    return str(job.id)


async def examined(lab: Any) -> dict[str, Finding]:
    return {finding.check: finding for finding in await Doctor(lab.connection).examine()}


async def test_depths_count_waiting_and_running_jobs_and_those_handed_back(lab: Any) -> None:
    queue = await lab.queue()
    for _ in range(3):
        await lab.submit()
    await lab.submit(priority="batch")
    await lab.submit(delay_s=60)
    first, second = await queue.claim(2)
    await queue.release([first], "drain")
    admin = Admin(lab.connection)
    depths = {depth.priority: depth for depth in await admin.queues()}
    assert (depths["default"].waiting, depths["default"].running) == (2, 1)
    assert (depths["batch"].waiting, depths["batch"].running) == (1, 0)
    assert depths["batch"].oldest_s is not None
    assert depths["interactive"] == QueueDepth("m", "interactive")
    assert await admin.delayed() == 1
    assert second.id != first.id


async def test_a_cancelled_waiting_job_does_not_break_the_count(lab: Any) -> None:
    queue = await lab.queue()
    client = lab.client()
    gone, stays = await lab.submit(), await lab.submit()
    await client.job(gone).cancel()
    (claimed,) = await queue.claim(5)
    assert claimed.id == stays
    depths = {depth.priority: depth for depth in await Admin(lab.connection).queues()}
    assert (depths["default"].waiting, depths["default"].running) == (0, 1)


async def test_workers_are_listed_while_they_live(lab: Any) -> None:
    queue = await lab.queue("w1")
    await queue.heartbeat({"slots": 4})
    admin = Admin(lab.connection)
    (worker,) = await admin.workers()
    assert (worker["worker"], worker["model"], worker["slots"]) == ("w1", "m", "4")
    await queue.leave()
    assert await admin.workers() == []


async def test_a_dead_letter_says_why_and_what_it_asked_for(lab: Any) -> None:
    job_id = await a_dead_job(lab, tenant="acme", sampling=SamplingParams(max_tokens=3))
    admin = Admin(lab.connection)
    (letter,) = await admin.dead()
    assert (letter.job_id, letter.error_code) == (job_id, "engine_died")
    assert letter.failures == 1
    shown, request = await admin.dead_one(job_id)
    assert shown == letter
    assert request is not None
    assert (request.tenant, request.sampling.max_tokens) == ("acme", 3)


async def test_a_replay_is_a_new_job_and_a_repeated_one_is_the_same(lab: Any) -> None:
    job_id = await a_dead_job(lab, tenant="acme", prompt="again", metadata={"k": 1})
    admin = Admin(lab.connection)
    new_id = await admin.replay(job_id)
    assert new_id != job_id
    assert await lab.state(job_id) == "failed", "what has ended stays as it ended"
    assert await admin.dead() == []
    queue = await lab.queue("w2")
    (job,) = await queue.claim(5)
    assert (job.id, job.request.prompt, job.request.tenant) == (new_id, "again", "acme")
    assert job.request.metadata == {"k": 1}
    with pytest.raises(JobExpired, match="dead letter"):
        await admin.replay(job_id)
    await lab.raw.zadd(lab.keys.dead, {job_id: 1})  # as if the first replay had died half-way
    assert await admin.replay(job_id) == new_id


async def test_a_replay_lies_in_the_partitions_that_the_fleet_has(valkey_lab: Any) -> None:
    lab, job_id = valkey_lab, await a_dead_job(valkey_lab)
    connection = Connection(lab.server.url, namespace=lab.namespace, partitions=7)
    new_id = await Admin(connection).replay(job_id)
    assert partition_of(new_id) == partition_for_key("default", f"replay:{job_id}", 7)
    await connection.aclose()


async def test_a_payload_that_nobody_can_read_is_listed_and_not_replayed(lab: Any) -> None:
    queue = await lab.queue()
    job_id = await lab.submit()
    await lab.raw.hset(lab.keys.job(job_id), "request", b"\xc1 nonsense")
    assert await queue.claim(1) == []
    admin = Admin(lab.connection)
    (letter,) = await admin.dead()
    assert letter.error_code == "undecodable"
    _, request = await admin.dead_one(job_id)
    assert request is None
    with pytest.raises(InvalidJob, match="cannot be read"):
        await admin.replay(job_id)


async def test_the_doctor_is_content_with_a_good_server_and_a_worker(lab: Any) -> None:
    queue = await lab.queue()
    await queue.heartbeat({})
    findings = await examined(lab)
    checks = ("version", "latency", "scripts", "access", "encryption", "memory", "persistence")
    checks += ("copies", "clock", "keys", "groups", "workers", "stuck jobs", "dead letters")
    assert tuple(findings) == checks
    assert findings["persistence"].level == WARN, "no append-only file on this server"
    assert "appendonly" in findings["persistence"].advice
    others = set(findings) - {"persistence"}
    assert all(findings[check].level == GOOD for check in others), findings


async def test_the_doctor_sees_jobs_that_nobody_serves(lab: Any) -> None:
    await lab.queue()
    await lab.submit()
    finding = (await examined(lab))["workers"]
    assert finding.level == BAD
    assert "no live worker serves it" in finding.found
    assert "--model-name m" in finding.advice


async def test_the_doctor_sees_a_missing_group_and_dead_letters(lab: Any) -> None:
    await a_dead_job(lab)
    await lab.raw.xgroup_destroy(lab.keys.queue("m", "default"), GROUP)
    findings = await examined(lab)
    assert findings["groups"].level == WARN
    assert "engine_died" in findings["dead letters"].found


async def test_the_doctor_sees_a_server_that_drops_keys(own_lab: Any) -> None:
    await own_lab.raw.config_set("maxmemory-policy", "allkeys-lru")
    assert (await examined(own_lab))["memory"].level == WARN
    await own_lab.raw.config_set("maxmemory", "100mb")
    finding = (await examined(own_lab))["memory"]
    assert finding.level == BAD
    assert "noeviction" in finding.advice
    assert (await examined(own_lab))["persistence"].level == GOOD


async def test_the_doctor_sees_jobs_whose_lease_nobody_looks_at(lab: Any) -> None:
    queue = await lab.queue(lease_s=5)
    job_id = await lab.submit()
    (job,) = await queue.claim(1)
    assert (await examined(lab))["stuck jobs"].level == GOOD
    await lab.expire_lease(job)
    finding = (await examined(lab))["stuck jobs"]
    assert finding.level == BAD
    assert job_id in finding.found


async def test_the_doctor_sees_a_memory_that_is_nearly_full(own_lab: Any) -> None:
    used = (await own_lab.raw.info("memory"))["used_memory"]
    await own_lab.raw.config_set("maxmemory", int(used * 1.1))
    finding = (await examined(own_lab))["memory"]
    assert (finding.level, "of it used" in finding.found) == (WARN, True)


async def test_the_doctor_sees_a_replica_and_a_master_with_one(own_lab: Any) -> None:
    with EmbeddedServer() as replica:
        follower = Connection(replica.url, namespace=own_lab.namespace)
        await follower.execute("REPLICAOF", "127.0.0.1", own_lab.server.port)
        findings = {f.check: f for f in await Doctor(follower).examine()}
        assert (findings["copies"].level, findings["copies"].found) == (BAD, "this is a replica")
        await follower.aclose()

        async def followed() -> bool:
            return bool((await own_lab.raw.info("replication"))["connected_slaves"])

        await own_lab.until(followed)
        finding = (await examined(own_lab))["copies"]
        assert (finding.level, finding.found.split(";")[0]) == (GOOD, "1 replica(s)")


async def test_the_doctor_says_what_a_user_may_not_ask_and_looks_at_the_rest(lab: Any) -> None:
    rules = producer_rules(lab.namespace)
    await lab.raw.execute_command("ACL", "SETUSER", "nosy", "reset", "on", ">pw", *rules)
    url = lab.server.url.replace("//", "//nosy:pw@")
    connection = Connection(url, namespace=lab.namespace)
    findings = {f.check: f for f in await Doctor(connection).examine()}
    await connection.aclose()
    assert findings["scripts"].level == GOOD
    assert {findings[name].level for name in ("memory", "persistence")} == {WARN}
    assert "tokenfleet acl operator" in findings["groups"].advice
    rules = operator_rules(lab.namespace)
    await lab.raw.execute_command("ACL", "SETUSER", "nosy", "reset", "on", ">pw", *rules)
    connection = Connection(url, namespace=lab.namespace)
    findings = {f.check: f for f in await Doctor(connection).examine()}
    await connection.aclose()
    warned = {name for name, finding in findings.items() if finding.level != GOOD}
    assert warned == {"persistence", "workers"}


@pytest.mark.parametrize(
    ("url", "access", "encryption"),
    [
        ("redis://redis.example:6379/0", WARN, WARN),
        ("redis://:pw@redis.example:6379/0", GOOD, WARN),
        ("rediss://:pw@redis.example:6379/0", GOOD, GOOD),
        ("redis://localhost:6379/0", GOOD, GOOD),
        ("unix:///run/redis.sock", GOOD, GOOD),
    ],
)
async def test_the_doctor_sees_a_server_that_anybody_can_read(
    url: str, access: str, encryption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = Connection(url, namespace="t")

    async def whoami(*_: str) -> bytes:
        return b"default"

    monkeypatch.setattr(connection, "ask_server", whoami)
    checks = ServerChecks(connection)
    levels = [(await check())[0].level for check in (checks.access, checks.encryption)]
    assert levels == [access, encryption]


async def test_the_doctor_takes_one_busy_moment_for_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the machine that it runs on: the way to the server is no longer for it."""
    now, pings = [1000.0], iter([9.0, *[0.001] * 12, 9.0, *[0.001] * 8])
    connection = Connection("redis://localhost:6379/0", namespace="t")

    async def ask_server(command: str) -> Any:
        if command == "PING":
            now[0] += next(pings)
            return b"PONG"
        told = divmod(now[0], 1)
        now[0] += 9.0
        return int(told[0]), int(told[1] * 1e6)

    monkeypatch.setattr(connection, "ask_server", ask_server)
    for name in ("time", "perf_counter"):
        monkeypatch.setattr(doctor_server.time, name, lambda: now[0])
    checks = ServerChecks(connection)
    levels = [(await check())[0].level for check in (checks.latency, checks.clock)]
    assert levels == [GOOD, GOOD]


def tokenfleet(server: EmbeddedServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tokenfleet.worker.entry", *arguments, "--redis-url", server.url],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


async def test_the_commands_show_what_admin_and_doctor_find(valkey_lab: Any) -> None:
    job_id = await a_dead_job(valkey_lab, prompt="my secret")
    await valkey_lab.submit()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return tokenfleet(valkey_lab.server, *arguments, "--namespace", valkey_lab.namespace)

    depth = run("queue", "depth", "--model", "m", "-o", "json")
    assert json.loads(depth.stdout) == {"waiting": 1, "running": 0, "delayed": 0}
    listed = run("queue", "list")
    assert listed.returncode == 0
    assert "interactive" in listed.stdout
    (letter,) = json.loads(run("dead", "list", "-o", "json").stdout)
    assert (letter["job_id"], letter["error_code"]) == (job_id, "engine_died")
    shown = run("dead", "show", job_id)
    assert "engine_died" in shown.stdout
    assert "my secret" not in shown.stdout
    assert "my secret" in run("dead", "show", job_id, "--with-prompt").stdout
    doctor = run("doctor", "-o", "json")
    assert doctor.returncode == 1, "a job waits and nobody serves it"
    assert {finding["check"] for finding in json.loads(doctor.stdout)} >= {"version", "workers"}
    (replayed,) = json.loads(run("dead", "replay", "--all", "-o", "json").stdout)
    assert (replayed["job_id"], replayed["error"]) == (job_id, None)
    again = run("dead", "replay", job_id)
    assert again.returncode == 1
