"""Checking a batch file: every line is understood before the first one is submitted.

    invalid_json_line            not UTF-8, not JSON, no object, blank, or too long
    missing_required_parameter   custom_id, method, url, body, or a field of the body is not there
    invalid_custom_id            empty, not a text, or too long
    duplicate_custom_id          an earlier line has it
    invalid_method               not POST
    invalid_url                  not an endpoint that is served
    url_mismatch                 another endpoint than the batch's
    model_mismatch               another model than the batch's
    unknown_parameter, unsupported_parameter, unsupported_value, invalid_type, invalid_value
                                 the body, or a field beside it
    empty_file, too_many_tasks   the file as a whole

Warnings, which stop nothing: `byte_order_mark` and `crlf_line_ending`, both read as if they were
not there.

Invariant: a second pass over the same bytes finds the same lines and the same problems.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tokenfleet.producer.batch.forms import (
    Form,
    LineRefused,
    Task,
    decode,
    form_of,
    read_prompt,
    read_task,
)
from tokenfleet.producer.batch.lines import RawLine, read_lines
from tokenfleet.producer.batch.refusals import RequestRefused
from tokenfleet.producer.batch.responses import CHAT, ENDPOINTS
from tokenfleet.producer.batch.translate import TranslatedRequest, translate_request
from tokenfleet.producer.errors import InvalidJob
from tokenfleet.producer.request import MAX_JOB_BYTES, JobRequest

MAX_LINES = 1_000_000
MAX_LINE_BYTES = 4 << 20
MOST_KEPT = 1000
"""Problems that a report holds; all are counted."""


class Kind(StrEnum):
    """What a problem is about: it decides whether its line may be skipped."""

    FILE = "file"
    """The file as a whole: never skipped."""
    LINE = "line"
    """The line around the body."""
    BODY = "body"
    """The request itself: what the API answers with status 400."""
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and where."""

    kind: Kind
    code: str
    message: str
    line: int | None = None
    """From 1; None: the file as a whole."""
    param: str | None = None
    custom_id: str | None = None


