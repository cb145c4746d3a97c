"""All workers together: is it serving, how fast, and what goes wrong."""

from __future__ import annotations

from gateway import GATEWAY
from panel import Dashboard, G, M, Panel, Row, W, quantiles

FLEET = Dashboard(
    "tokenfleet-fleet",
    "tokenfleet: fleet",
    "Whether jobs are served, how fast, and what goes wrong, over all workers.",
    variables={"model": "label_values(tokenfleet_worker_info, model)"},
    rows=[
        Row(
            "Now",
            [
                Panel(
                    "Workers ready",
                    "Workers that would take a job at this moment. 0 means that nothing is served.",
                    "none",
                    {"ready": f"sum(tokenfleet_ready{{{M}}})"},
                    "stat",
                    4,
                    4,
                ),
                Panel(
                    "Jobs waiting",
                    "Jobs in Redis that no worker holds. Every worker reads the same figure, so it is "
                    "the maximum and not the sum.",
                    "none",
                    {"waiting": f"sum(max by (model, priority) (tokenfleet_queue_jobs{{{M}}}))"},
                    "stat",
                    4,
                    4,
                ),
                Panel(
                    "Jobs running",
                    "Jobs that workers hold: running, or tokenized and next in line.",
                    "none",
                    {"running": f"sum(tokenfleet_jobs_running{{{M}}})"},
                    "stat",
                    4,
                    4,
                ),
                Panel(
                    "Slots taken",
                    "Share of the rows of all batches that are in use. Near 100 % with jobs waiting: "
                    "more workers would help.",
                    "percentunit",
                    {
                        "taken": f"sum(tokenfleet_sequences_running{{{M}}}) "
                        f"/ sum(tokenfleet_slots{{{M}}})"
                    },
                    "stat",
                    4,
                    4,
                    limits=(0, 1),
                ),
                Panel(
                    "Failed",
                    "Share of the jobs that ended in the last 15 minutes and failed.",
                    "percentunit",
                    {
                        "failed": f'(sum(increase(tokenfleet_jobs_ended_total{{{M},state="failed"}}[15m]))'
                        f" or vector(0)) / (sum(increase(tokenfleet_jobs_ended_total{{{M},"
                        'state=~"finished|failed|cancelled|expired"}[15m])) > 0)'
                    },
                    "stat",
                    4,
                    4,
                    warn=0.01,
                ),
                Panel(
                    "Dead letters",
                    "Jobs of all models that used up their failures and wait for a person: "
                    "`tokenfleet dead list`.",
                    "none",
                    {"dead": "max(tokenfleet_dead_letters)"},
                    "stat",
                    4,
                    4,
                    warn=1,
                ),
            ],
        ),
        Row(
            "Demand and throughput",
            [
                Panel(
                    "Waiting jobs by priority",
                    "A line that only rises means that jobs come faster than they are served.",
                    "none",
                    {
                        "{{model}} {{priority}}": "max by (model, priority) "
                        f"(tokenfleet_queue_jobs{{{M}}})"
                    },
                    stacked=True,
                ),
                Panel(
                    "Jobs that left a worker, by state",
                    "Released and lost ones go on elsewhere; the other states are final.",
                    "reqps",
                    {"{{state}}": f"sum by (state) (rate(tokenfleet_jobs_ended_total{{{M}}}{W}))"},
                    stacked=True,
                ),
                Panel(
                    "Tokens computed",
                    "Output is what users get; prompt includes what had to be computed again after a "
                    "preemption or a resume.",
                    "suffix: tokens/s",
                    {
                        "output": f"sum(rate(tokenfleet_decode_tokens_total{{{M}}}{W}))",
                        "prompt": f"sum(rate(tokenfleet_prefill_tokens_total{{{M}}}{W}))",
                    },
                ),
                Panel(
                    "Sequences and slots",
                    "Rows of all batches in use, and how many there are.",
                    "none",
                    {
                        "running": f"sum(tokenfleet_sequences_running{{{M}}})",
                        "in the engine, not in the batch": "sum(tokenfleet_sequences_waiting"
                        f"{{{M}}})",
                        "slots": f"sum(tokenfleet_slots{{{M}}})",
                    },
                ),
                Panel(
                    "Jobs claimed, and resumed",
                    "Resumed jobs went on from tokens that an earlier attempt had logged.",
                    "reqps",
                    {
                        "claimed": f"sum(rate(tokenfleet_jobs_claimed_total{{{M}}}{W}))",
                        "resumed": f"sum(rate(tokenfleet_jobs_resumed_total{{{M}}}{W}))",
                    },
                ),
                Panel(
                    "Why outputs end",
                    "stop: an end token or stop text; length: max_tokens or the model's reach.",
                    "reqps",
                    {
                        "{{finish_reason}}": "sum by (finish_reason) "
                        f"(rate(tokenfleet_choices_ended_total{{{M}}}{W}))"
                    },
                    stacked=True,
                ),
            ],
        ),
        Row(
            "Latency",
            [
                Panel(
                    "Time to first token",
                    "From submission to the first output token, by the server's clock; the wait in the "
                    "queue is part of it, and batch jobs wait by design. The points are single jobs: click one for its trace.",
                    "s",
                    quantiles(
                        "gen_ai_server_time_to_first_token_seconds",
                        G,
                        0.5,
                        0.95,
                        by="tokenfleet_job_priority",
                    ),
                    width=12,
                    height=8,
                    exemplars=True,
                    log=True,
                ),
                Panel(
                    "Time per output token",
                    "Mean of a job's output after its first token: the pace that a reader sees.",
                    "s",
                    quantiles("gen_ai_server_time_per_output_token_seconds", G, 0.5, 0.95, 0.99),
                    width=12,
                    height=8,
                    exemplars=True,
                    log=True,
                ),
                Panel(
                    "Wait in the queue",
                    "From submission to the first claim. What of the time to first token is lack of "
                    "slots.",
                    "s",
                    quantiles("tokenfleet_queue_wait_seconds", M, 0.5, 0.95, by="priority"),
                    width=12,
                    height=8,
                    exemplars=True,
                    log=True,
                ),
                Panel(
                    "Job duration",
                    "From submission to the end. It follows the lengths of the outputs more than "
                    "anything else.",
                    "s",
                    quantiles("gen_ai_server_request_duration_seconds", G, 0.5, 0.95, 0.99),
                    width=12,
                    height=8,
                    exemplars=True,
                    log=True,
                ),
            ],
        ),
        Row(
            "Size of jobs",
            [
                Panel(
                    "Prompt tokens of a job",
                    "How long prompts are. Bucket bounds double or more: read it as an order of size.",
                    "none",
                    quantiles("tokenfleet_job_prompt_tokens", M, 0.5, 0.95),
                    width=12,
                ),
                Panel(
                    "Output tokens of a job",
                    "How long outputs are, all attempts and choices together.",
                    "none",
                    quantiles("tokenfleet_job_output_tokens", M, 0.5, 0.95),
                    width=12,
                ),
            ],
        ),
        Row(
            "Faults",
            [
                Panel(
                    "Jobs moved between workers",
                    "released: handed back, by a draining or engineless worker or to make way for a more "
                    "urgent job. lost: the lease ended while the job ran. reclaimed: taken from a worker that vanished. Counts a minute.",
                    "suffix: jobs/min",
                    {
                        "{{state}}": "60 * sum by (state) (rate(tokenfleet_jobs_ended_total"
                        f'{{{M},state=~"released|lost"}}{W}))',
                        "reclaimed": f"60 * sum(rate(tokenfleet_jobs_reclaimed_total{{{M}}}{W}))",
                    },
                ),
                Panel(
                    "Failures by code",
                    "Jobs that failed, expired or were lost, by error code. Empty: there were none.",
                    "reqps",
                    {
                        "{{error_type}}": "sum by (error_type) (rate("
                        f'gen_ai_server_request_duration_seconds_count{{{G},error_type!=""}}{W}))'
                    },
                    stacked=True,
                ),
                Panel(
                    "Engine trouble",
                    "Restarts of engine processes, sequences that the engine gave up, steps tried again "
                    "for want of memory; all in the last 15 minutes.",
                    "none",
                    {
                        "restarts": f"sum(increase(tokenfleet_engine_restarts_total{{{M}}}[15m]))",
                        "errors": f"sum(increase(tokenfleet_sequence_errors_total{{{M}}}[15m]))",
                        "memory": f"sum(increase(tokenfleet_oom_retries_total{{{M}}}[15m]))",
                    },
                ),
                Panel(
                    "Workers and Redis",
                    "How many there are, how many of them are not ready or do not reach Redis, and how many "
                    "queues are paused.",
                    "none",
                    {
                        "there": f"count(tokenfleet_worker_info{{{M}}})",
                        "not ready": f"count(tokenfleet_ready{{{M}}}) - sum(tokenfleet_ready{{{M}}})",
                        "without Redis": f"count(tokenfleet_broker_reachable{{{M}}})"
                        f" - sum(tokenfleet_broker_reachable{{{M}}})",
                        "queues paused": "sum(max by (model, priority) "
                        f"(tokenfleet_queue_paused{{{M}}}))",
                    },
                ),
                Panel(
                    "Publishing",
                    "Round trip that brings new tokens of all of a worker's jobs into Redis. Above the "
                    "flush interval (25 ms) tokens arrive in larger lumps.",
                    "s",
                    quantiles("tokenfleet_flush_duration_seconds", M, 0.5, 0.99),
                    log=True,
                ),
                Panel(
                    "Preemptions",
                    "Sequences whose KV blocks were taken back and that are computed again. Some are "
                    "normal when memory is full; many cost throughput.",
                    "ops",
                    {"preempted": f"sum(rate(tokenfleet_preemptions_total{{{M}}}{W}))"},
                ),
            ],
        ),
        GATEWAY,
    ],
)
