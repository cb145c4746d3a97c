"""`tokenfleet batch run|submit|validate`: a file of requests through the fleet to one of responses.

Everything that decides is in producer/batch; here are its flags. Interrupting a command leaves a
batch that `resume` takes up, and running the same command again does the same.
"""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenfleet.worker.commands import base, batch_base
from tokenfleet.worker.commands.base import Namespace, Output, OutputOption, RedisUrl
from tokenfleet.worker.commands.batch_base import InFlight, PatienceS, Plain, TimeoutS, Way
from tokenfleet.worker.commands.jobs import Priority

if TYPE_CHECKING:
    from tokenfleet.producer.batch import (
        Batch,
        BatchFiles,
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
OutputFile = Annotated[
    Path | None, typer.Option("--output-file", help="Default: INPUT.output.jsonl.")
]
ErrorFile = Annotated[
    Path | None, typer.Option("--error-file", help="Default: INPUT.errors.jsonl.")
]
Model = Annotated[str | None, typer.Option(help="Run every line on this model, whatever it names.")]
Endpoint = Annotated[
    str | None, typer.Option(help="Every line must have this url; default: the first line's.")
]
FormOption = Annotated[Form, typer.Option("--format", help="auto: as the first line looks.")]
RawPrompts = Annotated[
    bool,
    typer.Option("--raw/--chat", help="Prompts as they are, or as chat messages."),
]
MaxTokens = Annotated[int | None, typer.Option(min=0, help="For lines that do not say.")]
Temperature = Annotated[float | None, typer.Option(min=0, help="For lines that do not say.")]
MaxLines = Annotated[int, typer.Option(min=1, help="Refuse longer files.")]
SkipInvalid = Annotated[
    bool, typer.Option("--skip-invalid", help="Faulty lines go to the error file.")
]
Ordered = Annotated[bool, typer.Option("--ordered", help="Write in the order of the input.")]
Tenant = Annotated[str, typer.Option(envvar="TOKENFLEET_TENANT")]
WindowS = Annotated[
    float | None, typer.Option(min=1, help="Lines that have not ended after this long expire.")
]
MILLION = 1_000_000


def batch_run(
    input: Input,
    output_file: OutputFile = None,
    error_file: ErrorFile = None,
    model: Model = None,
    endpoint: Endpoint = None,
    form: FormOption = Form.AUTO,
    raw: RawPrompts = False,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    max_lines: MaxLines = MILLION,
    skip_invalid: SkipInvalid = False,
    ordered: Ordered = False,
    priority: Annotated[Priority, typer.Option()] = Priority.BATCH,
    tenant: Tenant = "default",
    window_s: WindowS = None,
    in_flight: InFlight = 4096,
    patience_s: PatienceS = 300.0,
    timeout_s: TimeoutS = None,
    plain: Plain = False,
    redis_url: RedisUrl = base.DEFAULT_URL,
    namespace: Namespace = base.DEFAULT_NAMESPACE,
    output: OutputOption = Output.TEXT,
) -> None:
    """Run a file to its end; run again after a kill, it goes on where it was."""
    files = _files(input, output_file, error_file, output)
    rules = _rules(
        model, endpoint, form, max_lines, raw=raw, max_tokens=max_tokens, temperature=temperature
    )
    settings = _settings(
        skip_invalid=skip_invalid,
        ordered=ordered,
        priority=priority.value,
        tenant=tenant,
        window_s=window_s,
    )
    batch = _prepared(files, rules, settings, output)

    way = Way(in_flight, patience_s, timeout_s, plain)
    batch_base.run_to_end(batch, output, redis_url, namespace, way)


def batch_submit(
    input: Input,
    output_file: OutputFile = None,
    error_file: ErrorFile = None,
    model: Model = None,
    endpoint: Endpoint = None,
    form: FormOption = Form.AUTO,
    raw: RawPrompts = False,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    max_lines: MaxLines = MILLION,
    skip_invalid: SkipInvalid = False,
    ordered: Ordered = False,
    priority: Annotated[Priority, typer.Option()] = Priority.BATCH,
    tenant: Tenant = "default",
    window_s: WindowS = None,
    patience_s: PatienceS = 300.0,
    plain: Plain = False,
    redis_url: RedisUrl = base.DEFAULT_URL,
    namespace: Namespace = base.DEFAULT_NAMESPACE,
    output: OutputOption = Output.TEXT,
) -> None:
    """Put all lines into the queue and return; `watch` or `results` collect.

    Results are kept for the workers' result_ttl_s, a day unless they were told otherwise.
    """
    files = _files(input, output_file, error_file, output)
    rules = _rules(
        model, endpoint, form, max_lines, raw=raw, max_tokens=max_tokens, temperature=temperature
    )
    settings = _settings(
        skip_invalid=skip_invalid,
        ordered=ordered,
        priority=priority.value,
        tenant=tenant,
        window_s=window_s,
    )
    batch = _prepared(files, rules, settings, output)

    async def work(client: AsyncClient) -> int:
        from tokenfleet.worker.commands.batch_view import shown

        with shown(batch.state.lines, plain=plain) as view:
            await batch.submit(client, on_progress=view.show, patience_s=patience_s)
        batch_base.print_glance(batch, output)
        return base.OK

    base.run(base.with_client(work, redis_url, namespace), output)


def batch_validate(
    input: Input,
    model: Model = None,
    endpoint: Endpoint = None,
    form: FormOption = Form.AUTO,
    raw: RawPrompts = False,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    max_lines: MaxLines = MILLION,
    output: OutputOption = Output.TEXT,
) -> None:
    """Check a file: each fault with its line and code. Nothing is submitted."""
    from tokenfleet.producer.batch import Kind, check_file

    rules = _rules(
        model, endpoint, form, max_lines, raw=raw, max_tokens=max_tokens, temperature=temperature
    )

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
    raise typer.Exit(base.BAD_INPUT if wrong else base.OK)


def _print_report(report: FileReport, wrong: int, model: str | None, output: Output) -> None:
    if output is Output.TEXT:
        said = f"{report.lines} line(s), {report.valid} valid, {wrong} problem(s)"
        typer.echo(f"{said}; {report.endpoint or 'no url'}, model {model}")
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


def _files(
    input: Path, output_file: Path | None, error_file: Path | None, output: Output
) -> BatchFiles:
    from tokenfleet.producer.batch import BatchFiles

    return batch_base.checked(lambda: BatchFiles.beside(input, output_file, error_file), output)


def _rules(
    model: str | None,
    endpoint: str | None,
    form: Form,
    max_lines: int,
    *,
    raw: bool,
    max_tokens: int | None,
    temperature: float | None,
) -> FileRules:
    from tokenfleet.producer.batch import ENDPOINTS, FileRules
    from tokenfleet.producer.batch import Form as FileForm

    if endpoint is not None and endpoint not in ENDPOINTS:
        raise typer.BadParameter(f"must be {' or '.join(ENDPOINTS)}", param_hint="--endpoint")
    given = {"max_tokens": max_tokens, "temperature": temperature}
    return FileRules(
        endpoint=endpoint,
        model=model,
        form=FileForm(form.value),
        raw_prompts=raw,
        defaults={name: value for name, value in given.items() if value is not None},
        max_lines=max_lines,
    )


def _settings(*, skip_invalid: bool, **given: Any) -> BatchSettings:
    from tokenfleet.producer.batch import BatchSettings

    return BatchSettings(skip="all" if skip_invalid else "none", **given)


def _prepared(
    files: BatchFiles, rules: FileRules, settings: BatchSettings, output: Output
) -> Batch:
    """Check and begin, or find what was begun; exit 2 when it may not run."""
    from tokenfleet.producer.batch import Batch, BatchRefused

    if files.input.is_file() and files.input.stat().st_size > WORTH_A_WORD_BYTES:
        base.note(f"checking {files.input}")
    try:
        return batch_base.checked(lambda: Batch.prepare(files, rules, settings), output)
    except BatchRefused as error:
        shown = [p for p in error.report.problems if p.kind != "warning"][:MOST_SHOWN]
        for problem in shown:
            base.note(batch_base.sentence(problem))
        if any(p.param == "model" for p in shown):
            base.note("lines that name no model run on the one that --model names")
        more = sum(error.report.codes.values()) - len(shown)
        if more > 0:
            base.note(f"... and {more} more; see all with: tokenfleet batch validate {files.input}")
        base.fail(error, output)
