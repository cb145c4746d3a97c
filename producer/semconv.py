"""Every name of a span, an attribute and a metric, once.

Where the OpenTelemetry semantic conventions have a word, it is used as they spell it (a test
compares the spelling with the package of the conventions, which a producer does not have to
install). The rest begins with `tokenfleet`. Job ids and tenants are span attributes only and never
metric labels: a metric's labels stay few however many jobs run.
"""

from __future__ import annotations

INSTRUMENTATION = "tokenfleet"
MESSAGING_SYSTEM_REDIS = "redis"
PROVIDER = "tokenfleet"

# Spans: "<verb> <queue>" and "<operation> <model>".
SEND = "send"
PROCESS = "process"
CHAT = "chat"
TEXT_COMPLETION = "text_completion"

# Events on the operation's span.
EVENT_CLAIMED = "claimed"
EVENT_FIRST_TOKEN = "first_token"
EVENT_PREEMPTED = "preempted"
EVENT_RESUMED = "resumed"

# Attributes of the conventions.
MESSAGING_SYSTEM = "messaging.system"
MESSAGING_OPERATION_NAME = "messaging.operation.name"
MESSAGING_OPERATION_TYPE = "messaging.operation.type"
MESSAGING_DESTINATION_NAME = "messaging.destination.name"
MESSAGING_DESTINATION_PARTITION_ID = "messaging.destination.partition.id"
MESSAGING_CONSUMER_GROUP_NAME = "messaging.consumer.group.name"
MESSAGING_MESSAGE_ID = "messaging.message.id"
MESSAGING_BATCH_MESSAGE_COUNT = "messaging.batch.message_count"
MESSAGING_CLIENT_ID = "messaging.client.id"
GEN_AI_OPERATION_NAME = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K = "gen_ai.request.top_k"
GEN_AI_REQUEST_SEED = "gen_ai.request.seed"
GEN_AI_REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
GEN_AI_REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
GEN_AI_REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
ERROR_TYPE = "error.type"
SERVICE_NAME = "service.name"
SERVICE_INSTANCE_ID = "service.instance.id"
SERVICE_VERSION = "service.version"

# Attributes of our own.
JOB_ATTEMPT = "tokenfleet.job.attempt"
JOB_STATE = "tokenfleet.job.state"
JOB_OFFSET = "tokenfleet.job.offset"
JOB_PRIORITY = "tokenfleet.job.priority"
JOB_TENANT = "tokenfleet.job.tenant"

# Labels of metrics of our own.
MODEL = "model"
STATE = "state"
PRIORITY = "priority"
PHASE = "phase"
FINISH_REASON = "finish_reason"
WORKER = "worker"
VERSION = "version"
ROUTE = "route"
STATUS = "status"

# Metrics of the conventions, in seconds.
TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"
TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"
REQUEST_DURATION = "gen_ai.server.request.duration"

# Metrics of our own. On /metrics a counter's name ends in _total.
JOBS_CLAIMED = "tokenfleet_jobs_claimed"
JOBS_RESUMED = "tokenfleet_jobs_resumed"
JOBS_ENDED = "tokenfleet_jobs_ended"
JOBS_RUNNING = "tokenfleet_jobs_running"
JOBS_RECLAIMED = "tokenfleet_jobs_reclaimed"
CHOICES_ENDED = "tokenfleet_choices_ended"
JOB_PROMPT_TOKENS = "tokenfleet_job_prompt_tokens"
JOB_OUTPUT_TOKENS = "tokenfleet_job_output_tokens"
QUEUE_JOBS = "tokenfleet_queue_jobs"
QUEUE_PAUSED = "tokenfleet_queue_paused"
DEAD_LETTERS = "tokenfleet_dead_letters"
QUEUE_WAIT = "tokenfleet_queue_wait_seconds"
STEPS = "tokenfleet_steps"
STEP_DURATION = "tokenfleet_step_duration_seconds"
STEP_PHASE = "tokenfleet_step_phase_seconds"
READ_BYTES = "tokenfleet_read_bytes"
PREFILL_TOKENS = "tokenfleet_prefill_tokens"
DECODE_TOKENS = "tokenfleet_decode_tokens"
PREEMPTIONS = "tokenfleet_preemptions"
SEQUENCE_ERRORS = "tokenfleet_sequence_errors"
OOM_RETRIES = "tokenfleet_oom_retries"
SLOTS = "tokenfleet_slots"
SEQUENCES_RUNNING = "tokenfleet_sequences_running"
SEQUENCES_WAITING = "tokenfleet_sequences_waiting"
BLOCKS_USED = "tokenfleet_blocks_used"
BLOCKS_CACHED = "tokenfleet_blocks_cached"
BLOCKS_NEEDED = "tokenfleet_blocks_needed"
BLOCKS = "tokenfleet_blocks"
KV_CACHE_USAGE = "tokenfleet_kv_cache_usage_ratio"
TOKEN_BUDGET = "tokenfleet_token_budget_tokens"
TOKEN_BUDGET_USAGE = "tokenfleet_token_budget_usage_ratio"
PREFIX_CACHE_QUERIES = "tokenfleet_prefix_cache_queries_tokens"
PREFIX_CACHE_HITS = "tokenfleet_prefix_cache_hits_tokens"
ENGINE_RESTARTS = "tokenfleet_engine_restarts"
FLUSH_DURATION = "tokenfleet_flush_duration_seconds"
READY = "tokenfleet_ready"
BROKER_REACHABLE = "tokenfleet_broker_reachable"
WORKER_INFO = "tokenfleet_worker_info"
GATEWAY_REQUESTS = "tokenfleet_gateway_requests"
GATEWAY_REQUEST_DURATION = "tokenfleet_gateway_request_duration_seconds"
GATEWAY_FIRST_TOKEN = "tokenfleet_gateway_time_to_first_token_seconds"
GATEWAY_FIRST_TOKEN_ADDED = "tokenfleet_gateway_first_token_added_seconds"
GATEWAY_REQUESTS_RUNNING = "tokenfleet_gateway_requests_running"
GATEWAY_STREAMS_OPEN = "tokenfleet_gateway_streams_open"
GATEWAY_READERS_GONE = "tokenfleet_gateway_readers_gone"


def queue_name(model: str, priority: str) -> str:
    """What spans call the queue of one model and priority: the same on both sides of it."""
    return f"{model}:{priority}"


def operation_name(*, chat: bool) -> str:
    """gen_ai.operation.name of a job with messages, or with a prompt."""
    return CHAT if chat else TEXT_COMPLETION
