"""Serving: listen, say where, end in order.

SIGTERM: not ready any more; `drain_delay_s` later no new connections, and running requests go on
for up to `grace_s`; exit 0. What still runs then is cut, and jobs that end with their reader are
cancelled. A second signal waits for no load balancer, a second Ctrl-C for nothing.

Invariant: the process says its address before it takes the first request.
"""

from __future__ import annotations

import logging
import math
import signal
import socket
import tempfile
import time
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from tokenfleet.producer.gateway.app import create_app
from tokenfleet.producer.gateway.settings import GatewaySettings, SettingsError

BACKLOG = 2048
KEEP_ALIVE_S = 75
"""Longer than the minute that proxies and load balancers keep idle connections: of two that close
at the same time, the one that has just been sent a request answers it with 502."""

log = logging.getLogger(__name__)


def serve(settings: GatewaySettings) -> None:
    """Serve until told to end.

    Raises:
        SettingsError: the address is taken, the keys cannot be read, or files cannot be written.
    """
    app = create_app(settings)
    if settings.files_dir is not None:
        _make(settings.files_dir)
    listener = _listen(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    config = uvicorn.Config(
        app,
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(settings.grace_s),
        ws="none",
        lifespan="on",
    )
    server = _Server(config, app, settings.drain_delay_s)
    # uvicorn takes the signals while it serves, and raises them again for whoever had them before;
    # drained is exit code 0 here
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _handled)
    log.info("gateway_listens", extra={"fields": {"host": host, "port": port}})
    with listener:
        server.run(sockets=[listener])
    log.info("gateway_stopped")


class _Server(uvicorn.Server):
    """Says that it is about to end before it does."""

    def __init__(self, config: uvicorn.Config, app: Starlette, delay_s: float) -> None:
        super().__init__(config)
        self._app = app
        self._delay_s = delay_s
        self._exit_at: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._delay_s and self._exit_at is None and hasattr(self._app.state, "gateway"):
            self._app.state.gateway.draining = True
            self._exit_at = time.monotonic() + self._delay_s
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        if self._exit_at is not None and time.monotonic() >= self._exit_at:
            self.should_exit = True
        return await super().on_tick(counter)


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        problem = f"files_dir {directory} cannot be written: {error.strerror}"
        raise SettingsError(problem) from None


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def _handled(_number: int, _frame: FrameType | None) -> None:
    """The signal has done its work."""
