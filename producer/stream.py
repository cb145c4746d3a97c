"""A job's events for one subscriber: replayed from the log, then live, without a gap or a repeat.

Order of joining: subscribe and wait for the confirmation, read the log from the cursor, then apply
live messages. Each names the entry before it; one that does not follow the cursor is either old, or
tells that something was missed, and then the log is read. Pub/sub is only the fast path.

A Redis that lost acknowledged writes (a failover, a restart without its last second) has a
shorter log than was handed out; the job goes on from its end. The log is read again from the start
then, and of each choice as many tokens and characters are passed over as were handed out.

Invariant: the cursor is the log entry last looked at; no token is handed out twice.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from tokenfleet.producer.absence import Absence
from tokenfleet.producer.checks import is_int
from tokenfleet.producer.connection import Connection
from tokenfleet.producer.errors import (
    BrokerUnavailable,
    InvalidJob,
    JobExpired,
    StreamInterrupted,
    UndecodableJob,
)
from tokenfleet.producer.hub import Hub
from tokenfleet.producer.keys import partition_of
from tokenfleet.producer.protocol import Event, State
from tokenfleet.producer.scripts import CANCEL, READ
from tokenfleet.producer.subscription import Reread, Subscription

SILENCE_S = 5.0
"""After this long without a message the job's state and log are looked at."""

_PAGE = 500
_MOST_TOKENS = 1 << 53

EntryId = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Look:
    """What `read` found: the hash's fields (empty: no such job) and entries behind the cursor."""

    fields: dict[str, str]
    entries: list[tuple[EntryId, bytes]]
    served: bool
    has_log: bool
    paused: bool

    @property
    def state(self) -> State | None:
        """The job's state, None when Redis does not know the job."""
        return State(self.fields["state"]) if "state" in self.fields else None


