"""Requests that have not ended, and the events they get.

Every choice of a request gets exactly one last event; when all have, the request is forgotten and
its id is free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tokenfleet.engine.errors import InvalidRequest
from tokenfleet.engine.execution.flight import Outcome
from tokenfleet.engine.request import CoreEvent, EngineRequest, Logprobs
from tokenfleet.engine.scheduling.plan import StepPlan
from tokenfleet.engine.scheduling.scheduler import Scheduler
from tokenfleet.engine.scheduling.sequence import Sequence, SequenceState


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
        self._end_unopened(request, "error", str(refusal))

    def cancelled(self, request: EngineRequest) -> None:
        """End a request that was aborted before it was opened."""
        self._end_unopened(request, "cancelled", None)

    def _end_unopened(self, request: EngineRequest, reason: str, error: str | None) -> None:
        choices = (c for c in range(request.params.n) if c not in request.ended)
        self.pending += [
            CoreEvent(request.id, c, [], reason, error=error, weights_version=self.weights_version)
            for c in choices
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

    def settle(self, plan: StepPlan, outcomes: list[Outcome]) -> list[CoreEvent]:
        """Account for a step whose result is here; pending events come first.

        Sequences in error end before the scheduler completes the step, so that nothing they
        computed reaches the prefix cache; those that reached their end, after it.
        """
        events, self.pending = self.pending, []
        ended: list[tuple[Account, Outcome, str]] = []
        for outcome in outcomes:
            sequence = outcome.chunk.sequence
            if sequence.state is SequenceState.FINISHED:
                continue
            account = self._accounts[sequence.request_id]
            _keep_prompt_logprobs(account, outcome)
            if outcome.error is not None:
                self.num_errors += 1
                self._end(account, sequence, "error", events, error=outcome.error)
            elif outcome.chunk.samples:
                reason = _take_token(outcome)
                if reason is None:
                    events.append(self._event(account, outcome, None))
                else:
                    ended.append((account, outcome, reason))
        self._scheduler.complete(plan)
        for account, outcome, reason in ended:
            events.append(self._event(account, outcome, reason))
            self._close(account, outcome.chunk.sequence)
        return events

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
        error: str | None = None,
    ) -> None:
        reports = _give_prompt_logprobs(account, sequence)
        events.append(
            CoreEvent(
                id=account.request.id,
                choice=sequence.choice,
                token_ids=[],
                finish_reason=reason,
                prompt_logprobs=reports,
                error=error,
                weights_version=self.weights_version,
            )
        )
        self._close(account, sequence)

    def _event(self, account: Account, outcome: Outcome, reason: str | None) -> CoreEvent:
        sequence, has_token = outcome.chunk.sequence, outcome.token >= 0
        return CoreEvent(
            id=account.request.id,
            choice=sequence.choice,
            token_ids=[outcome.token] if has_token else [],
            finish_reason=reason,
            logprobs=[outcome.logprobs] if has_token and outcome.logprobs is not None else None,
            prompt_logprobs=_give_prompt_logprobs(account, sequence),
            error=outcome.error,
            weights_version=self.weights_version,
        )

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


def _take_token(outcome: Outcome) -> str | None:
    """Append the sampled token; why the sequence ends with it, or None."""
    sequence = outcome.chunk.sequence
    if len(sequence.tokens) >= sequence.max_len:  # asked for its prompt's logprobs only
        outcome.token = -1
        return "length"
    sequence.tokens.append(outcome.token)
    if sequence.constraint is not None:
        outcome.error = sequence.constraint.accept(outcome.token)
        if outcome.error is not None:
            return "error"
        if sequence.constraint.complete:
            return "stop"
    if _is_end(sequence):
        return "stop"
    return "length" if len(sequence.tokens) >= sequence.max_len else None


def _keep_prompt_logprobs(account: Account, outcome: Outcome) -> None:
    if account.prompt_logprobs is not None:
        for position, report in outcome.prompt_logprobs:
            account.prompt_logprobs[position] = report


def _give_prompt_logprobs(account: Account, sequence: Sequence) -> list[Logprobs | None] | None:
    """Once, to choice 0."""
    if account.prompt_logprobs is None or sequence.choice > 0:
        return None
    reports, account.prompt_logprobs = account.prompt_logprobs, None
    return reports
