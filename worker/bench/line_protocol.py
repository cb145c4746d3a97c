"""How a bench talks to an engine under test in another process: JSON lines, in and out.

The standard library only: it also runs inside a peer's environment, which has nothing of ours.
Between commands a child waits and computes nothing, so that several can take turns on the same
cores.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

Jobs = list[tuple[list[int], int]]
"""Prompt ids, and how many tokens are to be made from them."""
Runner = Callable[[Jobs, dict[str, Any]], dict[str, float]]
"""Figures of one workload; `peak_rss_bytes` when it is not this process that computes."""
Opener = Callable[[dict[str, Any]], tuple[Runner, dict[str, Any]]]
"""From options to something that runs jobs and says figures, and to facts about it."""


def serve(openers: Mapping[str, Opener]) -> None:
    """Open the engine that the first line names, then run a workload per line until none comes."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is not an answer
    opened = json.loads(sys.stdin.readline())
    started = time.perf_counter()
    try:
        runner, facts = openers[opened["engine"]](opened)
    except Exception as error:  # noqa: BLE001 - said to the parent, which ends the bench with it
        _answer(answers, {"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)
    _answer(answers, facts | {"load_s": time.perf_counter() - started})
    for line in sys.stdin:
        command = json.loads(line)
        figures = runner([(prompt, output) for prompt, output in command["run"]], command)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        _answer(answers, {"peak_rss_bytes": float(peak)} | figures)


def _answer(answers: Any, value: object) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()
