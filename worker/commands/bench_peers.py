"""`tokenfleet bench peers|quality`: our figures beside others', what cheap arithmetic costs."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tokenfleet.worker.commands import base
from tokenfleet.worker.commands.base import Output, OutputOption
from tokenfleet.worker.commands.bench import (
    JsonPath,
    Model,
    Threads,
    Work,
    WorkloadName,
    report,
)

WORK = Work(repeats=2)


class Ours(StrEnum):
    ENGINE = "engine"
    INT8 = "engine int8"
    FLEET = "fleet"


class Rival(StrEnum):
    VLLM_BF16 = "vllm bfloat16"
    VLLM_FP16 = "vllm float16"
    VLLM_SERVER_BF16 = "vllm-server bfloat16"
    VLLM_SERVER_FP16 = "vllm-server float16"
    LLAMA_Q8 = "llama.cpp Q8_0"
    LLAMA_F16 = "llama.cpp F16"
    TRANSFORMERS = "transformers"


def bench_peers(
    work: Work = WORK,
    peer: Annotated[
        list[Rival] | None, typer.Option(help="Only these; repeatable.", show_default="all")
    ] = None,
    ours: Annotated[
        list[Ours] | None,
        typer.Option(
            help="Of ours, only these beside the engine; fleet: through Redis and a worker.",
            show_default="all",
        ),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Where environments are kept: gigabytes, made on first use.",
            file_okay=False,
            show_default="~/.cache/tokenfleet/peers",
        ),
    ] = None,
    json_path: JsonPath = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Run W and S on our engine, on vLLM, llama.cpp and transformers in turns.

    Without -w it is both, without -n W is run with 1, 4, 8 and 32 jobs at once.
    """
    from tokenfleet.worker.bench.peers import run
    from tokenfleet.worker.bench.runs import BenchConfig

    config = run.PeersConfig(
        BenchConfig(
            model=work.model or base.demo_model(),
            counts=tuple(work.count or (1, 4, 8, 32)),
            workloads=tuple(w.value for w in work.workload or (WorkloadName.W, WorkloadName.S)),
            repeats=work.repeats,
            threads=work.threads,
            compare=("transformers",),
            engine={"max_num_batched_tokens": 576},
        ),
        cache or run.default_cache(),
        ours=tuple(name.value for name in Ours if name in {Ours.ENGINE, *(ours or Ours)}),
        peers=tuple(rival.value for rival in peer or Rival),
    )
    report(lambda _, say, keep: run.bench_peers(config, say, keep), config.bench, json_path, output)


def bench_quality(
    model: Model = None,
    threads: Threads = 0,
    json_path: JsonPath = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Compare negative log-likelihood and likeliest tokens of each arithmetic with float32's."""
    from tokenfleet.worker.bench.quality import quality

    found = quality(model or base.demo_model(), threads=threads, say=base.note)
    if json_path is not None:
        json_path.write_text(json.dumps(found, indent=2) + "\n")
    if output is Output.JSON:
        base.print_json(found)
        return
    rows = [
        {
            "arithmetic": name,
            "text": title,
            "tokens": figures["tokens"],
            "nll": f"{figures['nll']:.4f}",
            "change": f"{figures['nll_change']:+.2%}",
            "top1": f"{figures['top1_agreement']:.1%}",
        }
        for name, setting in found["settings"].items()
        for title, figures in {**setting["texts"], "all": setting["all"]}.items()
    ]
    titles = {"top1": "same likeliest token"}
    columns = ("arithmetic", "text", "tokens", "nll", "change", "top1")
    base.print_rows(columns, rows, Output.TEXT, empty="", titles=titles)
