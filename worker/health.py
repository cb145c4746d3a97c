"""/healthz, /readyz and /metrics over the smallest HTTP there is.

/healthz answers while the event loop turns. /readyz says 200 only while this worker would take a
job now, and otherwise why not, one reason a line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus

MAX_REQUEST_BYTES = 8192
REQUEST_TIMEOUT_S = 5.0
TEXT = "text/plain; charset=utf-8"


class HealthServer:
    """Serves probes and scrapes on one port.

    Args:
        reasons: why the worker is not ready; empty when it is.
        metrics: Accept header -> content type and body of /metrics.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        reasons: Callable[[], list[str]],
        metrics: Callable[[str], tuple[str, bytes]],
    ) -> None:
        self._host = host
        self._port = port
        self._reasons = reasons
        self._metrics = metrics
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Listen; returns the port.

        Raises:
            OSError: the address is taken or not ours.
        """
        self._server = await asyncio.start_server(
            self._serve, self._host, self._port, limit=MAX_REQUEST_BYTES
        )
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        """Close the port."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def answer(self, method: str, path: str, accept: str = "") -> tuple[HTTPStatus, str, bytes]:
        """Status, content type and body for one request."""
        if method not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, TEXT, b"only GET\n"
        match path.partition("?")[0]:
            case "/healthz":
                return HTTPStatus.OK, TEXT, b"ok\n"
            case "/readyz":
                reasons = self._reasons()
                status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
                return status, TEXT, ("\n".join(reasons or ["ready"]) + "\n").encode()
            case "/metrics":
                return HTTPStatus.OK, *self._metrics(accept)
            case _:
                return HTTPStatus.NOT_FOUND, TEXT, b"/healthz, /readyz or /metrics\n"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._response(head))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return  # whoever asked has gone, or did not ask in HTTP
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _response(self, head: bytes) -> bytes:
        first, *fields = head.decode("latin-1").split("\r\n")
        words = first.split()
        if len(words) != 3:
            status, kind, body = HTTPStatus.BAD_REQUEST, TEXT, b"not HTTP\n"
        else:
            status, kind, body = self.answer(words[0], words[1], _field(fields, "accept"))
        lines = (
            f"HTTP/1.1 {status.value} {status.phrase}",
            f"Content-Type: {kind}",
            f"Content-Length: {len(body)}",
            "Connection: close",
        )
        sent = b"" if words[:1] == ["HEAD"] else body
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + sent


def _field(lines: list[str], name: str) -> str:
    """The value of a header field; empty when it is not there."""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip().lower() == name), "")
