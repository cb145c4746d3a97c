"""The embedded server: there when started, gone when its starter is, whatever became of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from tokenfleet.producer.embedded import EmbeddedServer, _watch, answers, free_port, hold_port
from tokenfleet.producer.errors import BrokerUnavailable

BUS = "--cluster-port"
CHILD = """
import sys
from tokenfleet.producer.embedded import EmbeddedServer
server = EmbeddedServer(options=sys.argv[1:]).start()
print(server.pid, server._scratch, flush=True)
sys.stdin.read()
"""


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
    return "\nState:\tZ" not in status


def children() -> set[int]:
    """Our processes, those that nobody waited for included."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


@pytest.fixture
def folder_of_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[Path]]:
    """The scratch folders that are there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return lambda: set(tmp_path.iterdir())


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
@pytest.mark.parametrize("options", [(), ("--dir", "elsewhere")])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_process_that_started_it(how, options, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    options = [str(tmp_path / one) if one == "elsewhere" else one for one in options]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    number, folder = child.stdout.readline().decode().split()
    pid = int(number)
    assert alive(pid)
    assert Path(folder).is_dir()
    child.send_signal(how)
    child.communicate()
    while alive(pid) or Path(folder).exists():
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_process_that_has_the_id_of_a_server_that_is_gone_is_left_alone(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    other = subprocess.Popen(["sleep", "1000"], cwd=tmp_path)
    watcher = _watch(other.pid, scratch, scratch)
    watcher.communicate()
    assert not scratch.exists()
    assert other.poll() is None
    other.kill()
    other.wait()


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


def test_a_server_that_cannot_start_says_why(folder_of_servers):
    with EmbeddedServer() as server:
        others = folder_of_servers()
        second = EmbeddedServer(port=server.port, options=["--no-such-option", "1"])
        with pytest.raises(BrokerUnavailable, match="Bad directive"):
            second.start()
        assert second.pid is None
        assert folder_of_servers() == others


def test_a_port_that_another_server_has_is_refused_and_nothing_is_left(folder_of_servers):
    with EmbeddedServer() as server:
        others, ours = folder_of_servers(), children()
        second = EmbeddedServer(port=server.port)
        with pytest.raises(BrokerUnavailable, match=f"Failed listening on port {server.port}"):
            second.start()
        assert second.pid is None
        assert folder_of_servers() == others
        assert children() == ours


def test_a_port_of_our_choice_that_is_taken_meanwhile_is_chosen_again():
    with EmbeddedServer() as server:
        second = EmbeddedServer(options=["--cluster-enabled", "yes"], port_options=[BUS])
        second.port = server.port
        third = EmbeddedServer(options=["--cluster-enabled", "yes"], port_options=[BUS])
        third.ports[BUS] = server.port
        with second, third:
            known = {one.port for one in (server, second, third)} | {third.ports[BUS]}
            assert len(known) == 4
            for one in (server, second, third):
                assert answers(one.port, one.pid)


def test_a_server_that_started_keeps_its_port_for_its_clients():
    with EmbeddedServer() as first:
        port = first.port
        first.kill()
        with EmbeddedServer(port=port), pytest.raises(BrokerUnavailable, match="taken"):
            first.start()
        assert first.start().port == port


def test_another_server_on_the_port_is_not_taken_for_ours():
    with EmbeddedServer() as server:
        assert answers(server.port, server.pid)
        assert not answers(server.port, os.getpid())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is held")
def test_a_held_port_is_given_to_nobody_and_a_server_may_listen_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Owner:
        """Whoever holds it."""

    owner, heir = Owner(), Owner()
    port = hold_port(owner)
    offered = iter([port, port, free_port(), port])
    monkeypatch.setattr("tokenfleet.producer.embedded.random.choice", lambda _: next(offered))
    assert hold_port(heir) != port
    del owner
    assert hold_port(heir) == port
    with EmbeddedServer(port=port) as server:
        assert server.port == port
