"""LiteLLM's SDK and router lead to the gateway, as to any OpenAI-compatible server.

LiteLLM is 260 MB and is installed by the extra `interop` only (CI has it). It runs in a process of
its own: importing it takes seconds, warns, and would look for a price list on the network.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

SCRIPT = """
import json, os, sys
import litellm

litellm.suppress_debug_info = True
where = {"api_base": os.environ["GATEWAY"] + "/v1", "api_key": os.environ["KEY"]}
says = [{"role": "user", "content": "hello"}]
asked = {"messages": says, "max_tokens": 7}
whole = litellm.completion(model="openai/m", **asked, **where)
chunks = list(litellm.completion(model="openai/m", stream=True, **asked, **where))
router = litellm.Router(
    model_list=[{"model_name": "ours", "litellm_params": {"model": "openai/m", **where}}],
    num_retries=0,
)
routed = router.completion(model="ours", **asked)
plain = litellm.text_completion(
    model="text-completion-openai/m", prompt="abc", max_tokens=4, **where
)
try:
    litellm.completion(model="openai/nope", num_retries=0, **asked, **where)
    missing = None
except litellm.NotFoundError as error:
    missing = error.status_code
print(json.dumps({
    "whole": whole.choices[0].message.content,
    "tokens": whole.usage.total_tokens,
    "streamed": "".join(c.choices[0].delta.content or "" for c in chunks),
    "routed": routed.choices[0].message.content,
    "plain": plain.choices[0].text,
    "missing": missing,
}))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("litellm") is None,
    reason="litellm is not installed; pip install -e '.[interop]' runs this too",
)
def test_litellm_calls_streams_and_routes_to_it(gateway: Any, worker: Any) -> None:
    environment = {
        **os.environ,
        "GATEWAY": gateway.url,
        "KEY": gateway.key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "whole": "hellohe",
        "tokens": 12,
        "streamed": "hellohe",
        "routed": "hellohe",
        "plain": "abca",
        "missing": 404,
    }