class JobReader:
    """Reads and follows jobs through one connection and one hub."""

    def __init__(
        self,
        connection: Connection,
        hub: Hub,
        *,
        result_ttl_s: float,
        log_ttl_s: float,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.connection = connection
        self.hub = hub
        self.silence_s = silence_s
        self._ttls = [int(result_ttl_s * 1000), int(log_ttl_s * 1000)]

    async def look(
        self,
        job_id: str,
        cursor: EntryId = (0, 0),
        *,
        count: int = 0,
        watch: bool = False,
        served: bool = False,
    ) -> Look:
        """The job now, with up to `count` entries behind `cursor`. Raises BrokerUnavailable."""
        self.hub.check_open()
        names = self.connection.keys(partition_of(job_id))
        position = f"{cursor[0]}-{cursor[1]}"
        args = [job_id, position, count, int(watch), *self._ttls, int(served)]
        reply = await self.connection.run(
            READ,
            names.partition,
            [names.job(job_id), names.events(job_id)],
            args,
            patience_s=self.connection.connect_timeout_s,
            often=True,
        )
        flat, entries, is_served, has_log, paused = reply
        return Look(
            fields=dict(zip(map(_text, flat[::2]), map(_text, flat[1::2]))),
            entries=[(_entry_id(entry), payload) for entry, payload in entries],
            served=bool(is_served),
            has_log=bool(has_log),
            paused=bool(paused),
        )

    async def cancel(self, job_id: str, *, if_abandoned: bool = False) -> State | None:
        """Ask for the job's end. Returns its state then; None when there is no such job."""
        names = self.connection.keys(partition_of(job_id))
        state = await self.connection.run(
            CANCEL,
            names.partition,
            [names.job(job_id), names.events(job_id)],
            [job_id, *self._ttls, int(if_abandoned)],
            patience_s=self.connection.connect_timeout_s,
        )
        return State(state.decode()) if state else None

    async def subscribe(self, job_id: str) -> Subscription:
        """Hear of the job's events. Returns when the server has confirmed."""
        names = self.connection.keys(partition_of(job_id))
        await self.connection.ready()
        return await self.hub.subscribe(names.partition, names.events(job_id))

    async def follow(self, job_id: str, from_offset: int = 0) -> AsyncGenerator[Event, None]:
        """Every event from `from_offset` to the terminal one.

        Raises JobExpired when job or log are gone, StreamInterrupted when Redis is away for longer
        than connect_timeout_s, or the log holds what only a newer version can read. Left before
        its end by the last subscriber, a job with on_disconnect="cancel" is cancelled.
        """
        if not is_int(from_offset) or not 0 <= from_offset < _MOST_TOKENS:
            raise InvalidJob("from_offset", from_offset, "must be a number of tokens, 0 or more")
        run = _Run(self, job_id, from_offset)
        try:
            run.ear = await self.subscribe(job_id)
            async for event in run.events():
                yield event
        except BrokerUnavailable as error:
            raise StreamInterrupted(job_id, run.offset, str(error)) from error
        except UndecodableJob as error:
            raise StreamInterrupted(job_id, run.offset, str(error), retryable=False) from error
        finally:
            await run.leave()


class _Run:
    """One pass over one job's events."""

    def __init__(self, reader: JobReader, job_id: str, from_offset: int) -> None:
        self._reader = reader
        self._job_id = job_id
        self._from_offset = from_offset
        self._start: EntryId = (from_offset, 0)
        self._cursor = self._start
        self._given: dict[int, list[int]] = {}
        """By choice: tokens and characters handed out."""
        self._passing: dict[int, list[int]] = {}
        """By choice: how many of them the log has yet to bring again."""
        self._attempt = 0
        self._absence = Absence(job_id, reader.silence_s)
        self._ends_with_us = False
        self._ended = False
        self.offset = from_offset
        self.ear: Subscription | None = None

    async def events(self) -> AsyncIterator[Event]:
        assert self.ear is not None
        self.ear.forget()  # the confirmation's mark: the log is not read twice
        async for event in self._replay():
            yield event
        while not self._ended:
            message = await self.ear.get(self._reader.silence_s)
            said = _announced(message) if isinstance(message, bytes) else None
            if said is not None:
                before, entry, event = said
                if before == self._cursor:
                    if event.attempt == self._attempt or not self._is_doubtful(event):
                        if (fresh := self._step(entry, event)) is not None:
                            yield fresh
                        continue
                    self._read_again()
                elif entry <= self._cursor and not event.final:  # a cursor may lie beyond the end
                    continue
            elif isinstance(message, Reread) and self._passing:
                self._read_again()  # what was lost may have been lost once more
            at = self._cursor
            async for found in self._replay():
                yield found
            if message is None and self._cursor != at:
                self._reader.hub.suspect(self.ear)

    async def leave(self) -> None:
        """Stop listening; of a job that is to end with its subscribers, ask for that end."""
        if self.ear is not None:
            await self._reader.hub.unsubscribe(self.ear)
        if self._ends_with_us and not self._ended and not self._reader.hub.closed:
            try:
                await self._reader.cancel(self._job_id, if_abandoned=True)
            except BrokerUnavailable:
                return  # the job's worker sees that nobody listens

    async def _replay(self) -> AsyncIterator[Event]:
        """The log from the cursor to its end."""
        assert self.ear is not None
        while not self._ended:
            look = await self._reader.look(self._job_id, self._cursor, count=_PAGE, watch=True)
            self._ends_with_us = look.fields.get("on_disconnect") == "cancel"
            entries = [(entry, Event.unpack(payload)) for entry, payload in look.entries]
            if self._is_another_log(look, [event for _, event in entries]):
                self._read_again()
                continue
            for entry, event in entries:
                if (fresh := self._step(entry, event)) is not None:
                    yield fresh
            if self._ended or len(look.entries) == _PAGE:
                continue
            if wait_s := self._absence.wait_s(look.state):
                await self.ear.get(wait_s)
                continue
            if not self._behind_the_end(look):
                return

    def _is_another_log(self, look: Look, events: list[Event]) -> bool:
        """Whether the log ends before the cursor, or does not go on exactly there."""
        if self._cursor == self._start:
            return False
        at = self._cursor[0]
        if int(look.fields.get("offset", at)) < at or (events and events[0].offset != at):
            return True
        return any(self._is_doubtful(event) for event in events)

    def _is_doubtful(self, event: Event) -> bool:
        """Whether it is the first of a later attempt, of a job with several choices: equal offsets
        do not prove then that the log before it is the one that was handed out."""
        later = event.attempt > self._attempt > 0
        self._attempt = max(self._attempt, event.attempt)
        return later and (len(self._given) > 1 or event.choice not in self._given)

    def _read_again(self) -> None:
        self._cursor = self._start
        self._passing = {choice: list(counts) for choice, counts in self._given.items()}

    def _step(self, entry: EntryId, event: Event) -> Event | None:
        """Move the cursor; what of the entry is to be handed out, None where nothing is."""
        self._cursor, self._ended = entry, event.final
        if event.attempt > self._attempt:
            self._attempt = event.attempt
        self._absence.ran = self._attempt > 0
        if event.offset < self._from_offset:
            if event.token_ids and event.end <= self._from_offset:
                return None
            event = event.after(self._from_offset)
        fresh = self._unseen(event) if self._passing else event
        if fresh is not None:
            count = len(fresh.token_ids)
            given = self._given.get(fresh.choice)
            if given is None:
                given = self._given[fresh.choice] = [0, 0]
            given[0] += count
            given[1] += len(fresh.text)
            self.offset = max(self.offset, fresh.offset + count)
        return fresh

    def _unseen(self, event: Event) -> Event | None:
        """An event without the tokens and characters that were handed out before the log was lost.

        Its offset is that of the stream: the log counts the same again once nothing is passed over.
        """
        left = self._passing.get(event.choice, [0, 0])
        tokens, chars = min(left[0], len(event.token_ids)), min(left[1], len(event.text))
        left[0] -= tokens
        left[1] -= chars
        if not any(any(counts) for counts in self._passing.values()):
            self._passing = {}
        fresh = replace(
            event,
            offset=self.offset,
            token_ids=event.token_ids[tokens:],
            text=event.text[chars:],
            logprobs=None if event.logprobs is None else event.logprobs[tokens:],
        )
        passed = tokens or chars or self._passing
        return fresh if fresh.token_ids or fresh.text or fresh.final or not passed else None

    def _behind_the_end(self, look: Look) -> bool:
        """After the last entry. True when the job has ended and the cursor lay beyond that.

        The cursor is set back then, so that the terminal event is read. Raises JobExpired when
        there is nothing left to wait for.
        """
        if look.state is None or not look.state.terminal:
            return False
        end = (int(look.fields["offset"]), 0)
        if not look.has_log or self._cursor <= end:
            raise JobExpired(self._job_id, "the log of job")
        self._cursor = end
        return True


def _announced(message: bytes) -> tuple[EntryId, EntryId, Event] | None:
    """The entry before, the entry and its event; None for what nobody can read: the log tells."""
    try:
        before, entry, payload = message.split(b" ", 2)
        return _entry_id(before), _entry_id(entry), Event.unpack(payload)
    except ValueError:  # UndecodableJob is one
        return None


def _text(value: bytes) -> str:
    """A field, whoever wrote it."""
    return value.decode(errors="replace")


def _entry_id(entry: bytes) -> EntryId:
    offset, _, number = entry.partition(b"-")
    return int(offset), int(number)


def as_int(fields: dict[str, Any], name: str) -> int | None:
    """A number in the hash; None when it is absent or 0, which means the same there."""
    return int(fields.get(name, 0)) or None
