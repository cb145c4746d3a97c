"""A batch through a real model: SmolLM2 on this machine's CPU.

The short form has eight lines; TOKENFLEET_CHAOS=long has two hundred.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenfleet.producer import AsyncClient
from tokenfleet.producer.batch import Batch, BatchFiles, BatchSettings
from tokenfleet.producer.embedded import EmbeddedServer
from tokenfleet.worker.demo.model import prepare_smollm2
from tokenfleet.worker.demo.worker_process import WorkerProcess

LONG = os.environ.get("TOKENFLEET_CHAOS") == "long"
LINES = 200 if LONG else 8
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


def asked(number: int, tools: Any) -> dict[str, Any]:
    """Every fourth line asks for JSON, one too long a prompt, the others for a few words."""
    if number == 1:
        return tools.request_line("c1", "long " * 9000)
    if number % 4 == 0:
        prompt = "Invent a person. Answer in JSON."
        return tools.request_line(f"c{number}", prompt, max_tokens=60, response_format=FORMAT)
    return tools.request_line(f"c{number}", "What is the capital of France?", max_tokens=12)


@pytest.mark.smollm2
@pytest.mark.timeout(3600 if LONG else 300)
async def test_a_real_model_answers_every_line(
    requests: Callable[..., Path], tmp_path: Path, tools: Any, outcome: Any
) -> None:
    lines = [asked(number, tools) for number in range(LINES)]
    for line in lines:
        line["body"] |= {"model": "smollm2", "temperature": 0}
    batch = Batch.prepare(BatchFiles.beside(requests(lines)), settings=BatchSettings(ordered=True))
    with EmbeddedServer() as server:
        worker = WorkerProcess(
            "w0",
            {
                "redis_url": server.url,
                "model": prepare_smollm2(),
                "model_name": "smollm2",
                "max_num_seqs": 16,
                "max_model_len": 2048,
                "dtype": "float32",
            },
            tmp_path / "w0.log",
            environment={"TOKENFLEET_MODEL": None},
        )
        await worker.start()
        async with AsyncClient(server.url) as client:
            summary = await batch.run(client)
        await worker.stop(10.0)
    print(summary)
    found = outcome(batch.files)
    assert (summary.completed, summary.failed) == (LINES - 1, 1)
    refused = found.pop("c1")["response"]
    assert (refused["status_code"], refused["body"]["error"]["code"]) == (400, "prompt_too_long")
    answers: dict[str, str] = {
        name: line["response"]["body"]["choices"][0]["message"]["content"]
        for name, line in found.items()
    }
    people = [json.loads(answers[f"c{number}"]) for number in range(0, LINES, 4)]
    assert all(set(person) == {"name", "age"} for person in people)
    words = {text for name, text in answers.items() if int(name[1:]) % 4}
    assert len(words) == 1, "greedy, and asked the same: they say the same"
    assert "capital of France" in words.pop()
    assert list(found) == [f"c{number}" for number in range(LINES) if number != 1]
    usage = [line["response"]["body"]["usage"]["completion_tokens"] for line in found.values()]
    assert summary.completion_tokens == sum(usage)
