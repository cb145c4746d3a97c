"""Requests that have not ended, and the events they get.

Every choice of a request gets exactly one last event; when all have, the request is forgotten and
its id is free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tokenfleet.engine.errors import InvalidRequest
from tokenfleet.engine.execution.flight import Note, StepResult
from tokenfleet.engine.request import ENGINE_ERROR, CoreEvent, EngineRequest, Logprobs
from tokenfleet.engine.scheduling.plan import Chunk, StepPlan
from tokenfleet.engine.scheduling.scheduler import Scheduler
from tokenfleet.engine.scheduling.sequence import Sequence, SequenceState

_FINISHED = SequenceState.FINISHED
_NO_NOTE = Note()


@dataclass(slots=True, eq=False)
class Account:
    """A request that has not ended."""

    request: EngineRequest
    sequences: list[Sequence]
    num_open: int
    """Choices that have not ended."""
    prompt_logprobs: list[Logprobs | None] | None = None
    """Filled while the prompt is computed; goes out with choice 0's first event."""


class Accounts:
    """Turns what a step computed into events, and ends sequences."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._accounts: dict[str, Account] = {}
        self.pending: list[CoreEvent] = []
        """Events that came about between steps; the next step gives them out."""
        self.num_errors = 0
        """Sequences ended by an error since the start."""
        self.weights_version = 0
        """What events are made with from now on."""

    def __bool__(self) -> bool:
        return bool(self._accounts or self.pending)

    def __contains__(self, request_id: str) -> bool:
        waiting = any(event.id == request_id for event in self.pending)
        return waiting or request_id in self._accounts

    def sequences(self) -> Iterator[Sequence]:
        """Every sequence of every open request."""
        return (s for account in self._accounts.values() for s in account.sequences)

    def requests(self) -> Iterator[tuple[EngineRequest, list[Sequence]]]:
        """Every open request and its sequences."""
        return ((account.request, account.sequences) for account in self._accounts.values())

    def running_choice(self, request_id: str, choice: int) -> tuple[EngineRequest, Sequence]:
        """A choice that has not ended.

        Raises:
            InvalidRequest: `unknown_id`.
        """
        account = self._accounts.get(request_id)
        for sequence in account.sequences if account else ():
            if sequence.choice == choice and sequence.state is not SequenceState.FINISHED:
                return account.request, sequence  # type: ignore[union-attr] # it had sequences
        raise InvalidRequest("unknown_id", f"{request_id!r} has no running choice {choice}")

    def refuse(self, request: EngineRequest, refusal: InvalidRequest) -> None:
        """End a request that turned out to be impossible after it was taken."""
        self._end_unopened(request, "error", refusal)

    def cancelled(self, request: EngineRequest) -> None:
        """End a request that was aborted before it was opened."""
        self._end_unopened(request, "cancelled", None)

    def _end_unopened(
        self, request: EngineRequest, reason: str, refusal: InvalidRequest | None
    ) -> None:
        error, code = (str(refusal), refusal.code) if refusal is not None else (None, None)
        version = self.weights_version
        self.pending += [
            CoreEvent(request.id, choice, [], reason, None, None, error, code, version)
            for choice in range(request.params.n)
            if choice not in request.ended
        ]

    def open(self, request: EngineRequest, sequences: list[Sequence]) -> None:
        """Queue a request's sequences; those with no token left to make end at once."""
        account = Account(request, sequences, num_open=len(sequences))
        if request.params.prompt_logprobs is not None:
            account.prompt_logprobs = [None] * len(request.prompt_token_ids)
        self._accounts[request.id] = account
        for sequence in sequences:
            reason = _ended_before(sequence)
            wants_prompt = account.prompt_logprobs is not None and sequence.choice == 0
            if reason == "stop" or (reason == "length" and not wants_prompt):
                self._end(account, sequence, reason, self.pending)
            else:
                self._scheduler.add(sequence)
        if not sequences:
            del self._accounts[request.id]

    def abort(self, request_id: str, choice: int | None) -> None:
        """End open choices as cancelled; what is unknown or over is left alone."""
        account = self._accounts.get(request_id)
        for sequence in account.sequences if account else ():
            mine = choice is None or choice == sequence.choice
            if account and mine and sequence.state is not SequenceState.FINISHED:
                self._end(account, sequence, "cancelled", self.pending)

    def finish(self, request_id: str, choice: int) -> None:
        """End a choice without an event: its owner saw the end in the text."""
        account = self._accounts.get(request_id)
        for sequence in account.sequences if account else ():
            if account and choice == sequence.choice:
                self._close(account, sequence)

    def settle(self, plan: StepPlan, result: StepResult) -> list[CoreEvent]:
        """Account for a step whose result is here; pending events come first.

        Sequences in error end before the scheduler completes the step, so that nothing they
        computed reaches the prefix cache; those that reached their end, after it.
        """
        events, self.pending = self.pending, []
        ended: list[tuple[Sequence, CoreEvent]] = []
        notes, version = result.notes, self.weights_version
        for row, (chunk, token) in enumerate(zip(plan.work, result.tokens, strict=True)):
            sequence = chunk.sequence
            tokens = sequence.tokens
            if sequence.state is _FINISHED:
                continue
            if (
                token >= 0
                and sequence.plain
                and token not in sequence.ending
                and len(tokens) + 1 < sequence.max_len
                and row not in notes
            ):  # as _settle_one does it: nearly all sequences, so it has to be quick
                tokens.append(token)
                id, choice = sequence.request_id, sequence.choice
                events.append(CoreEvent(id, choice, [token], None, None, None, None, None, version))
            else:
                self._settle_one(chunk, token, notes.get(row, _NO_NOTE), events, ended)
        self._scheduler.complete(plan)
        for sequence, last in ended:
            events.append(last)
            self._close(self._accounts[sequence.request_id], sequence)
        return events

    def _settle_one(
        self,
        chunk: Chunk,
        token: int,
        note: Note,
        events: list[CoreEvent],
        ended: list[tuple[Sequence, CoreEvent]],
    ) -> None:
        """Account for a chunk that needs a closer look."""
        sequence = chunk.sequence
        account = self._accounts[sequence.request_id]
        if account.prompt_logprobs is not None:
            for position, report in note.prompt_logprobs:
                account.prompt_logprobs[position] = report
        if note.error is not None:
            self.num_errors += 1
            self._end(account, sequence, "error", events, note)
        elif chunk.samples:
            taken, reason, error = _take_token(sequence, token)
            event = CoreEvent(
                sequence.request_id,
                sequence.choice,
                taken,
                reason,
                [note.logprobs] if taken and note.logprobs is not None else None,
                _give_prompt_logprobs(account, sequence),
                error,
                error and ENGINE_ERROR,
                self.weights_version,
            )
            if reason is None:
                events.append(event)
            else:
                ended.append((sequence, event))

    def give_pending(self) -> list[CoreEvent]:
        """Events of a step that computed nothing."""
        events, self.pending = self.pending, []
        return events

    def _end(
        self,
        account: Account,
        sequence: Sequence,
        reason: str,
        events: list[CoreEvent],
        note: Note = _NO_NOTE,
    ) -> None:
        reports = _give_prompt_logprobs(account, sequence)
        events.append(
            CoreEvent(
                id=account.request.id,
                choice=sequence.choice,
                token_ids=[],
                finish_reason=reason,
                prompt_logprobs=reports,
                error=note.error,
                error_code=note.error and note.error_code,
                weights_version=self.weights_version,
            )
        )
        self._close(account, sequence)

    def _close(self, account: Account, sequence: Sequence) -> None:
        if sequence.state is SequenceState.FINISHED:
            return
        self._scheduler.finish(sequence)
        account.num_open -= 1
        if not account.num_open:
            del self._accounts[account.request.id]


