"""What is kept of a batch beside its output: who it is, how it runs, how far it was last seen.

The files that hold results are the truth about which lines are done; the state file only says what
they belong to. It is replaced in one move, so a kill leaves the old one or the new one.

Invariant: id, input and settings never change once written; a job's id follows from them alone.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, Self

from tokenfleet.producer.batch.check import FileReport, FileRules
from tokenfleet.producer.batch.forms import Form
from tokenfleet.producer.errors import InvalidJob, TokenfleetError
from tokenfleet.producer.keys import PRIORITIES, check_name, derived_job_id

VERSION = 1

Skip = Literal["none", "bodies", "all"]


class BatchError(TokenfleetError):
    """A batch cannot be opened or run as it was asked for."""


class BatchRefused(BatchError):
    """The input file may not run; nothing was submitted. `report` says why."""

    def __init__(self, report: FileReport, path: Path) -> None:
        wrong = sum(report.codes.values())
        first = next((p for p in report.problems if p.code in report.codes), None)
        place = "" if first is None or first.line is None else f"line {first.line}: "
        said = "" if first is None else f"; first: {place}{first.code}: {first.message}"
        super().__init__(f"{path}: {wrong} problem(s), nothing was submitted{said}")
        self.report = report


class Phase(StrEnum):
    """Where a batch is in its life."""

    RUNNING = "running"
    """Begun, and not at its end; a process may be at it or not."""
    SUBMITTED = "submitted"
    """Every line is in the queue; nobody has collected all results yet."""
    CANCELLED = "cancelled"
    COMPLETED = "completed"


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """Where a batch reads and writes: all it has on disk lies beside its output."""

    input: Path
    output: Path
    errors: Path

    @classmethod
    def beside(
        cls, source: Path | str, output: Path | None = None, errors: Path | None = None
    ) -> Self:
        """`requests.jsonl` gives `requests.output.jsonl` and `requests.errors.jsonl`."""
        source = Path(source)
        if not source.name:
            raise BatchError(f"{source} is a directory; name a file")
        stem = source.name.removesuffix(source.suffix)
        output = output or source.with_name(f"{stem}.output.jsonl")
        if errors is None:
            name = output.name.removesuffix(output.suffix).removesuffix(".output")
            errors = output.with_name(f"{name}.errors.jsonl")
        return cls(source, output, errors)

    @property
    def state(self) -> Path:
        """The state file."""
        return self.output.with_name(f"{self.output.name}.batch")

    @property
    def cancel(self) -> Path:
        """Tells the process that runs the batch to cancel it."""
        return self.output.with_name(f"{self.output.name}.cancel")


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How a batch runs. Fixed when it is first prepared."""

    skip: Skip = "none"
    """Which faulty lines go to the error file instead of stopping the batch: `bodies` are those
    whose request is refused (as in the API), `all` also those that are broken around it."""
    ordered: bool = False
    """Output and errors each in the order of the input."""
    priority: str = "batch"
    tenant: str = "default"
    window_s: float | None = None
    """Lines that have not ended this long after the start expire; None: they wait."""


@dataclass(frozen=True, slots=True)
class BatchState:
    """The state file's content."""

    id: str
    """`batch_` and 24 hex digits."""
    created_ms: int
    source: str
    """Path of the input."""
    size: int
    digest: str
    lines: int
    settings: BatchSettings
    rules: FileRules
    endpoint: str | None = None
    model: str | None = None
    form: Form = Form.OPENAI
    phase: Phase = Phase.RUNNING
    round: int = 0
    """One more after each cancelling: the jobs of a round have ids of their own."""
    partitions: int | None = None
    """Of the first run; ids depend on it."""
    output: str = ""
    errors: str = ""
    pid: int | None = None
    """Of the process that last ran it; it may be gone."""
    progress: Mapping[str, Any] = field(default_factory=dict)
    """As it was last written down, every few seconds."""

    @classmethod
    def new(
        cls, files: BatchFiles, report: FileReport, rules: FileRules, settings: BatchSettings
    ) -> Self:
        """A batch that has not run."""
        check_name("tenant", settings.tenant)
        if settings.priority not in PRIORITIES:
            raise InvalidJob("priority", settings.priority, f"must be one of {PRIORITIES}")
        return cls(
            id=f"batch_{secrets.token_hex(12)}",
            created_ms=time.time_ns() // 1_000_000,
            source=str(files.input.resolve()),
            size=report.size,
            digest=report.digest,
            lines=report.lines,
            settings=settings,
            rules=rules,
            endpoint=report.endpoint,
            model=rules.model or report.model,
            form=report.form,
            output=str(files.output.resolve()),
            errors=str(files.errors.resolve()),
        )

    def job_id(self, line: int) -> str:
        """The id of a line's job: submitting a line again is submitting the same job again."""
        seed = blake2b(f"{self.id}/{self.round}/{line}".encode(), digest_size=16).digest()
        partition = int.from_bytes(seed[10:]) % (self.partitions or 1)
        return derived_job_id(partition, self.created_ms, seed[:10])

    def write(self, path: Path, *, durable: bool = True) -> None:
        """Replace the file in one move. durable: and wait until it is on the disk."""
        self._scratch(path, durable=durable).replace(path)
        if durable:
            _sync_directory(path.parent)

    def write_first(self, path: Path) -> None:
        """Write the file where there is none. Raises BatchError when another has been faster."""
        scratch = self._scratch(path, durable=True)
        try:
            os.link(scratch, path)
        except FileExistsError:
            raise BatchError(f"{path} was made by another process just now; look at it") from None
        finally:
            scratch.unlink()
        _sync_directory(path.parent)

    def _scratch(self, path: Path, *, durable: bool) -> Path:
        scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        with scratch.open("w", encoding="utf-8") as file:
            json.dump(asdict(self) | {"version": VERSION}, file, indent=1)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        return scratch

    @classmethod
    def read(cls, path: Path) -> Self:
        """Back from `write`. Raises BatchError."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.pop("version") != VERSION:
                raise ValueError(f"its version is not {VERSION}")
            found["rules"]["form"] = Form(found["rules"]["form"])
            found["rules"] = FileRules(**found["rules"])
            found["settings"] = BatchSettings(**found["settings"])
            found |= {"form": Form(found["form"]), "phase": Phase(found["phase"])}
            return cls(**found)
        except FileNotFoundError:
            raise BatchError(f"{path} is not there: no batch has been started for it") from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise BatchError(f"{path} is no state file that can be read: {error}") from error

    def check_input(self, size: int, digest: str) -> None:
        """Refuse to go on with another input. Raises BatchError."""
        if (size, digest) != (self.size, self.digest):
            raise BatchError(
                f"{self.source} has changed since {self.id} was started; put the old content back, "
                "or start anew with another output file"
            )

    def check_settings(self, rules: FileRules, settings: BatchSettings) -> None:
        """Refuse to go on in another way. Raises BatchError."""
        ours, given = _named(self.rules, self.settings), _named(rules, settings)
        for name in sorted(ours | given):
            before, now = ours.get(name), given.get(name)
            if before != now:
                raise BatchError(
                    f"{self.id} was started with {name}={before!r}, not {now!r}; go on with "
                    "`resume`, or start anew with another output file"
                )

    def at(self, phase: Phase, **changes: Any) -> Self:
        """The same in another phase."""
        return replace(self, phase=phase, **changes)


def _named(rules: FileRules, settings: BatchSettings) -> dict[str, Any]:
    """All of both by name; what a line gets that does not say is named as in the line."""
    found = asdict(settings) | asdict(rules)
    defaults = found.pop("defaults")
    return {**found, **defaults}


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
