"""SmolLM2 fills in JSON schemas, in one batch with free text that must not notice."""

import json
import os

import jsonschema
import pytest

from tokenfleet.engine import SamplingParams

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.timeout(900),
]

NAME = {"type": "string", "pattern": "^[A-Z][a-z]{2,11}$"}
SCHEMAS = [
    {
        "type": "object",
        "properties": {
            "name": NAME,
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "mood": {"enum": ["happy", "sad", "curious"]},
        },
        "required": ["name", "age", "mood"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "grid": {
                "type": "array", "minItems": 2, "maxItems": 3,
                "items": {"type": "array", "minItems": 1, "maxItems": 3,
                          "items": {"type": "integer", "minimum": 0, "maximum": 9}},
            },
            "label": {"type": "string", "maxLength": 12},
        },
        "required": ["grid"],
        "additionalProperties": False,
    },
    {
        "type": "array", "minItems": 1, "maxItems": 3,
        "items": {
            "type": "object",
            "properties": {"id": {"type": "string", "pattern": "^[a-f0-9]{8}$"},
                           "ok": {"type": "boolean"}, "next": {"type": ["integer", "null"],
                                                              "minimum": 0, "maximum": 999}},
            "required": ["id", "ok"],
            "additionalProperties": False,
        },
    },
]  # fmt: skip
COUNT = int(os.environ.get("TOKENFLEET_JSON_JOBS", "12"))


def test_every_json_job_validates_and_free_text_does_not_notice(smollm2_engine):
    engine = smollm2_engine
    free = SamplingParams(max_tokens=24, temperature=0.8, seed=3)
    chats = [engine.text.encode_chat([{"role": "user", "content": f"Number {i}?"}]) for i in (1, 2)]
    alone = [output.token_ids for output in engine.generate(chats, free)]
    prompts, params = list(chats), [free, free]
    for i in range(COUNT):
        question = f"Describe item {i} as JSON."
        prompts.append(engine.text.encode_chat([{"role": "user", "content": question}]))
        wanted = {"json": SCHEMAS[i % len(SCHEMAS)]}
        params.append(
            SamplingParams(max_tokens=400, temperature=0.9, seed=i, structured_outputs=wanted)
        )
    outputs = engine.generate(prompts, params)
    engine.audit()
    assert [output.token_ids for output in outputs[:2]] == alone
    valid = 0
    for i, output in enumerate(outputs[2:]):
        assert output.finish_reason == "stop", output
        jsonschema.validate(json.loads(output.text), SCHEMAS[i % len(SCHEMAS)])
        valid += 1
    print(f"{valid} of {COUNT} JSON jobs parse and validate")
