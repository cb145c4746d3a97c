"""kill -9 of the process that runs a batch, again and again: every line once, and little memory.

The short form has two thousand lines; TOKENFLEET_CHAOS=long has two hundred thousand.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenfleet.producer.batch import BatchFiles, Phase, find_files
from tokenfleet.producer.batch.output import count_lines
from tokenfleet.producer.batch.state import BatchState
from tokenfleet.producer.embedded import EmbeddedServer
from tokenfleet.worker.demo.worker_process import WorkerProcess

LONG = os.environ.get("TOKENFLEET_CHAOS") == "long"
LINES = 200_000 if LONG else 2_000
MOST_BYTES = 300 << 20
DETAIL = "x" * (400 if LONG else 40)


def lines(count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        body = {"model": "m", "prompt": f"{number} {DETAIL}", "max_tokens": 1}
        base = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions"}
        yield {**base, "body": body}


class Runs:
    """`tokenfleet batch run` as a process, killed and started again."""

    def __init__(self, path: Path, redis_url: str) -> None:
        self.files = BatchFiles.beside(path)
        self._command = [
            *(sys.executable, "-m", "tokenfleet.worker.commands.cli", "batch", "run", str(path)),
            *("--redis-url", redis_url, "-o", "json"),
        ]
        self.peak_bytes = 0
        self.process: subprocess.Popen[str]

    def start(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TOKENFLEET_")}
        self.process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def look(self) -> int:
        """Lines that are done; takes note of the memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        peaks = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
        self.peak_bytes = max([self.peak_bytes, *(int(kilo) * 1024 for kilo in peaks)])
        return self.num_done

    @property
    def num_done(self) -> int:
        """Lines that are done."""
        return count_lines(self.files.output) + count_lines(self.files.errors)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait() == -signal.SIGKILL
        self.process.communicate()

    async def until_done(self, count: int) -> None:
        """Wait until that many lines are done."""
        while self.look() < count:
            if self.process.poll() is not None:
                raise AssertionError(self.process.communicate())
            await asyncio.sleep(0.5 if LONG else 0.02)

    async def end(self) -> dict[str, Any]:
        """Wait for its end, and read what it said."""
        while self.process.poll() is None:
            self.look()
            await asyncio.sleep(0.2)
        said, errors = self.process.communicate()
        assert self.process.returncode == 0, errors
        summary: dict[str, Any] = json.loads(said)
        return summary


@pytest.mark.chaos
@pytest.mark.timeout(7200 if LONG else 300)
async def test_killed_again_and_again_every_line_is_answered_once(
    requests: Callable[..., Path], tmp_path: Path, byte_tokenizer: Path
) -> None:
    dice = random.Random(20261130)
    path = requests(lines(LINES))
    with EmbeddedServer() as server:
        worker = WorkerProcess(
            "w0",
            {
                "redis_url": server.url,
                "model": byte_tokenizer,
                "model_name": "m",
                "simulated_step_ms": 5 if LONG else 20,
                "max_num_seqs": 256 if LONG else 8,  # few lines are done while we look away
            },
            tmp_path / "w0.log",
            environment={"OMP_NUM_THREADS": "1", "TOKENFLEET_MODEL": None},
        )
        await worker.start()
        await worker.ready()
        runs = Runs(path, server.url)
        began = time.monotonic()
        runs.start()
        await runs.until_done(LINES // 2 if LONG else LINES // 3)
        runs.kill()
        assert runs.num_done < LINES
        for _ in range(3):  # while it starts, or wherever it is a few dozen lines later
            before = runs.num_done
            if before > LINES * 3 // 4:
                break  # we were held up for long
            runs.start()
            if dice.random() < 0.5:
                await asyncio.sleep(dice.uniform(0.0, 0.5))
            else:
                await runs.until_done(before + dice.randint(1, LINES // 10))
            runs.look()
            runs.kill()
        runs.start()
        summary = await runs.end()
        took_s = time.monotonic() - began
        await worker.stop(0.0)
    print(f"{LINES} lines, peak {runs.peak_bytes / 2**20:.0f} MB, {took_s:.0f} s")
    with runs.files.output.open("rb") as output:
        seen = [json.loads(line)["custom_id"] for line in output]
    assert len(seen) == LINES
    assert set(seen) == {f"c{number}" for number in range(LINES)}
    assert (summary["completed"], summary["failed"], summary["left"]) == (LINES, 0, 0)
    assert runs.peak_bytes < MOST_BYTES
    assert BatchState.read(find_files(path).state).phase is Phase.COMPLETED
