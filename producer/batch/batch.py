"""A batch: prepared once from a file, run and taken up again any number of times.

Invariant: one process at a time writes to a batch; the lock on its output goes with the process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Self

from tokenfleet.producer.batch.check import FileRules, Problem, check_file
from tokenfleet.producer.batch.output import BatchBusy, Output, count_lines, is_busy, read_records
from tokenfleet.producer.batch.progress import Glance, Progress, Summary, summary_of
from tokenfleet.producer.batch.remote import Remote
from tokenfleet.producer.batch.run import IN_FLIGHT, PATIENCE_S, Runner
from tokenfleet.producer.batch.state import (
    BatchError,
    BatchFiles,
    BatchRefused,
    BatchSettings,
    BatchState,
    Phase,
)
from tokenfleet.producer.batch.tally import Tally
from tokenfleet.producer.batch.threads import in_thread
from tokenfleet.producer.client import AsyncClient

CANCEL_WITHIN_S = 30.0
"""How long `cancel` waits for the process that runs the batch."""


class Batch:
    """One batch on disk. Its methods block where they are not coroutines."""

    def __init__(self, files: BatchFiles, state: BatchState) -> None:
        self.files = files
        self.state = state

    @classmethod
    def prepare(
        cls,
        files: BatchFiles,
        rules: FileRules | None = None,
        settings: BatchSettings | None = None,
        *,
        on_problem: Callable[[Problem], object] | None = None,
    ) -> Self:
        """Check the whole input and begin; or take up what was begun with the same arguments.

        Raises:
            BatchRefused: the input is faulty beyond what settings.skip allows.
            BatchError: input or settings differ from those of the batch that is there, or the
                output belongs to something else.
            OSError: the input cannot be read.
        """
        rules, settings = rules or FileRules(), settings or BatchSettings()
        if files.state.exists():
            batch = cls.open(files)
            batch.state.check_settings(rules, settings)
            batch.check_input()
            return batch
        if files.input.exists() and not files.input.is_file():
            raise BatchError(f"{files.input} is read more than once: it must be a regular file")
        for path in (files.output, files.errors):
            if path.exists() and path.stat().st_size:
                raise BatchError(f"{path} is there and of no batch known here; use another name")
        report = check_file(files.input, rules, on_problem=on_problem)
        if report.stops(settings.skip):
            raise BatchRefused(report, files.input)
        state = BatchState.new(files, report, rules, settings)
        state.write_first(files.state)
        return cls(files, state)

    @classmethod
    def open(cls, files: BatchFiles) -> Self:
        """The batch that was begun with these files. Raises BatchError when there is none."""
        return cls(files, BatchState.read(files.state))

    def check_input(self) -> None:
        """Refuse an input that is not what it was. Reads all of it. Raises BatchError."""
        hashed, size = blake2b(digest_size=16), 0
        with self.files.input.open("rb") as file:
            while piece := file.read(1 << 20):
                hashed.update(piece)
                size += len(piece)
        self.state.check_input(size, hashed.hexdigest())

    async def run(
        self,
        client: AsyncClient,
        *,
        on_progress: Callable[[Progress], object] | None = None,
        in_flight: int = IN_FLIGHT,
        patience_s: float = PATIENCE_S,
    ) -> Summary:
        """Run to the end, from wherever it is. A cancelled batch begins a new round.

        Cancelling this coroutine stops the work here; jobs that are on their way go on, and the
        next run collects them.

        Args:
            on_progress: called after each round, several times a second.
            in_flight: most jobs on their way at once.
            patience_s: how long Redis may be away.

        Raises:
            BatchBusy: another process runs it.
            BrokerUnavailable: Redis was away for longer than patience_s.
        """
        if self.state.phase is Phase.COMPLETED:
            return await in_thread(self.summary)
        async with self._running(client, in_flight, patience_s, on_progress) as runner:
            self.state = self.state.at(await runner.run())
            return await self._end(runner)

    async def submit(
        self,
        client: AsyncClient,
        *,
        on_progress: Callable[[Progress], object] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> Summary:
        """Put every line that is not done into the queue, and leave the results for later.

        They are kept for the workers' result_ttl_s; collect or run the batch before.
        """
        if self.state.phase is Phase.COMPLETED:
            return await in_thread(self.summary)
        async with self._running(client, IN_FLIGHT, patience_s, on_progress) as runner:
            self.state = self.state.at(await runner.submit())
            return await self._end(runner)

    async def collect(self, client: AsyncClient) -> Summary:
        """Write the results that are there, and submit nothing.

        The summary has no rate: what is collected was made at another time.
        """
        async with self._running(client, IN_FLIGHT, 0.0, None, begins=False) as runner:
            await runner.look_once()
            if runner.tally.done == self.state.lines:
                self.state = self.state.at(Phase.COMPLETED)
            return replace(await self._end(runner), tokens_per_s=0.0)

    async def cancel(self, client: AsyncClient) -> Summary:
        """End the jobs of all lines that are not done; `run` takes the batch up again.

        Where another process runs it, that one is told, and waited for.

        Raises:
            TimeoutError: it did not end within 30 s.
        """
        try:
            async with self._running(client, IN_FLIGHT, 0.0, None, begins=False) as runner:
                await runner.cancel()
                if self.state.phase is not Phase.COMPLETED:
                    self.state = self.state.at(Phase.CANCELLED)
                return await self._end(runner)
        except BatchBusy:
            await self._ask_to_cancel()
            return await in_thread(self.summary)

    def summary(self) -> Summary:
        """What is in the files now, read anew; also while another process writes to them."""
        self.state = BatchState.read(self.files.state)
        tally = Tally()
        for failed, path in ((False, self.files.output), (True, self.files.errors)):
            if path.exists():
                for record in read_records(path, self.state, failed=failed):
                    tally.add(record)
        return summary_of(self.state, tally)

    def glance(self) -> Glance:
        """How far it is, without reading what is in the lines."""
        self.state = BatchState.read(self.files.state)
        return Glance(
            batch=self.state.id,
            phase=self.state.phase,
            busy=is_busy(self.files),
            total=self.state.lines,
            completed=count_lines(self.files.output),
            failed=count_lines(self.files.errors),
            created_ms=self.state.created_ms,
            source=self.state.source,
            output=str(self.files.output),
            errors=str(self.files.errors),
            progress=self.state.progress,
        )

    @asynccontextmanager
    async def _running(
        self,
        client: AsyncClient,
        in_flight: int,
        patience_s: float,
        on_progress: Callable[[Progress], object] | None,
        *,
        begins: bool = True,
    ) -> AsyncIterator[Runner]:
        """A runner on the locked output; whatever happens, what it wrote is safe at the end."""
        output = Output(self.files, self.state)
        try:
            await in_thread(output.open)
            await client.connect()
            await self._begin(client, new_round=begins)
            runner = Runner(
                self.files,
                self.state,
                output,
                Remote(client, self.state),
                in_flight=in_flight,
                patience_s=patience_s,
                on_progress=on_progress,
            )
            try:
                yield runner
            finally:
                await runner.finish()
        finally:
            output.close()

    async def _begin(self, client: AsyncClient, *, new_round: bool) -> None:
        """Read the state again under the lock, and move it on."""
        for left_over in self.files.state.parent.glob(f"{self.files.state.name}.*.tmp"):
            left_over.unlink(missing_ok=True)
        state = BatchState.read(self.files.state)
        if new_round:
            self.files.cancel.unlink(missing_ok=True)
            if state.phase is Phase.CANCELLED:
                state = state.at(Phase.RUNNING, round=state.round + 1)
            state = state.at(Phase.RUNNING)
        if state.partitions is None:
            state = state.at(state.phase, partitions=client.link.connection.partitions)
        self.state = state
        await in_thread(state.write, self.files.state)

    async def _end(self, runner: Runner) -> Summary:
        """Write the state down, once what it says is on the disk."""
        await runner.finish()
        self.state = self.state.at(
            self.state.phase, progress=runner.account.progress(self.state).as_dict(), pid=None
        )
        await in_thread(self.state.write, self.files.state)
        self.files.cancel.unlink(missing_ok=True)
        return runner.account.summary(self.state)

    async def _ask_to_cancel(self) -> None:
        self.files.cancel.touch()
        give_up = time.monotonic() + CANCEL_WITHIN_S
        while self.files.cancel.exists():
            if time.monotonic() > give_up:
                raise TimeoutError(
                    f"the process that runs {self.state.id} has not ended it within "
                    f"{CANCEL_WITHIN_S:g} s"
                )
            await asyncio.sleep(0.1)


def find_files(path: Path) -> BatchFiles:
    """The files of a batch that was begun, by its output or state file, or by its input where the
    output has the usual name.

    Raises:
        BatchError: there is no batch beside it.
    """
    usual = BatchFiles.beside(path).state
    beside = [path, path.with_name(f"{path.name}.batch"), usual]
    for state in beside:
        if state.name.endswith(".batch") and state.exists():
            found = BatchState.read(state)
            output = state.with_name(state.name.removesuffix(".batch"))
            return BatchFiles(Path(found.source), output, Path(found.errors))
    raise BatchError(
        f"no batch was begun for {path}: neither {beside[1].name} nor {beside[2].name} is beside it"
    )
