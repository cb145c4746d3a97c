"""Runs a batch: feed lines into the queue, collect what has ended, until every line is done.

One loop does both in turn, so nothing is in two hands at once. At most `in_flight` jobs are on
their way: the queue, this process and Redis hold no more of the file than that.

Invariant: a line is fed only while the output does not have it, and always under the same job id.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from tokenfleet.producer.batch.account import Account
from tokenfleet.producer.batch.check import BatchLine, Checker, Problem
from tokenfleet.producer.batch.keeper import Keeper
from tokenfleet.producer.batch.lines import line_at, read_lines
from tokenfleet.producer.batch.output import Output
from tokenfleet.producer.batch.progress import Progress
from tokenfleet.producer.batch.records import Ended, refusal_of
from tokenfleet.producer.batch.remote import AT_ONCE, Flight, Look, Remote
from tokenfleet.producer.batch.state import BatchError, BatchFiles, BatchState, Phase
from tokenfleet.producer.batch.tally import Tally
from tokenfleet.producer.batch.threads import in_thread
from tokenfleet.producer.errors import BrokerUnavailable, InvalidJob
from tokenfleet.producer.states import State

IN_FLIGHT = 4096
PATIENCE_S = 300.0
WRITE_DOWN_EVERY_S = 2.0
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.5
_AWAY_PAUSE_S = 1.0
_MOST_FULL_PAUSE_S = 60.0
_NO_TIME_S = 0.001

Found = TypeVar("Found")


class Runner:
    """One run over one batch. The output is open, and stays its caller's to close."""

    def __init__(
        self,
        files: BatchFiles,
        state: BatchState,
        output: Output,
        remote: Remote,
        *,
        in_flight: int = IN_FLIGHT,
        patience_s: float = PATIENCE_S,
        on_progress: Callable[[Progress], object] | None = None,
    ) -> None:
        if in_flight < 1:
            raise InvalidJob("in_flight", in_flight, "must be 1 or more")
        self.state = state
        self.account = Account(output)
        self._files = files
        self._output = output
        self._remote = remote
        self._in_flight = in_flight
        self._patience_s = patience_s
        self._on_progress = on_progress
        self._keeper = Keeper(output, state)
        self._flights: dict[int, Flight] = {}
        self._checker: Checker
        self._source: Iterator[BatchLine | Problem]
        self._pending: list[BatchLine]
        self._exhausted: bool
        self._queued = 0
        """Jobs of ours that wait, as far as is known."""
        self._freed = 0
        """How many of them have been claimed since the queue was full."""
        self._rewind()
        self._full_until = 0.0
        self._written_down = 0.0

    async def run(self) -> Phase:
        """Feed and collect until all lines are done, or the end is asked for: how it ended."""
        pause_s = SHORTEST_PAUSE_S
        while True:
            fed = await self._patiently(self._feed)
            ended = await self._patiently(self._collect)
            await self._look_back()
            if self._output.tally.done == self.state.lines:
                return Phase.COMPLETED
            if self._exhausted and not self._flights and not self._pending:
                raise BatchError(f"{self._files.input} has changed while it ran: lines are missing")
            if self._files.cancel.exists():
                await self._patiently(self._cancel)
                return Phase.CANCELLED
            pause_s = pause_s / 2 if ended else min(LONGEST_PAUSE_S, pause_s * 1.5)
            pause_s = max(SHORTEST_PAUSE_S, pause_s)
            if not fed:
                await asyncio.sleep(pause_s)

    async def submit(self) -> Phase:
        """Feed every line, and leave it to others to collect."""
        while not self._exhausted or self._pending:
            fed = await self._patiently(self._feed)
            self._flights.clear()
            await self._look_back()
            if self._files.cancel.exists():
                await self._patiently(self.cancel)
                return Phase.CANCELLED
            if not fed:
                await asyncio.sleep(max(SHORTEST_PAUSE_S, self._full_until - time.monotonic()))
        return Phase.SUBMITTED

    async def look_once(self) -> None:
        """Collect what has ended by now; submit nothing."""
        async for flights in self._all_flights():
            self.account.last = Look()
            await self._write_ended(flights)
            await self._look_back()

    async def cancel(self) -> None:
        """Ask for the end of every job whose line is not done; called again, of all once more."""
        self._rewind()
        self.state = self.state.at(Phase.CANCELLED)
        async for flights in self._all_flights():
            await self._end(flights)

    async def finish(self) -> None:
        """Force what is written to the disk, and let go of it in Redis."""
        await self._let_go(await in_thread(self._keeper.sync, at_once=True))

    async def _feed(self) -> bool:
        """Send lines while there is room; whether any was accepted.

        While the queue is full, only as many as it has taken from us meanwhile.
        """
        now = time.monotonic()
        most = AT_ONCE if now >= self._full_until else self._freed
        lines = await self._next_lines() if most > 0 else []
        if not lines:
            return False
        sent = await self._remote.send(lines[:most], self._left_s())
        self._pending = sent.refused + lines[most:]
        self._freed = 0
        if sent.refused:
            self._full_until = now + min(sent.retry_after_s, _MOST_FULL_PAUSE_S)
        self.account.note = "the queue is full" if time.monotonic() < self._full_until else None
        self._queued += len(sent.accepted)
        self._flights.update({line.number: self._remote.flight(line) for line in sent.accepted})
        return bool(sent.accepted)

    async def _next_lines(self) -> list[BatchLine]:
        room = self._in_flight - len(self._flights)
        if self._pending:
            return self._pending
        if room <= 0 or self._keeper.full:
            return []
        self._pending = await in_thread(self._take, min(room, AT_ONCE))
        return self._pending

    def _take(self, count: int) -> list[BatchLine]:
        """The next lines to submit; refused ones go to the error file at once."""
        lines: list[BatchLine] = []
        for judged in self._source:
            if isinstance(judged, Problem):
                self._keeper.keep(refusal_of(self.state.id, judged))
            else:
                lines.append(judged)
            if len(lines) == count:
                return lines
        self._exhausted = True
        return lines

    def _read(self) -> Iterator[BatchLine | Problem]:
        """Every line that is not done, in order."""
        done, longest = self._output.done, self.state.rules.max_line_bytes
        for raw in read_lines(self._files.input, max_line_bytes=longest):
            if raw.number > self.state.lines:
                return
            is_done = bool(done[raw.number])
            judged = self._checker.line(raw, translated=not is_done)
            if judged is not None and not is_done:
                yield judged

    def _rewind(self) -> None:
        """Read the input from its beginning once more."""
        self._checker = Checker(self.state.rules)
        self._source, self._exhausted, self._pending = self._read(), False, []

    async def _all_flights(self) -> AsyncIterator[list[Flight]]:
        """The jobs of all lines that are not done, sent or not."""
        while not self._exhausted:
            lines = await in_thread(self._take, AT_ONCE)
            yield [self._remote.flight(line) for line in lines]

    async def _collect(self) -> int:
        """Write what has ended; how many lines that were."""
        flights = list(self._flights.values())
        if self._keeper.full:
            flights = [self._flights[min(self._flights)]] if self._flights else []
        found, ended = Look(), 0
        for start in range(0, len(flights), AT_ONCE):
            look = await self._remote.look(flights[start : start + AT_ONCE])
            await in_thread(self._keeper.ended, look.ended)
            for flight, _ in look.ended:
                del self._flights[flight.line]
            ended += len(look.ended)
            look.ended = []
            found.add(look)
        self._freed += max(0, self._queued - found.waiting)
        self.account.last, self._queued = found, found.waiting
        if found.gone:
            await in_thread(self._take_up_again, found.gone)
        if found.waiting and self._left_s() == _NO_TIME_S:
            await self._remote.expire(list(self._flights.values())[:AT_ONCE])
        return ended

    def _take_up_again(self, gone: Sequence[Flight]) -> None:
        """Jobs that Redis has lost are submitted once more."""
        longest = self.state.rules.max_line_bytes
        for flight in gone:
            del self._flights[flight.line]
            raw = line_at(self._files.input, flight.line, flight.offset, max_line_bytes=longest)
            self._pending.append(self._checker.again(raw))
        self.account.resubmitted += len(gone)

    async def _cancel(self) -> None:
        self.state, self.account.last = self.state.at(Phase.CANCELLED), Look()
        flights = list(self._flights.values())
        for start in range(0, len(flights), AT_ONCE):
            await self._end(flights[start : start + AT_ONCE])

    async def _end(self, flights: Sequence[Flight]) -> None:
        """End what is on its way; results that came before are still written."""
        await self._remote.cancel(flights)
        await self._write_ended(flights)

    async def _write_ended(self, flights: Sequence[Flight]) -> None:
        """Write what has ended of these, in as many looks as its size takes."""
        while flights:
            look = await self._remote.look(flights)
            await in_thread(self._keeper.ended, self._wanted(look))
            self.account.last.add(look)
            whole = look.seen == len(flights)
            seen = {flight.line for flight, _ in look.ended}
            flights = [] if whole else [f for f in flights if f.line not in seen]

    def _wanted(self, look: Look) -> list[tuple[Flight, Ended]]:
        """What is to be written: a cancelled batch leaves its cancelled lines to the next round."""
        if self.state.phase is not Phase.CANCELLED:
            return look.ended
        return [(flight, job) for flight, job in look.ended if job.state is not State.CANCELLED]

    async def _patiently(self, call: Callable[[], Awaitable[Found]]) -> Found:
        """Call again while Redis is away, for patience_s. Raises BrokerUnavailable after that."""
        give_up = time.monotonic() + self._patience_s
        while True:
            try:
                found = await call()
            except BrokerUnavailable:
                if time.monotonic() >= give_up:
                    raise
                self.account.note = "Redis is away"
                await self._look_back()
                await asyncio.sleep(_AWAY_PAUSE_S)
            else:
                self.account.note = (
                    None if self.account.note == "Redis is away" else self.account.note
                )
                return found

    def _left_s(self) -> float | None:
        """Until the completion window closes; at least a moment, as a deadline must be."""
        window_s = self.state.settings.window_s
        if window_s is None:
            return None
        return max(_NO_TIME_S, self.state.created_ms / 1000 + window_s - time.time())

    async def _look_back(self) -> None:
        """Sync, let go, say how far it is."""
        await self._let_go(await in_thread(self._keeper.sync))
        progress = self.account.progress(self.state)
        if self._on_progress is not None:
            self._on_progress(progress)
        now = time.monotonic()
        if now - self._written_down >= WRITE_DOWN_EVERY_S:
            self._written_down = now
            self.state = replace(self.state, progress=progress.as_dict(), pid=os.getpid())
            await in_thread(self.state.write, self._files.state, durable=False)

    async def _let_go(self, job_ids: list[str]) -> None:
        if job_ids:
            with suppress(BrokerUnavailable):  # they go by themselves when their time is over
                await self._remote.collected(job_ids)

    @property
    def tally(self) -> Tally:
        """What is in the files."""
        return self._output.tally