def _ended_before(sequence: Sequence) -> str | None:
    """Why a sequence has nothing left to make when it arrives, or None."""
    constraint = sequence.constraint
    if sequence.num_output and constraint is not None and constraint.complete:
        return "stop"
    if sequence.num_output and _is_end(sequence):
        return "stop"
    return "length" if len(sequence.tokens) >= sequence.max_len else None


def _is_end(sequence: Sequence) -> bool:
    """Whether the last token ends the output."""
    long_enough = sequence.num_output > sequence.params.min_tokens
    return long_enough and sequence.tokens[-1] in sequence.ending


def _take_token(sequence: Sequence, token: int) -> tuple[list[int], str | None, str | None]:
    """Append a sampled token; (what the caller gets of it, why it is the last, what is wrong)."""
    if len(sequence.tokens) >= sequence.max_len:  # asked for its prompt's logprobs only
        return [], "length", None
    sequence.tokens.append(token)
    if sequence.constraint is not None:
        error = sequence.constraint.accept(token)
        if error is not None:
            return [token], "error", error
        if sequence.constraint.complete:
            return [token], "stop", None
    if _is_end(sequence):
        return [token], "stop", None
    return [token], "length" if len(sequence.tokens) >= sequence.max_len else None, None


def _give_prompt_logprobs(account: Account, sequence: Sequence) -> list[Logprobs | None] | None:
    """Once, to choice 0."""
    if account.prompt_logprobs is None or sequence.choice > 0:
        return None
    reports, account.prompt_logprobs = account.prompt_logprobs, None
    return reports
