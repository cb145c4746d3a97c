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

from tokenfleet.producer.batch.batch import Batch, find_files
from tokenfleet.producer.batch.bodies import IGNORED
from tokenfleet.producer.batch.check import FileReport, FileRules, Kind, Problem, check_file
from tokenfleet.producer.batch.forms import Form
from tokenfleet.producer.batch.output import BatchBusy
from tokenfleet.producer.batch.progress import Glance, Progress, Summary
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
from tokenfleet.producer.batch.state import (
    BatchError,
    BatchFiles,
    BatchRefused,
    BatchSettings,
    Phase,
)
from tokenfleet.producer.batch.tally import SlowLine
from tokenfleet.producer.batch.translate import TranslatedRequest, translate_request

__all__ = [
    "CALLERS_FAULT",
    "CHAT",
    "COMPLETIONS",
    "ENDPOINTS",
    "IGNORED",
    "Batch",
    "BatchBusy",
    "BatchError",
    "BatchFiles",
    "BatchRefused",
    "BatchSettings",
    "ErrorAnswer",
    "FileReport",
    "FileRules",
    "Form",
    "Glance",
    "Kind",
    "Phase",
    "Problem",
    "Progress",
    "RequestRefused",
    "ResponseShape",
    "SlowLine",
    "Summary",
    "TranslatedRequest",
    "check_file",
    "error_answer",
    "failed_answer",
    "find_files",
    "translate_request",
    "usage_of",
]