@dataclass(frozen=True, slots=True)
class FileRules:
    """What a batch file has to be."""

    endpoint: str | None = None
    """Every line's url; None: the first line's."""
    model: str | None = None
    """Runs every line, whatever its body names; None: the first line's, which all must name."""
    form: Form = Form.AUTO
    raw_prompts: bool = False
    """In a file of prompts, `prompt` is continued as it is, and is no chat message."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Body fields for lines that do not have them."""
    max_lines: int = MAX_LINES
    max_line_bytes: int = MAX_LINE_BYTES
    max_job_bytes: int = MAX_JOB_BYTES


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line that can be submitted."""

    number: int
    offset: int
    """Where it begins in the file."""
    custom_id: str
    request: TranslatedRequest


@dataclass(frozen=True, slots=True)
class FileReport:
    """What one pass over a file found."""

    lines: int
    valid: int
    size: int
    digest: str
    """Of all bytes: the file is the same as long as this is."""
    endpoint: str | None
    model: str | None
    form: Form
    problems: tuple[Problem, ...]
    """The first ones; warnings included."""
    codes: Mapping[str, int]
    """How often each code came, warnings not included."""
    kinds: Mapping[Kind, int]

    def stops(self, skip: str) -> bool:
        """Whether the file may not run: `skip` is none, bodies or all."""
        skipped = {"none": set(), "bodies": {Kind.BODY}, "all": {Kind.BODY, Kind.LINE}}[skip]
        harmless = skipped | {Kind.WARNING}
        return any(count for kind, count in self.kinds.items() if kind not in harmless)


class Checker:
    """Judges the lines of one file, one after the other."""

    def __init__(self, rules: FileRules) -> None:
        self._rules = rules
        self._seen: set[bytes] = set()
        self.form = rules.form
        self.endpoint = rules.endpoint
        self.model = rules.model

    def line(self, line: RawLine, *, translated: bool = True) -> BatchLine | Problem | None:
        """The line, or the first thing that is wrong with it.

        translated: False skips the body (and returns None): for lines that are done, whose
            custom_id, url and model still count for the lines behind them.
        """
        custom_id: str | None = None
        try:
            task = self._task(line)
            custom_id = task.custom_id
            self._first_of_its_kind(task)
            if not translated:
                return None
        except LineRefused as error:
            return _problem(Kind.LINE, error, line, custom_id or error.custom_id)
        try:
            return BatchLine(line.number, line.offset, custom_id, self._request(task, line))
        except RequestRefused as error:
            return _problem(Kind.BODY, error, line, custom_id)

    def again(self, line: RawLine) -> BatchLine:
        """A line that was good before."""
        task = self._task(line)
        return BatchLine(line.number, line.offset, task.custom_id, self._request(task, line))

    def _task(self, line: RawLine) -> Task:
        value = decode(line, self._rules.max_line_bytes)
        if self.form is Form.AUTO:
            self.form = form_of(value)
        if self.form is Form.PROMPTS:
            return read_prompt(value, line.number, raw=self._rules.raw_prompts)
        return read_task(value)

    def _first_of_its_kind(self, task: Task) -> None:
        """What has to be compared with the lines before: custom_id, url, model."""
        digest = blake2b(task.custom_id.encode(), digest_size=16).digest()
        if digest in self._seen:
            raise LineRefused(
                "duplicate_custom_id",
                f"custom_id {task.custom_id!r:.80} is taken by an earlier line",
                "custom_id",
            )
        self._seen.add(digest)
        self._same_endpoint(task)
        self._same_model(task)

    def _same_endpoint(self, task: Task) -> None:
        if self.form is Form.PROMPTS:
            return
        if self.endpoint is None and task.url not in ENDPOINTS:
            known = " or ".join(ENDPOINTS)
            raise LineRefused("invalid_url", f"url must be {known}, got {task.url!r:.80}", "url")
        self.endpoint = self.endpoint or task.url
        if task.url != self.endpoint:
            raise LineRefused(
                "url_mismatch",
                f"url must be {self.endpoint} as in the whole batch, got {task.url!r:.80}",
                "url",
            )

    def _same_model(self, task: Task) -> None:
        asked = task.body.get("model", self._rules.defaults.get("model"))
        if self._rules.model is not None or not isinstance(asked, str):
            return
        self.model = self.model or asked
        if asked != self.model:
            raise LineRefused(
                "model_mismatch",
                f"model must be {self.model!r} as in the whole batch, got {asked!r:.80}",
                "body.model",
            )

    def _request(self, task: Task, line: RawLine) -> TranslatedRequest:
        body = {**self._rules.defaults, **task.body}
        request = translate_request(task.url, body, model=self._rules.model)
        try:
            job = JobRequest(**request.job)
            if line.size > self._rules.max_job_bytes // 2:
                job.pack(self._rules.max_job_bytes)
        except InvalidJob as error:
            raise RequestRefused("invalid_value", str(error), error.field) from None
        return request


def check_file(
    path: Path | str,
    rules: FileRules | None = None,
    *,
    on_problem: Callable[[Problem], object] | None = None,
) -> FileReport:
    """Read the whole file once. Raises OSError when it cannot be read."""
    return _Pass(rules or FileRules(), on_problem).over(Path(path))


class _Pass:
    """One pass over one file, and what it counts."""

    def __init__(self, rules: FileRules, on_problem: Callable[[Problem], object] | None) -> None:
        self._rules = rules
        self._on_problem = on_problem
        self._checker = Checker(rules)
        self._kept: list[Problem] = []
        self._codes: Counter[str] = Counter()
        self._kinds: Counter[Kind] = Counter()
        self._warned: set[str] = set()

    def over(self, path: Path) -> FileReport:
        hashed = blake2b(digest_size=16)
        lines = valid = size = 0
        reader = read_lines(path, max_line_bytes=self._rules.max_line_bytes, on_bytes=hashed.update)
        for line in reader:
            lines, size = line.number, size + line.size
            if lines > self._rules.max_lines:
                text = f"the file has more than {self._rules.max_lines} lines; split it"
                self._found(Problem(Kind.FILE, "too_many_tasks", text, lines))
                break
            self._warn(line)
            judged = self._checker.line(line)
            if isinstance(judged, Problem):
                self._found(judged)
            else:
                valid += 1
        if not lines:
            self._found(Problem(Kind.FILE, "empty_file", f"{path.name} has no lines"))
        return FileReport(
            lines,
            valid,
            size,
            hashed.hexdigest(),
            self._checker.endpoint or (CHAT if self._checker.form is Form.PROMPTS else None),
            self._checker.model,
            self._checker.form,
            tuple(self._kept),
            dict(self._codes),
            dict(self._kinds),
        )

    def _warn(self, line: RawLine) -> None:
        for there, code, message in (
            (line.bom, "byte_order_mark", "begins with a byte order mark, which is left out"),
            (line.crlf, "crlf_line_ending", "ends in CR LF, and maybe others do; CR is left out"),
        ):
            if there and code not in self._warned:
                self._warned.add(code)
                self._found(Problem(Kind.WARNING, code, f"the line {message}", line.number))

    def _found(self, problem: Problem) -> None:
        self._kinds[problem.kind] += 1
        if problem.kind is not Kind.WARNING:
            self._codes[problem.code] += 1
        if len(self._kept) < MOST_KEPT:
            self._kept.append(problem)
        if self._on_problem is not None:
            self._on_problem(problem)


def _problem(kind: Kind, error: RequestRefused, line: RawLine, custom_id: str | None) -> Problem:
    return Problem(kind, error.code, error.message, line.number, error.param, custom_id)
