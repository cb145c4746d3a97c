"""A batch on every kind of server: fed over all partitions, stopped, taken up, collected."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tokenfleet.producer.batch import Batch, BatchFiles
from tokenfleet.producer.keys import partition_of

LINES = 120


def requests(path: Path) -> Path:
    with path.open("w") as file:
        for number in range(LINES):
            body = {"model": "m", "prompt": f"say {number} ", "max_tokens": 9}
            line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps({**line, "body": body}) + "\n")
    return path


async def test_a_batch_that_is_stopped_and_taken_up_answers_every_line_once(
    site: Any, until: Any, answer: Any, tmp_path: Path
) -> None:
    files = BatchFiles.beside(requests(tmp_path / "requests.jsonl"))
    batch = Batch.prepare(files)
    site.worker(max_num_seqs=16)
    run = asyncio.create_task(batch.run(site.client, in_flight=64))
    await until(lambda: batch.glance().completed >= LINES // 4)
    run.cancel()
    await asyncio.wait([run])
    again = Batch.open(files)
    summary = await again.run(site.client)
    assert (summary.completed, summary.left, summary.resubmitted) == (LINES, 0, 0)
    found = [json.loads(line) for line in files.output.read_text().splitlines()]
    texts = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in found}
    assert len(found) == len(texts) == LINES
    assert texts == {f"c{n}": answer(f"say {n} ", 9) for n in range(LINES)}
    places = {partition_of(again.state.job_id(line)) for line in range(1, LINES + 1)}
    assert len(places) == site.client.link.connection.partitions
