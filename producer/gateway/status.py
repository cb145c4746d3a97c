"""/status: the fleet on one page, for people; /status/data, the same for programs.

The fleet is looked at every SAMPLE_S seconds, whoever reads the page and however many do.

Invariant: only keys that say `status = true` see it, where keys are asked for at all.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.resources import files
from string import Template

from redis.exceptions import RedisError
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from tokenfleet.producer.errors import TokenfleetError
from tokenfleet.producer.fleet import FleetReader
from tokenfleet.producer.fleet_view import FleetStatus, RunningJob
from tokenfleet.producer.gateway.context import gateway_of
from tokenfleet.producer.gateway.page.fragment import MOST_JOBS, Sample, escaped, fragment
from tokenfleet.producer.gateway.viewers import check_viewer

SAMPLE_S = 2.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Seen:
    at: float
    """Monotonic."""
    tokens_per_s: float
    running: int
    waiting: int


class Sampler:
    """Looks at the fleet again and again and remembers what the plots need.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self,
        fleet: FleetReader,
        *,
        history_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self.history_s = history_s
        self._seen: deque[_Seen] = deque(maxlen=int(history_s / SAMPLE_S) + 1)
        self.status: FleetStatus | None = None
        self.running: list[RunningJob] = []
        self.trouble: str | None = None
        """Why the last look failed; None: it did not."""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(SAMPLE_S)

    async def look(self) -> None:
        """One look. Trouble is remembered and said once."""
        try:
            status = await self._fleet.status()
            self.running = await self._fleet.running(MOST_JOBS)
        except (TokenfleetError, RedisError) as error:
            if self.trouble is None:
                log.warning("fleet_not_seen", extra={"fields": {"error": str(error)}})
            self.trouble = f"Redis was not reached, what is shown is old: {error}"
            return
        self.status, self.trouble = status, None
        self._seen.append(_Seen(self._clock(), status.tokens_per_s, status.running, status.waiting))

    def samples(self) -> list[Sample]:
        """What was seen, oldest first."""
        now = self._clock()
        return [
            (round(now - seen.at, 1), seen.tokens_per_s, seen.running, seen.waiting)
            for seen in self._seen
        ]


def _read(name: str) -> str:
    return files("tokenfleet.producer.gateway.page").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


PAGE = Template(_read("page.html"))
STYLE, SCRIPT = _read("page.css"), _read("page.js")
HEADERS = {
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "content-security-policy": (
        f"default-src 'none'; style-src '{_digest(STYLE)}'; script-src '{_digest(SCRIPT)}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
}


async def page(request: Request) -> Response:
    """GET /status."""
    check_viewer(request)
    namespace = gateway_of(request).settings.namespace
    title = "tokenfleet" if namespace == "tokenfleet" else f"tokenfleet: {namespace}"
    text = PAGE.substitute(
        title=escaped(title), style=STYLE, script=SCRIPT, fragment=_fragment(request)
    )
    return HTMLResponse(text, headers=HEADERS)


async def part(request: Request) -> Response:
    """GET /status/fragment: what the page puts in place of what it shows."""
    check_viewer(request)
    return HTMLResponse(_fragment(request), headers=HEADERS)


async def data(request: Request) -> Response:
    """GET /status/data."""
    check_viewer(request)
    sampler = _sampler(request)
    found = {
        "status": None if sampler.status is None else asdict(sampler.status),
        "running": [asdict(job) for job in sampler.running],
        "samples": [
            dict(zip(("ago_s", "tokens_per_s", "running", "waiting"), sample))
            for sample in sampler.samples()
        ],
        "trouble": sampler.trouble,
    }
    return JSONResponse(found, headers={"cache-control": "no-store"})


def _sampler(request: Request) -> Sampler:
    sampler: Sampler = request.app.state.sampler
    return sampler


def _fragment(request: Request) -> str:
    sampler = _sampler(request)
    return fragment(
        sampler.status,
        sampler.samples(),
        sampler.running,
        span_s=sampler.history_s,
        trouble=sampler.trouble,
    )
