"""The embedded server: there when started, gone when its starter is, whatever became of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import redis

from tokenfleet.producer.embedded import EmbeddedServer
from tokenfleet.producer.errors import BrokerUnavailable

CHILD = """
import sys
from tokenfleet.producer.embedded import EmbeddedServer
server = EmbeddedServer().start()
print(server.pid, flush=True)
sys.stdin.read()
"""


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
    return "\nState:\tZ" not in status


def test_it_answers_and_leaves_no_process_and_no_file():
    with EmbeddedServer() as server:
        pid, folder = server.pid, server._scratch
        client = redis.Redis.from_url(server.url)
        assert client.ping()
        client.close()
    assert server.pid is None
    assert not alive(pid)
    assert not folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_process_that_started_it(how):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    pid = int(child.stdout.readline())
    assert alive(pid)
    child.send_signal(how)
    child.communicate()
    while alive(pid):
        os.sched_yield()


def test_it_outlives_the_thread_that_started_it():
    server = EmbeddedServer()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    client = redis.Redis.from_url(server.url)
    assert client.ping()
    client.close()
    server.stop()


def test_it_finds_its_data_again_after_a_kill(tmp_path):
    options = ["--appendfsync", "always"]
    with EmbeddedServer(data_dir=tmp_path, options=options) as server:
        client = redis.Redis.from_url(server.url)
        client.set("a", "1")
        server.kill()
        server.start()
        assert client.get("a") == b"1"
        client.close()


def test_a_server_that_cannot_start_says_why():
    with EmbeddedServer() as server:
        second = EmbeddedServer(port=server.port, options=["--no-such-option", "1"])
        with pytest.raises(BrokerUnavailable, match="embedded server"):
            second.start()
        assert second.pid is None
        second.stop()
