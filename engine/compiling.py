"""Requests whose grammar is being compiled, beside the steps and never in one.

A request is here from its arrival until its grammar is ready, refused, or too slow; then it is
opened or ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from tokenfleet.engine.constraints import COMPILE_LIMIT_S, Constraint, ConstraintCompiler
from tokenfleet.engine.errors import InvalidRequest
from tokenfleet.engine.request import EngineRequest

_IDLE_WAIT_S = 0.01
"""How long an otherwise idle step waits for a grammar."""


@dataclass(frozen=True, slots=True)
class _Pending:
    request: EngineRequest
    result: Future[Constraint]
    deadline: float


class Compiling:
    """Compiles in one thread, in order of arrival."""

    def __init__(self, compiler: ConstraintCompiler | None) -> None:
        self._compiler = compiler
        self._pending: dict[str, _Pending] = {}
        self._threads: ThreadPoolExecutor | None = None

    def __bool__(self) -> bool:
        return bool(self._pending)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    @property
    def num_choices(self) -> int:
        """Sequences that will want a slot."""
        return sum(pending.request.params.n for pending in self._pending.values())

    def start(self, request: EngineRequest) -> None:
        """Begin to compile.

        Raises:
            InvalidRequest: `unsupported`: this engine was started without a compiler.
        """
        wanted = request.params.structured_outputs
        if self._compiler is None or wanted is None:
            raise InvalidRequest("unsupported", "this engine was started without structured output")
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        result = self._threads.submit(self._compiler.compile, wanted)
        deadline = time.monotonic() + COMPILE_LIMIT_S
        self._pending[request.id] = _Pending(request, result, deadline)

    def cancel(self, request_id: str) -> EngineRequest | None:
        """Take out a request that is here."""
        pending = self._pending.pop(request_id, None)
        if pending is None:
            return None
        pending.result.cancel()
        return pending.request

    def ready(
        self, *, wait_for_one: bool
    ) -> Iterator[tuple[EngineRequest, Constraint | InvalidRequest]]:
        """Requests whose fate is known, taken out as they are given."""
        if wait_for_one:
            futures = [pending.result for pending in self._pending.values()]
            wait(futures, timeout=_IDLE_WAIT_S, return_when=FIRST_COMPLETED)
        now = time.monotonic()
        for request_id, pending in list(self._pending.items()):
            if pending.result.done() or now > pending.deadline:
                del self._pending[request_id]
                yield pending.request, _fate(pending)


def _fate(pending: _Pending) -> Constraint | InvalidRequest:
    if not pending.result.done():
        pending.result.cancel()
        return InvalidRequest(
            "unsupported_grammar",
            f"the grammar was not compiled within {COMPILE_LIMIT_S:g} s; make it simpler",
        )
    error = pending.result.exception()
    if error is None:
        return pending.result.result()
    if isinstance(error, InvalidRequest):
        return error
    return InvalidRequest("unsupported_grammar", f"the grammar cannot be compiled: {error}")
