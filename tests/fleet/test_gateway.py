"""The gateway before a real engine: the same tokens as the client's, logprobs, JSON by a schema."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from tokenfleet.producer import SamplingParams

SCHEMA = {"type": "string", "enum": ["yes", "no"]}


@asynccontextmanager
async def gateway(redis_url: str) -> AsyncIterator[AsyncOpenAI]:
    """A gateway of the test's own, and the official client on it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tokenfleet.producer.gateway"),
        *("--redis-url", redis_url, "--port", "0", "--no-status-page"),
        stderr=asyncio.subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if not k.startswith("TOKENFLEET_")},
    )
    assert process.stderr is not None
    try:
        port = json.loads(await process.stderr.readline())["port"]
        url = f"http://127.0.0.1:{port}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client
    finally:
        process.terminate()
        await process.communicate()
    assert process.returncode == 0


async def test_a_real_engine_answers_over_http_as_it_answers_the_client(model_fleet: Any) -> None:
    await model_fleet.start()
    prompt = list(b"Once upon a time")
    job = await model_fleet.client.submit(
        model="m",
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2),
    )
    expected = await job.result(timeout_s=240)
    asked: dict[str, Any] = {"model": "m", "prompt": prompt, "temperature": 0, "max_tokens": 12}
    more = {"ignore_eos": True}
    async with gateway(model_fleet.server.url) as client:
        whole = await client.completions.create(**asked, logprobs=2, extra_body=more)
        assert whole.choices[0].text == expected.text
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens == [f"token_id:{token}" for token in expected.token_ids]
        assert [len(top) for top in logprobs.top_logprobs or []] == [2] * 12
        more |= {"allowed_token_ids": [97, 98, 99], "bad_words": [[98, 98], [98, 97]]}
        limited = await client.completions.create(**asked, extra_body=more)
        assert len(limited.choices[0].text) == 12
        assert re.fullmatch("(b?c|a)*b?", limited.choices[0].text)
        for impossible, code in (
            ({"bad_words": ["a", "b", "c"]}, "no_token_allowed"),
            ({"structured_outputs": {"regex": "(?=a)b"}}, "unsupported_grammar"),
        ):
            with pytest.raises(BadRequestError) as refused:
                await client.completions.create(**asked, extra_body={**more, **impossible})
            assert refused.value.code == code
        more = {"ignore_eos": True}
        stream = await client.completions.create(**asked, stream=True, extra_body=more)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == expected.text
        chosen = await client.completions.create(
            model="m",
            prompt="Is it?",
            max_tokens=20,
            extra_body={
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": SCHEMA},
                }
            },
        )
        assert json.loads(chosen.choices[0].text) in SCHEMA["enum"]
        assert chosen.choices[0].finish_reason == "stop"
