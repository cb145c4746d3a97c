"""What a worker is started with: flags over environment over config file over defaults.

A WorkerSettings that exists is in range; one that cannot exist says which name is wrong, what it
was and what it may be. The same words everywhere: `max_num_seqs` in the file,
`TOKENFLEET_MAX_NUM_SEQS` in the environment, `--max-num-seqs` on the command line.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from tokenfleet.engine.config import EngineConfig
from tokenfleet.engine.errors import ConfigError
from tokenfleet.producer.address import parse_address
from tokenfleet.producer.checks import MOST_S
from tokenfleet.producer.errors import BrokerUnsupported, InvalidJob

ENV_PREFIX = "TOKENFLEET_"
CONFIG_ENV = "TOKENFLEET_CONFIG"
NOT_SETTINGS = frozenset(
    {CONFIG_ENV, *(f"TOKENFLEET_{name}" for name in ("TENANT", "KERNELS", "CHAOS", "AOT"))}
)
"""Variables of our prefix that are no settings: a client's, the kernels' and the tests'."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Kept = Annotated[float, Field(ge=0.001, le=MOST_S, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class SettingsError(ValueError):
    """A setting is unknown or out of range; the message has one line per name."""


class WorkerSettings(BaseSettings):
    """One worker's settings. Build it with `load_settings`, which names what is wrong."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        hide_input_in_errors=True,
    )

    redis_url: str = "redis://localhost:6379/0"
    """redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://; user, password,
    database and TLS files inside it."""
    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "tokenfleet"
    """Prefix of all keys: fleets with different namespaces never see each other."""
    partitions: Count | None = None
    """Parts the keyspace is spread over; None = 1 on a single server, 16 on a cluster."""
    worker_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] | None = None
    """Name in leases and logs, of this worker alone; None = host, process id and a random part."""

    model: Path
    """Directory with config.json, safetensors and tokenizer."""
    model_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_./-]{1,128}$")] | None = None
    """What producers ask for; None = the directory's name."""
    max_num_seqs: Count = 64
    """Slots: sequences that run at once."""
    max_num_batched_tokens: Count = 576
    """Token budget of one step."""
    max_model_len: Count | None = None
    """Longest prompt plus output; None = what the model was made for."""
    block_size: Count | None = None
    """Tokens per KV block, a power of two; None = the device's best."""
    num_blocks: Count | None = None
    """Usable KV blocks; None = from memory."""
    prefix_cache: bool = True
    """Keep finished blocks for prompts that begin alike."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the card's memory that the engine may use."""
    enforce_eager: bool = False
    """No CUDA graphs, no recorded steps on a CPU."""
    overlap: bool | None = None
    """Schedule the next step while the device computes this one; None = on CUDA."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Of weights and arithmetic; auto = the checkpoint's on CUDA, the fastest one on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto = CUDA where torch finds a device, else the CPU."""
    quantization: Literal["int8", "fp8", "fp8_block"] | None = None
    """Round the weights while loading: int8 on a CPU, fp8 or fp8_block on a GPU; None = as they
    are in the checkpoint."""
    kv_cache_dtype: Literal["auto", "model", "fp8", "int8"] = "auto"
    """fp8, int8 (on a CPU): half the memory of 16 bits; auto = int8 beside quantization int8, else
    the model's."""

    lease_s: Annotated[float, Field(ge=0.1, le=MOST_S, allow_inf_nan=False)] = 30.0
    """How long a job stays this worker's without a renewal; others wait this long after a crash."""
    grace_s: NotNegative = 30.0
    """After SIGTERM, how long running jobs may go on before they are handed back."""
    step_limit_s: Positive = 120.0
    """An engine with work and without a step for this long hangs: its jobs are handed back."""
    engine_start_timeout_s: Positive = 600.0
    """An engine not ready this long after its launch hangs: it is ended, another one started."""
    flush_interval_ms: NotNegative = 50.0
    """Later tokens of a job are published this often, the first one and the end at once; 0 = every
    step. Less: smoother streams, more work for Redis, the worker and each reader."""
    prefetch: Annotated[int, Field(ge=0)] = 2
    """Jobs kept ready beyond the slots, and only while all slots are taken."""
    max_preemptions: Annotated[int, Field(ge=0)] = 3
    """How often one batch job may be put back for a more urgent job; 0 = never."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """Failures without progress after which a job is dead-lettered (a job may bring its own)."""
    result_ttl_s: Kept = 86_400.0
    """How long a result can be asked for."""
    log_ttl_s: Kept = 3_600.0
    """How long an ended job's event log can be replayed."""

    health_host: str = "127.0.0.1"
    """Address on which health_port is served; 0.0.0.0 = to other machines too, without a key."""
    health_port: Annotated[int, Field(ge=0, le=65_535)] | None = None
    """/healthz, /readyz and /metrics; 0 = any free port, None = not served."""
    vllm_metric_names: bool = False
    """Offer the metric names that vLLM dashboards know as well."""
    otlp_endpoint: str | None = None
    """Base URL of an OpenTelemetry collector; None = no export."""
    otlp_protocol: Literal["grpc", "http"] = "grpc"
    """What otlp_endpoint is spoken to in."""
    trace_file: Path | None = None
    """Write spans to this file, one JSON object a line; None = to none."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least grave events that are logged."""

    simulated_step_ms: NotNegative | None = None
    """No model is computed: each step lasts this long and tokens follow from the prompt alone.
    For measuring a fleet apart from its hardware."""
    fault: str | None = None
    """Test hook of the engine process: `kill@add:7` and the like (worker/engine_link/faults.py)."""
    step_log: Path | None = None
    """Bench hook of the engine process: a file for when first tokens were made
    (worker/engine_link/step_log.py)."""

    @field_validator("log_level", "dtype", "device", mode="before")
    @classmethod
    def _lower(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @field_validator("redis_url")
    @classmethod
    def _an_address(cls, value: str) -> str:
        try:
            address = parse_address(value)
        except InvalidJob as error:
            raise ValueError(f"{error.way_out}; got {error.value}") from None
        except BrokerUnsupported as error:
            raise ValueError(str(error)) from None
        if address.options.get("max_connections", 2) < 2:  # one of them waits for jobs
            raise ValueError("must allow a worker max_connections of 2 or more")
        return value

    @property
    def served_name(self) -> str:
        """What producers ask for."""
        return self.model_name or self.model.resolve().name

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then environment, then the config file."""
        return init_settings, env_settings, _TomlSource(settings_cls)


class _TomlSource(PydanticBaseSettingsSource):
    """The file that TOKENFLEET_CONFIG names; unknown names in it are refused."""

    def __call__(self) -> dict[str, Any]:
        path = os.environ.get(CONFIG_ENV)
        if not path:
            return {}
        try:
            return tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise SettingsError(f"{CONFIG_ENV}={path} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"{CONFIG_ENV}={path} is not valid TOML: {error}") from error

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        """Unused: the whole file is read at once."""
        return None, field_name, False


def load_settings(**flags: Any) -> WorkerSettings:
    """Settings from flags (None = not given), environment and config file.

    Raises:
        SettingsError: one line per wrong name, with what to write instead.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        settings = WorkerSettings(**given)
        engine_config(settings)
    except ValidationError as error:
        raise SettingsError("\n".join(_sentence(problem) for problem in error.errors())) from None
    except ConfigError as error:
        raise SettingsError(str(error)) from None
    return settings


def engine_config(settings: WorkerSettings) -> EngineConfig:
    """The engine's part of the settings.

    Raises:
        ConfigError: a value that the engine refuses.
    """
    return EngineConfig(
        model=settings.model,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        prefix_cache=settings.prefix_cache,
        gpu_memory_fraction=settings.gpu_memory_fraction,
        enforce_eager=settings.enforce_eager,
        overlap=settings.overlap,
        dtype=settings.dtype,
        device=settings.device,
        quantization=settings.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
    )


def engine_options(settings: WorkerSettings) -> dict[str, Any]:
    """What the engine process is told beyond its config: hooks of tests and benches."""
    step_ms = settings.simulated_step_ms
    simulated = {} if step_ms is None else {"simulated_step_s": step_ms / 1000}
    step_log = None if settings.step_log is None else str(settings.step_log)
    return {"fault": settings.fault, "step_log": step_log, **simulated}


def unknown_variables(environ: dict[str, str] | None = None) -> list[str]:
    """Variables with our prefix that are no setting, each with the nearest name that is.

    They are no error: container platforms inject such variables by themselves.
    """
    known = {ENV_PREFIX + name.upper() for name in WorkerSettings.model_fields}
    found = []
    for name in sorted(os.environ if environ is None else environ):
        ours = name.startswith(ENV_PREFIX) and not name.startswith(f"{ENV_PREFIX}GATEWAY_")
        if ours and name not in known | NOT_SETTINGS:
            word = name.removeprefix(ENV_PREFIX).lower()
            near = difflib.get_close_matches(word, WorkerSettings.model_fields, n=1)
            meant = f" (did you mean {ENV_PREFIX}{near[0].upper()}?)" if near else ""
            found.append(name + meant)
    return found


def _sentence(problem: Any) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        return f"{name} is not set: give --{name.replace('_', '-')} or {ENV_PREFIX}{name.upper()}"
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, WorkerSettings.model_fields, n=1)
        return f"{name} is no setting" + (f"; did you mean {near[0]}?" if near else "")
    message = problem["msg"].removeprefix("Value error, ")
    if name == "redis_url":  # may hold a password
        return f"{name} ({ENV_PREFIX}{name.upper()}): {message}"
    return f"{name} ({ENV_PREFIX}{name.upper()}): {message}, got {problem.get('input')!r}"
