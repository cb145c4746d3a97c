"""OpenAI requests and batch files over the fleet: translate, check, run, resume.

Translating, which every OpenAI-shaped entrance shares:

    request = translate_request("/v1/chat/completions", body)    # RequestRefused: code, param
    job = await client.submit(**request.job, priority="interactive")
    result = await job.result()
    body = request.shape.body(result, job_id=job.id, created_s=int(time.time()))
    answer = error_answer(error)                                 # .status_code, .body

A streamed answer takes `request.stream`, `request.include_usage`, `usage_of(result.usage)`, and of
`request.shape`: `response_id(job.id)`, `shaped_logprobs(event.token_ids, event.logprobs)`.

A batch is an input file, an output file, an error file and a state file:

    files = BatchFiles.beside("requests.jsonl")                  # or BatchFiles(input, output, ...)
    report = check_file(files.input, FileRules(), on_problem=print)     # line, code, message
    batch = Batch.prepare(files, FileRules(), BatchSettings(skip="bodies"))
    summary = await batch.run(client, on_progress=print)         # again after a kill: it goes on
    await batch.cancel(client)

`check_file` and `Batch.prepare` read the whole file and block: call them in a thread of their own.
`prepare` opens the batch that is there when its state file is; `Batch.open(files)` does only that.

Invariant: a line of the input has at most one line in output and error file together, whatever was
killed and however often it is run again.
"""

from tokenfleet.producer.batch.bodies import IGNORED
from tokenfleet.producer.batch.refusals import (
    CALLERS_FAULT,
    ErrorAnswer,
    RequestRefused,
    error_answer,
    failed_answer,
)
from tokenfleet.producer.batch.responses import (
    CHAT,
    COMPLETIONS,
    ENDPOINTS,
    ResponseShape,
    usage_of,
)
from tokenfleet.producer.batch.translate import TranslatedRequest, translate_request

__all__ = [
    "CALLERS_FAULT",
    "CHAT",
    "COMPLETIONS",
    "ENDPOINTS",
    "IGNORED",
    "ErrorAnswer",
    "RequestRefused",
    "ResponseShape",
    "TranslatedRequest",
    "error_answer",
    "failed_answer",
    "translate_request",
    "usage_of",
]
