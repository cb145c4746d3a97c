"""An OpenAI-compatible HTTP face of a fleet: what the openai client, LiteLLM and chat pages speak.

    tokenfleet-gateway --redis-url redis://localhost:6379/0 --port 8000

Needs the extra: pip install 'tokenfleet[gateway]'. Nothing of a worker and no torch. Starlette and
not FastAPI: bodies are read by producer/batch, whose errors are OpenAI's; a second validator with
errors of its own would only be in the way. Both are typed and maintained; the former is smaller.

Invariant: a gateway keeps nothing that another could not answer as well, but for uploaded files.
"""
