"""`tokenfleet queue limit`, `pause` and `resume`, as people run them."""

from __future__ import annotations

import json

import pytest

from tokenfleet.producer import Client, QueueFull


def test_limits_are_set_shown_and_taken_away(valkey, run) -> None:
    at = ("--redis-url", valkey.url, "--namespace", "limits", "-o", "json")
    assert json.loads(run("queue", "limit", *at).stdout) == []
    said = run("queue", "limit", "acme", "--running", "3", "--waiting", "1", *at)
    assert json.loads(said.stdout) == [{"tenant": "acme", "running": 3, "waiting": 1}]
    with Client(valkey.url, namespace="limits", tenant="acme") as client:
        client.submit(model="m", prompt="x")
        with pytest.raises(QueueFull):
            client.submit(model="m", prompt="x")
    run("queue", "limit", "acme", "--remove", *at)
    assert json.loads(run("queue", "limit", *at).stdout) == []


def test_pausing_a_model_that_nobody_knows_is_said_to_be_perhaps_a_slip(valkey, run) -> None:
    at = ("--redis-url", valkey.url, "--namespace", "slip")
    with Client(valkey.url, namespace="slip") as client:
        client.submit(model="smollm2", prompt="x")
    said = run("queue", "pause", "smolm2", *at)
    assert said.returncode == 0
    assert "no worker serves 'smolm2'" in said.stderr
    assert "known: smollm2" in said.stderr
    assert "serves" not in run("queue", "pause", "smollm2", *at).stderr


def test_limits_without_a_tenant_are_bad_input(valkey, run) -> None:
    assert run("queue", "limit", "--running", "3", "--redis-url", valkey.url).returncode == 2


def test_a_paused_queue_is_shown_as_paused_until_it_is_resumed(valkey, run) -> None:
    at = ("--redis-url", valkey.url, "--namespace", "paused", "-o", "json")
    with Client(valkey.url, namespace="paused") as client:
        job = client.submit(model="m", prompt="x", priority="batch")
        run("queue", "pause", "m", "--priority", "batch", *at)
        (row,) = json.loads(run("queue", "list", *at).stdout)
        assert (row["priority"], row["waiting"], row["paused"]) == ("batch", 1, True)
        assert job.status().paused
        assert json.loads(run("queue", "resume", "m", *at).stdout) == []
        assert not job.status().paused
