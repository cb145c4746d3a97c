"""The official client against the gateway: a script of calls, as its users write them.

Nothing here knows anything of tokenfleet but the address, the key and the model's name.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

SAYS = [{"role": "user", "content": "hello"}]


def said(count: int, prompt: str = "hello") -> str:
    return (prompt * count)[:count]


@pytest.fixture
async def client(gateway: Any) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0
    ) as client:
        yield client


class TestSync:
    """The blocking client."""

    def test_a_chat(self, openai_client: OpenAI) -> None:
        found = openai_client.chat.completions.create(model="m", messages=SAYS, max_tokens=8)
        (choice,) = found.choices
        assert (choice.message.role, choice.message.content) == ("assistant", said(8))
        assert choice.finish_reason == "length"
        assert found.usage is not None
        assert found.usage.total_tokens == 13
        assert found.id == f"chatcmpl-{found._request_id}"

    def test_a_chat_with_parts_a_system_message_and_the_newer_limit(
        self, openai_client: OpenAI
    ) -> None:
        found = openai_client.chat.completions.create(
            model="m",
            messages=[
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            ],
            max_completion_tokens=3,
        )
        assert found.choices[0].message.content == "hel"

    def test_several_choices(self, openai_client: OpenAI) -> None:
        found = openai_client.chat.completions.create(model="m", messages=SAYS, max_tokens=4, n=3)
        assert [choice.index for choice in found.choices] == [0, 1, 2]
        assert [choice.message.content for choice in found.choices] == ["hell", "ello", "lloh"]

    def test_a_stop_text(self, openai_client: OpenAI) -> None:
        found = openai_client.chat.completions.create(
            model="m", messages=SAYS, max_tokens=20, stop=["loh"]
        )
        assert found.choices[0].message.content == "hel"
        assert found.choices[0].finish_reason == "stop"

    def test_a_streamed_chat(self, openai_client: OpenAI) -> None:
        stream = openai_client.chat.completions.create(
            model="m", messages=SAYS, max_tokens=9, stream=True
        )
        chunks = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == said(9)
        assert [c.choices[0].finish_reason for c in chunks][-1] == "length"
        assert len({chunk.id for chunk in chunks}) == 1

    def test_usage_at_the_end_of_a_stream(self, openai_client: OpenAI) -> None:
        stream = openai_client.chat.completions.create(
            model="m",
            messages=SAYS,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        )
        *before, last = list(stream)
        assert all(chunk.usage is None for chunk in before)
        assert (last.choices, last.usage.completion_tokens) == ([], 5)  # type: ignore[union-attr]  # asked for

    def test_several_choices_streamed(self, openai_client: OpenAI) -> None:
        texts = {0: "", 1: ""}
        for chunk in openai_client.chat.completions.create(
            model="m", messages=SAYS, max_tokens=4, n=2, stream=True
        ):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == {0: "hell", 1: "ello"}

    def test_the_stream_helper(self, openai_client: OpenAI) -> None:
        with openai_client.chat.completions.stream(
            model="m", messages=SAYS, max_tokens=50, stop="loh"
        ) as stream:
            kinds = {event.type for event in stream}
            found = stream.get_final_completion()
        assert {"chunk", "content.delta", "content.done"} <= kinds
        assert found.choices[0].message.content == "hel"
        assert found.choices[0].message.role == "assistant"

    def test_a_plain_completion(self, openai_client: OpenAI) -> None:
        found = openai_client.completions.create(model="m", prompt="abc", max_tokens=7)
        assert found.choices[0].text == "abcabca"

    def test_a_plain_completion_of_token_ids(self, openai_client: OpenAI) -> None:
        found = openai_client.completions.create(model="m", prompt=[70, 71], max_tokens=4)
        assert len(found.choices[0].text) == 4
        assert found.choices[0].text[:2] == found.choices[0].text[2:]

    def test_a_streamed_plain_completion(self, openai_client: OpenAI) -> None:
        stream = openai_client.completions.create(
            model="m", prompt="abc", max_tokens=5, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == "abcab"

    def test_the_raw_response(self, openai_client: OpenAI) -> None:
        raw = openai_client.chat.completions.with_raw_response.create(
            model="m", messages=SAYS, max_tokens=2
        )
        assert raw.parse().id == f"chatcmpl-{raw.headers['x-request-id']}"

    def test_models(self, openai_client: OpenAI) -> None:
        assert "m" in {model.id for model in openai_client.models.list()}
        assert openai_client.models.retrieve("m").owned_by == "tokenfleet"

    def test_a_stored_chat_is_found_again(self, openai_client: OpenAI) -> None:
        made = openai_client.chat.completions.create(
            model="m", messages=SAYS, max_tokens=6, store=True
        )
        found = openai_client.chat.completions.retrieve(made.id)
        assert found.choices[0].message.content == said(6)
        assert found.created == made.created

    def test_sampling_fields_are_taken(self, openai_client: OpenAI) -> None:
        found = openai_client.chat.completions.create(
            model="m",
            messages=SAYS,
            max_tokens=3,
            temperature=0,
            top_p=0.9,
            seed=7,
            presence_penalty=0.1,
            frequency_penalty=0.1,
            logit_bias={"104": 1},
            user="someone",
            metadata={"job": "x"},
            service_tier="flex",
            extra_body={"top_k": 5, "min_p": 0.01, "ignore_eos": True},
        )
        assert found.choices[0].finish_reason == "length"

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"messages": []}, "messages"),
            ({"temperature": -1}, "temperature"),
            ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
            ({"extra_body": {"nonsense": 1}}, "nonsense"),
            (
                {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
                "messages[0].content[0].type",
            ),
        ],
    )
    def test_what_cannot_be_done_is_a_bad_request_that_names_it(
        self, openai_client: OpenAI, fields: dict[str, Any], param: str
    ) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            openai_client.chat.completions.create(
                **{"model": "m", "messages": SAYS, "max_tokens": 2, **fields}
            )
        assert caught.value.param == param
        assert caught.value.type == "invalid_request_error"

    def test_a_model_that_is_not_there(self, openai_client: OpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            openai_client.chat.completions.create(model="nope", messages=SAYS)
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            openai_client.models.retrieve("nope")

    def test_a_wrong_key(self, gateway: Any) -> None:
        with OpenAI(base_url=f"{gateway.url}/v1", api_key="wrong", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError):
                stranger.models.list()
            with pytest.raises(openai.AuthenticationError):
                stranger.chat.completions.create(model="m", messages=SAYS)

    def test_a_timeout_of_the_client_ends_the_job(
        self, openai_client: OpenAI, gateway: Any
    ) -> None:
        hasty = openai_client.with_options(timeout=httpx.Timeout(240, read=0.3))
        with pytest.raises(openai.APITimeoutError):
            hasty.chat.completions.create(model="m", messages=SAYS, max_tokens=8000)
        assert gateway.said("request", error="client_closed", status=499)


class TestAsync:
    """The asyncio client."""

    async def test_a_chat(self, client: AsyncOpenAI) -> None:
        found = await client.chat.completions.create(model="m", messages=SAYS, max_tokens=8)
        assert found.choices[0].message.content == said(8)

    async def test_a_streamed_chat(self, client: AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(
            model="m", messages=SAYS, max_tokens=8, stream=True
        )
        text = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(text) == said(8)

    async def test_many_at_once_each_get_their_own(self, client: AsyncOpenAI) -> None:
        async def ask(number: int) -> str:
            stream = await client.completions.create(
                model="m", prompt=f"<{number}>", max_tokens=12, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*(ask(number) for number in range(40)))
        assert texts == [said(12, f"<{number}>") for number in range(40)]

    async def test_a_stream_that_is_closed_early_frees_its_slot(
        self, client: AsyncOpenAI, gateway: Any
    ) -> None:
        stream = await client.chat.completions.create(
            model="m", messages=SAYS, max_tokens=8000, stream=True
        )
        first = await anext(stream)
        await stream.close()
        job_id = first.id.removeprefix("chatcmpl-")
        line = await asyncio.to_thread(gateway.said, "request", job_id=job_id)
        assert line["completion_tokens"] < 8000


def a_file(*bodies: dict[str, Any], url: str = "/v1/chat/completions") -> bytes:
    lines = [
        {"custom_id": f"line {n}", "method": "POST", "url": url, "body": body}
        for n, body in enumerate(bodies)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def ended(client: OpenAI, batch_id: str) -> Any:
    """Ask until the batch has ended; the time limit ends a wait in vain."""
    while True:
        batch = client.batches.retrieve(batch_id)
        if batch.status in ("completed", "failed", "cancelled", "expired"):
            return batch
        time.sleep(0.02)


def chat_body(prompt: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": "m", "messages": messages, "max_tokens": 4, **fields}


class TestBatches:
    """Files and batches."""

    def test_a_batch_from_upload_to_results(self, openai_client: OpenAI) -> None:
        content = a_file(*(chat_body(f"<{n}>") for n in range(20)), chat_body("x", temperature=-1))
        file = openai_client.files.create(file=("in.jsonl", content), purpose="batch")
        assert (file.filename, file.bytes, file.purpose) == ("in.jsonl", len(content), "batch")
        batch = openai_client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"run": "1"},
        )
        assert batch.metadata == {"run": "1"}
        assert batch.expires_at == batch.created_at + 86_400  # type: ignore[operator]  # always there
        batch = ended(openai_client, batch.id)
        assert batch.status == "completed"
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (21, 20, 1)
        output = openai_client.files.content(batch.output_file_id).text
        records = {r["custom_id"]: r for r in map(json.loads, output.splitlines())}
        assert len(records) == 20
        for n in range(20):
            body = records[f"line {n}"]["response"]["body"]
            assert body["choices"][0]["message"]["content"] == said(4, f"<{n}>")
        (error,) = map(json.loads, openai_client.files.content(batch.error_file_id).iter_lines())
        assert error["custom_id"] == "line 20"
        assert error["response"]["status_code"] == 400

    def test_a_faulty_file_fails_with_lines_and_codes(self, openai_client: OpenAI) -> None:
        content = a_file(chat_body("a")) + b"not json\n"
        file = openai_client.files.create(file=("bad.jsonl", content), purpose="batch")
        batch = openai_client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        batch = ended(openai_client, batch.id)
        assert batch.status == "failed"
        assert [(e.code, e.line) for e in batch.errors.data] == [("invalid_json_line", 2)]

    def test_a_batch_can_be_cancelled(self, openai_client: OpenAI) -> None:
        content = a_file(*(chat_body("slow", max_tokens=8000) for _ in range(3)))
        file = openai_client.files.create(file=("slow.jsonl", content), purpose="batch")
        batch = openai_client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        assert openai_client.batches.cancel(batch.id).status == "cancelling"
        batch = ended(openai_client, batch.id)
        assert batch.status == "cancelled"
        assert batch.cancelled_at is not None
        with pytest.raises(openai.ConflictError):
            openai_client.batches.cancel(batch.id)

    def test_files_are_listed_and_deleted(self, openai_client: OpenAI) -> None:
        made = [
            openai_client.files.create(file=(f"{n}.jsonl", b"{}\n"), purpose="batch").id
            for n in range(3)
        ]
        listed = [file.id for file in openai_client.files.list(purpose="batch", limit=2)]
        assert set(made) <= set(listed), "page by page"
        assert openai_client.files.delete(made[0]).deleted
        with pytest.raises(openai.NotFoundError):
            openai_client.files.retrieve(made[0])
        assert openai_client.files.retrieve(made[1]).bytes == 3

    def test_batches_are_listed_page_by_page(self, openai_client: OpenAI) -> None:
        file = openai_client.files.create(
            file=("one.jsonl", a_file(chat_body("a"))), purpose="batch"
        )
        made = {
            openai_client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="1h"
            ).id
            for _ in range(3)
        }
        assert made <= {batch.id for batch in openai_client.batches.list(limit=2)}
        for batch_id in made:
            assert ended(openai_client, batch_id).status == "completed"

    def test_another_tenants_files_and_batches_are_not_there(
        self, openai_client: OpenAI, gateway: Any, keys: Any
    ) -> None:
        content = a_file(chat_body("a"))
        file = openai_client.files.create(file=("mine.jsonl", content), purpose="batch")
        batch = openai_client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        ended(openai_client, batch.id)
        with OpenAI(base_url=f"{gateway.url}/v1", api_key=keys.bob, max_retries=0) as bob:
            assert [f.id for f in bob.files.list()] == [b.id for b in bob.batches.list()] == []
            for ask in (
                lambda: bob.files.retrieve(file.id),
                lambda: bob.files.content(file.id),
                lambda: bob.files.delete(file.id),
                lambda: bob.batches.retrieve(batch.id),
                lambda: bob.batches.cancel(batch.id),
                lambda: bob.batches.create(
                    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
                ),
            ):
                with pytest.raises(openai.NotFoundError):
                    ask()
