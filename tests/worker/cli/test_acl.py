"""The Redis user that deploy/README.md makes can run a fleet, and do nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from tokenfleet.producer import AsyncClient, SamplingParams
from tokenfleet.producer.embedded import EmbeddedServer
from tokenfleet.worker.demo.worker_process import WorkerProcess

README = Path(__file__).parents[3] / "deploy" / "README.md"


async def test_the_user_of_the_readme_runs_a_fleet_and_nothing_else(
    tmp_path: Path, byte_tokenizer: Path, run: Any
) -> None:
    found = re.search(r"`ACL SETUSER (.*?)`", README.read_text())
    assert found is not None
    rules = found[1].replace(">PASSWORD", ">secret").split()
    with EmbeddedServer() as server:
        admin = Redis.from_url(server.url)
        await admin.execute_command("ACL", "SETUSER", *rules)
        url = server.url.replace("redis://", f"redis://{rules[0]}:secret@")
        settings = {
            "redis_url": url,
            "model": byte_tokenizer,
            "model_name": "echo",
            "simulated_step_ms": 2,
            "lease_s": 1,
        }
        worker = WorkerProcess("w1", settings, tmp_path / "worker.log")
        await worker.start()
        await worker.ready()
        async with AsyncClient(url) as client:
            job = await client.submit(
                model="echo", prompt="hi", sampling=SamplingParams(max_tokens=6)
            )
            text = "".join([event.text async for event in job.stream()])
            assert text == (await job.result(timeout_s=30)).text == "hihihi"
            other = await client.submit(model="echo", prompt="hi", delay_s=3600)
            await other.cancel()
        assert "NOPERM" not in worker.last_lines(1000)
        listed = run("queue", "list", "--redis-url", url, "-o", "json")
        assert listed.returncode == 0, listed.stderr
        examined = run("doctor", "--redis-url", url, "-o", "json")
        assert "NOPERM" not in examined.stdout + examined.stderr
        assert await worker.stop() == 0
        stranger = Redis.from_url(url)
        with pytest.raises(NoPermissionError):
            await stranger.set("other", "x")
        with pytest.raises(NoPermissionError):
            await stranger.flushall()
        await stranger.aclose()
        await admin.aclose()
