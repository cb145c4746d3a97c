"""Serving: listen, say where, end in order.

SIGTERM: no new connections, running requests go on for up to `grace_s`, exit 0; what still runs
then is cut, and jobs that end with their reader are cancelled. A second Ctrl-C cuts at once.

Invariant: the process says its address before it takes the first request.
"""

from __future__ import annotations

import logging
import math
import signal
import socket
from types import FrameType

import uvicorn

from tokenfleet.producer.gateway.app import create_app
from tokenfleet.producer.gateway.settings import GatewaySettings, SettingsError

BACKLOG = 2048

log = logging.getLogger(__name__)


def serve(settings: GatewaySettings) -> None:
    """Serve until told to end.

    Raises:
        SettingsError: the address is taken, or the keys cannot be read.
    """
    app = create_app(settings)
    listener = _listen(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    config = uvicorn.Config(
        app,
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(settings.grace_s),
        ws="none",
        lifespan="on",
    )
    server = uvicorn.Server(config)
    # uvicorn takes the signals while it serves, and raises them again for whoever had them before;
    # drained is exit code 0 here
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _handled)
    log.info("gateway_listens", extra={"fields": {"host": host, "port": port}})
    with listener:
        server.run(sockets=[listener])
    log.info("gateway_stopped")


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def _handled(_number: int, _frame: FrameType | None) -> None:
    """The signal has done its work."""
