"""`tokenfleet batch run|submit|validate`: a file of requests through the fleet to one of responses.

Everything that decides is in producer/batch; here are its flags. Interrupting a command leaves a
batch that `resume` takes up, and running the same command again does the same.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenfleet.worker.commands import base, batch_base
from tokenfleet.worker.commands.base import Broker, Output, OutputOption
from tokenfleet.worker.commands.batch_base import PatienceS, Plain, Way
from tokenfleet.worker.commands.jobs import Priority, PriorityOption, Tenant

if TYPE_CHECKING:
    from tokenfleet.producer.batch import (
        Batch,
        BatchSettings,
        FileReport,
        FileRules,
        Problem,
    )
    from tokenfleet.producer.client import AsyncClient

WORTH_A_WORD_BYTES = 10_000_000
MOST_SHOWN = 20
"""Problems that a refused run shows; `validate` shows all."""


class Form(StrEnum):
    AUTO = "auto"
    OPENAI = "openai"
    PROMPTS = "prompts"


Input = Annotated[
    Path, typer.Argument(help="JSONL: OpenAI Batch requests, or prompts.", show_default=False)
]
MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Requests:
    """How a file is read, and what its lines get that do not say."""

    model: Annotated[
        str | None, typer.Option(help="Run every line on this model, whatever it names.")
    ] = None
    endpoint: Annotated[
        str | None, typer.Option(help="Every line must have this url; default: the first line's.")
    ] = None
    form: Annotated[Form, typer.Option("--format", help="auto: as the first line looks.")] = (
        Form.AUTO
    )
    raw: Annotated[
        bool,
        typer.Option("--raw/--chat", help="Prompts continued as they are, or as chat messages."),
    ] = False
    max_tokens: Annotated[
        int | None, typer.Option(min=0, help="Most output tokens of lines that do not say.")
    ] = None
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Of lines that do not say; 0: the likeliest token.")
    ] = None
    max_lines: Annotated[int, typer.Option(min=1, help="Refuse longer files.")] = MILLION

    def rules(self) -> FileRules:
        """The same for the library. Exits with 2 at an endpoint that is none."""
        from tokenfleet.producer.batch import ENDPOINTS, FileRules
        from tokenfleet.producer.batch import Form as FileForm

        if self.endpoint is not None and self.endpoint not in ENDPOINTS:
            raise typer.BadParameter(f"must be {' or '.join(ENDPOINTS)}", param_hint="--endpoint")
        given = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        return FileRules(
            endpoint=self.endpoint,
            model=self.model,
            form=FileForm(self.form.value),
            raw_prompts=self.raw,
            defaults={name: value for name, value in given.items() if value is not None},
            max_lines=self.max_lines,
        )


@dataclass(frozen=True, slots=True)
class Manner:
    """Where a batch writes, and how its jobs stand in the queue. Fixed when it is begun."""

    output_file: Annotated[
        Path | None, typer.Option(help="Responses.", show_default="INPUT.output.jsonl")
    ] = None
    error_file: Annotated[
        Path | None, typer.Option(help="Failed lines.", show_default="INPUT.errors.jsonl")
    ] = None
    skip_invalid: Annotated[
        bool,
        typer.Option("--skip-invalid", help="Faulty lines go to the error file, the others run."),
    ] = False
    ordered: Annotated[bool, typer.Option("--ordered", help="Write in the order of the input.")] = (
        False
    )
    priority: PriorityOption = Priority.BATCH
    tenant: Tenant = "default"
    window_s: Annotated[
        float | None, typer.Option(min=1, help="Lines that have not ended after this long expire.")
    ] = None

    def settings(self) -> BatchSettings:
        """The same for the library."""
        from tokenfleet.producer.batch import BatchSettings

        return BatchSettings(
            skip="all" if self.skip_invalid else "none",
            ordered=self.ordered,
            priority=self.priority.value,
            tenant=self.tenant,
            window_s=self.window_s,
        )


REQUESTS, MANNER = Requests(), Manner()


def batch_run(
    input: Input,
    requests: Requests = REQUESTS,
    manner: Manner = MANNER,
    way: Way = batch_base.WAY,
    broker: Broker = base.BROKER,
    output: OutputOption = Output.TEXT,
) -> None:
    """Run a file to its end; run again after a kill, it goes on where it was."""
    batch = _prepared(input, requests, manner, output)
    batch_base.run_to_end(batch, output, broker, way)


def batch_submit(
    input: Input,
    requests: Requests = REQUESTS,
    manner: Manner = MANNER,
    patience_s: PatienceS = 300.0,
    plain: Plain = False,
    broker: Broker = base.BROKER,
    output: OutputOption = Output.TEXT,
) -> None:
    """Put all lines into the queue and return; `watch` or `results` collect.

    Results are kept for the workers' result_ttl_s, a day unless they were told otherwise.
    """
    batch = _prepared(input, requests, manner, output)

    async def work(client: AsyncClient) -> int:
        from tokenfleet.worker.commands.batch_view import shown

        with shown(batch.state.lines, plain=plain) as view:
            await batch.submit(client, on_progress=view.show, patience_s=patience_s)
        batch_base.print_glance(batch, output)
        return base.OK

    base.run(base.with_client(work, broker), output)


def batch_validate(
    input: Input, requests: Requests = REQUESTS, output: OutputOption = Output.TEXT
) -> None:
    """Check a file: each fault with its line and code. Nothing is submitted."""
    from tokenfleet.producer.batch import Kind, check_file

    rules = requests.rules()

    def show(problem: Problem) -> None:
        if output is Output.JSON:
            base.print_json(asdict(problem))
        else:
            typer.echo(batch_base.sentence(problem))

    try:
        report = check_file(input, rules, on_problem=show)
    except BrokenPipeError:
        base.reader_gone()
    except OSError as error:
        batch_base.unreadable(input, error, output)
    wrong = sum(count for kind, count in report.kinds.items() if kind is not Kind.WARNING)
    _print_report(report, wrong, rules.model or report.model, output)
    _advise(report)
    raise typer.Exit(base.BAD_INPUT if wrong else base.OK)


def _print_report(report: FileReport, wrong: int, model: str | None, output: Output) -> None:
    if output is Output.TEXT:
        said = f"{report.lines} line(s), {report.valid} valid, {wrong} problem(s)"
        named = "no model" if model is None else f"model {model}"
        typer.echo(f"{said}; {report.endpoint or 'no url'}, {named}")
        return
    base.print_json(
        {
            "lines": report.lines,
            "valid": report.valid,
            "problems": wrong,
            "codes": report.codes,
            "endpoint": report.endpoint,
            "model": report.model,
            "format": report.form,
        }
    )


def _advise(report: FileReport, *, skippable: bool = False) -> None:
    """The ways out that a file's problems have in common."""
    if any(p.param == "model" for p in report.problems):
        base.note("lines that name no model run on the one that --model names")
    if report.lines and report.codes.get("invalid_json_line") == report.lines:
        base.note('a prompt is a JSON text in quotes, one a line: "Why is the sky blue?"')
    elif skippable and report.valid:
        base.note(f"--skip-invalid runs the {report.valid} valid line(s) all the same")


def _prepared(input: Path, requests: Requests, manner: Manner, output: Output) -> Batch:
    """Check and begin, or find what was begun; exit 2 when it may not run."""
    from tokenfleet.producer.batch import Batch, BatchFiles, BatchRefused

    files = batch_base.checked(
        lambda: BatchFiles.beside(input, manner.output_file, manner.error_file), output
    )
    rules, settings = requests.rules(), manner.settings()
    if files.input.is_file() and files.input.stat().st_size > WORTH_A_WORD_BYTES:
        base.note(f"checking {files.input}")
    try:
        return batch_base.checked(lambda: Batch.prepare(files, rules, settings), output)
    except BatchRefused as error:
        report = error.report
        shown = [p for p in report.problems if p.kind != "warning"][:MOST_SHOWN]
        for problem in shown:
            base.note(batch_base.sentence(problem))
        more = sum(report.codes.values()) - len(shown)
        if more > 0:
            base.note(f"... and {more} more; see all with: tokenfleet batch validate {files.input}")
        _advise(report, skippable=not manner.skip_invalid)
        base.fail(error, output)
