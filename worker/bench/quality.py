"""What a cheaper arithmetic costs in quality: the same texts under several settings.

Quality is judged against float32 on texts that come with Python itself: prose, rules, reference and
code, so that a figure can be had again anywhere. Per setting: the mean negative log-likelihood of
each text's tokens, and how often the likeliest token is the same as float32's.
"""

from __future__ import annotations

import codecs
import contextlib
import inspect
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKENS = 700
"""Tokens read of each text."""
BASE = "float32"
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    BASE: {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "bfloat16, KV int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8": {"quantization": "int8"},
    "int8, KV in 16 bits": {"quantization": "int8", "kv_cache_dtype": "model"},
}


def texts() -> dict[str, str]:
    """Texts of different kinds, none of them made for this."""
    import collections
    import textwrap
    from pydoc_data import topics

    with contextlib.redirect_stdout(io.StringIO()):  # it prints itself
        import this

    pages: dict[str, str] = topics.topics
    return {
        "aphorisms": codecs.decode(this.s, "rot13"),
        "prose": pages["execmodel"],
        "rules": pages["operator-summary"] + pages["numbers"] + pages["strings"],
        "reference": str(inspect.getdoc(collections.OrderedDict)) + pages["typesmapping"],
        "code": inspect.getsource(textwrap.TextWrapper),
    }


@dataclass(frozen=True, slots=True)
class Reading:
    """One text under one setting."""

    logprobs: tuple[float, ...]
    """Of the text's own tokens, from the second one on."""
    best: tuple[int, ...]
    """The likeliest token at each of those places."""

    @property
    def nll(self) -> float:
        return -sum(self.logprobs) / len(self.logprobs)


def quality(model: Path, *, threads: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Read all texts under all settings; figures by setting and text."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    readings = {}
    for name, setting in SETTINGS.items():
        say(f"reading in {name}")
        readings[name] = _read(model, setting)
    base = readings[BASE]
    found = {}
    for name, read in readings.items():
        rows = {title: _compare(read[title], base[title]) for title in read}
        found[name] = {"texts": rows, "all": _over_all(read, base)}
    return {"bench": "quality", "model": model.name, "tokens": TOKENS, "settings": found}


def _read(model: Path, setting: Mapping[str, Any]) -> dict[str, Reading]:
    from tokenfleet.engine import Engine, EngineConfig, SamplingParams

    engine = Engine(EngineConfig(model, max_num_seqs=8, max_model_len=2048, **setting))
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    titles, prompts = [], []
    for title, text in texts().items():
        titles.append(title)
        prompts.append(engine.text.encode(text)[:TOKENS])
    outputs = engine.generate(prompts, params)
    return {
        title: _reading(prompt, output.prompt_logprobs or [])
        for title, prompt, output in zip(titles, prompts, outputs, strict=True)
    }


def _reading(prompt: Sequence[int], found: Sequence[Mapping[int, float] | None]) -> Reading:
    places = list(zip(prompt, found, strict=True))[1:]
    assert all(entry for _, entry in places)
    return Reading(
        tuple(entry[token] for token, entry in places if entry),
        tuple(max(entry, key=entry.__getitem__) for _, entry in places if entry),
    )


def _compare(one: Reading, base: Reading) -> dict[str, float]:
    same = sum(a == b for a, b in zip(one.best, base.best, strict=True))
    return {
        "tokens": len(one.best),
        "nll": one.nll,
        "nll_change": one.nll / base.nll - 1,
        "top1_agreement": same / len(one.best),
    }


def _over_all(read: Mapping[str, Reading], base: Mapping[str, Reading]) -> dict[str, float]:
    joined = [
        Reading(
            tuple(x for reading in side.values() for x in reading.logprobs),
            tuple(x for reading in side.values() for x in reading.best),
        )
        for side in (read, base)
    ]
    figures = _compare(*joined)
    return {**figures, "perplexity": math.exp(figures["nll"])}
