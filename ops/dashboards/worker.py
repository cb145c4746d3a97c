"""One worker: what its steps do with time, memory and bandwidth."""

from __future__ import annotations

from panel import Dashboard, I, Panel, Row, W, quantiles

WORKER = Dashboard(
    "tokenfleet-worker",
    "tokenfleet: worker",
    "One worker and its engine: what the steps do with time, memory and bandwidth.",
    variables={
        "model": "label_values(tokenfleet_worker_info, model)",
        "instance": 'label_values(tokenfleet_worker_info{model=~"$model"}, instance)',
    },
    rows=[
        Row(
            "Now",
            [
                Panel(
                    "Worker",
                    "Version and the id that leases, logs and `tokenfleet top` call it by.",
                    "none", {"{{worker}} {{version}}": f"tokenfleet_worker_info{{{I}}}"},
                    "table", 8, 4,
                ),
                Panel(
                    "Ready",
                    "1 while it would take a job. 0: `/readyz` says why.",
                    "none", {"{{instance}}": f"tokenfleet_ready{{{I}}}"}, "stat", 4, 4,
                ),
                Panel(
                    "Redis reachable",
                    "1 while Redis answers this worker.",
                    "none", {"{{instance}}": f"tokenfleet_broker_reachable{{{I}}}"}, "stat", 4, 4,
                ),
                Panel(
                    "Jobs held",
                    "Jobs that are this worker's: running, or next in line.",
                    "none", {"{{instance}}": f"tokenfleet_jobs_running{{{I}}}"}, "stat", 4, 4,
                ),
                Panel(
                    "Engine restarts",
                    "In the last hour.",
                    "none",
                    {"{{instance}}": f"increase(tokenfleet_engine_restarts_total{{{I}}}[1h])"},
                    "stat", 4, 4, warn=1,
                ),
            ],
        ),
        Row(
            "Steps",
            [
                Panel(
                    "Step duration",
                    "Wall time of an engine step. It bounds how smoothly tokens come.",
                    "s", quantiles("tokenfleet_step_duration_seconds", I, 0.5, 0.95, 0.99), log=True,
                ),
                Panel(
                    "Where a step's time goes",
                    "Share of the steps' time by phase. Everything but forward is overhead.",
                    "percentunit",
                    {
                        "{{phase}}": "sum by (phase) (rate(tokenfleet_step_phase_seconds_total"
                        f"{{{I}}}{W})) / ignoring(phase) group_left "
                        f"sum(rate(tokenfleet_step_phase_seconds_total{{{I}}}{W}))"
                    },
                    stacked=True, limits=(0, 1),
                ),
                Panel(
                    "Steps",
                    "0 with sequences running means that the engine hangs.",
                    "ops", {"{{instance}}": f"rate(tokenfleet_steps_total{{{I}}}{W})"},
                ),
                Panel(
                    "Tokens computed",
                    "Output tokens, and prompt tokens with those computed again.",
                    "suffix: tokens/s",
                    {
                        "output {{instance}}": f"rate(tokenfleet_decode_tokens_total{{{I}}}{W})",
                        "prompt {{instance}}": f"rate(tokenfleet_prefill_tokens_total{{{I}}}{W})",
                    },
                ),
                Panel(
                    "Token budget used",
                    "Share of the budget that the interval's steps used. Low with jobs waiting: slots "
                    "or memory are the limit, not the budget.",
                    "percentunit",
                    {
                        "{{instance}}": f"(rate(tokenfleet_decode_tokens_total{{{I}}}{W})"
                        f" + rate(tokenfleet_prefill_tokens_total{{{I}}}{W}))"
                        f" / (rate(tokenfleet_steps_total{{{I}}}{W})"
                        f" * tokenfleet_token_budget_tokens{{{I}}})",
                    },
                ),
                Panel(
                    "Bandwidth reached",
                    "Bytes of weights and KV read per second of the forward pass, counted from shapes. "
                    "Hold it against the memory's bandwidth: decoding is bound by it.",
                    "Bps",
                    {
                        "{{instance}}": f"rate(tokenfleet_read_bytes_total{{{I}}}{W}) / on (instance) "
                        f'rate(tokenfleet_step_phase_seconds_total{{{I},phase="forward"}}{W})'
                    },
                ),
            ],
        ),
        Row(
            "Memory",
            [
                Panel(
                    "Sequences",
                    "Rows in use, what waits inside the engine, and the slots there are.",
                    "none",
                    {
                        "running {{instance}}": f"tokenfleet_sequences_running{{{I}}}",
                        "waiting {{instance}}": f"tokenfleet_sequences_waiting{{{I}}}",
                        "slots {{instance}}": f"tokenfleet_slots{{{I}}}",
                    },
                ),
                Panel(
                    "KV blocks in use",
                    "Share of the pool that sequences hold. Near 100 %, sequences are preempted.",
                    "percentunit", {"{{instance}}": f"tokenfleet_kv_cache_usage_ratio{{{I}}}"},
                    limits=(0, 1),
                ),
                Panel(
                    "KV blocks",
                    "Held, free but remembering a prefix, and what the tokens present would need "
                    "without sharing: needed above used is what the prefix cache saves.",
                    "none",
                    {
                        "used": f"sum(tokenfleet_blocks_used{{{I}}})",
                        "cached": f"sum(tokenfleet_blocks_cached{{{I}}})",
                        "needed": f"sum(tokenfleet_blocks_needed{{{I}}})",
                        "pool": f"sum(tokenfleet_blocks{{{I}}})",
                    },
                ),
                Panel(
                    "Prefix cache hits",
                    "Share of the prompt tokens that were found in the cache and not computed.",
                    "percentunit",
                    {
                        "{{instance}}": f"rate(tokenfleet_prefix_cache_hits_tokens_total{{{I}}}{W}) / "
                        f"rate(tokenfleet_prefix_cache_queries_tokens_total{{{I}}}{W})"
                    },
                    limits=(0, 1),
                ),
                Panel(
                    "Preemptions and retries",
                    "Sequences computed again because blocks ran out; steps tried again smaller because "
                    "memory did.",
                    "ops",
                    {
                        "preempted {{instance}}": f"rate(tokenfleet_preemptions_total{{{I}}}{W})",
                        "out of memory {{instance}}": f"rate(tokenfleet_oom_retries_total{{{I}}}{W})",
                    },
                ),
                Panel(
                    "Publishing",
                    "Round trip that brings the new tokens of all jobs into Redis.",
                    "s", quantiles("tokenfleet_flush_duration_seconds", I, 0.5, 0.99), log=True,
                ),
            ],
        ),
    ],
)  # fmt: skip
