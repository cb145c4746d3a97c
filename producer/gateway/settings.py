"""What a gateway is started with: flags over environment over config file over defaults.

The same words everywhere: `keys_file` in the file, `TOKENFLEET_GATEWAY_KEYS_FILE` in the
environment, `--keys-file` on the command line. Where Redis is may also be said in the variables
that workers read (`TOKENFLEET_REDIS_URL`). Plain pydantic does all of it: the light client has it.

Invariant: settings that exist can be served with; a gateway that strangers reach knows its callers.
"""

from __future__ import annotations

import difflib
import ipaddress
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tokenfleet.producer.client import DEFAULT_URL

ENV_PREFIX = "TOKENFLEET_GATEWAY_"
SHARED = {name: f"TOKENFLEET_{name.upper()}" for name in ("redis_url", "namespace", "partitions")}
"""Settings that workers have too, and the variables that say them to both."""
CONFIG_ENV = f"{ENV_PREFIX}CONFIG"

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Tenant = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Priority = Literal["interactive", "default", "batch"]


class SettingsError(ValueError):
    """A setting is unknown or out of range; the message has one line per name."""


class GatewaySettings(BaseModel):
    """One gateway's settings. Build them with `load_settings`, which names what is wrong."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True
    )

    redis_url: str = DEFAULT_URL
    """redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://."""
    namespace: Tenant = "tokenfleet"
    """The fleet's prefix of all keys."""
    partitions: Count | None = None
    """Parts the keyspace is spread over; None = as the client decides."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    """Port to listen on; 0 = any free one."""
    keys_file: Path | None = None
    """TOML file of API keys and their tenants; see --new-key."""
    anonymous_tenant: Tenant | None = None
    """Whose jobs requests without a key make; None = nobody's, they are refused (but on a loopback
    address without a keys_file: `default`)."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call, with commas between them; `*` for all."""

    models: tuple[str, ...] = ()
    """Models that are always accepted and listed, with commas between them."""
    unknown_models: Literal["refuse", "queue"] = "refuse"
    """A model that has no worker, no queue and no place in `models`: 404, or a job that waits."""
    priority: Priority = "interactive"
    """Class of requests that name none: interactive is served first, batch makes way."""
    deadline_s: Positive | None = None
    """Requests that name no deadline expire after this long; None = never."""
    max_body_bytes: Count = 1 << 20
    """Largest JSON body."""

    files_dir: Path | None = None
    """Where /v1/files and /v1/batches keep theirs; None = neither is offered."""
    max_file_bytes: Count = 512 << 20
    """Largest uploaded file."""

    keep_alive_s: Positive = 15.0
    """A stream that is silent for this long gets a comment, so that proxies keep it open."""
    drain_delay_s: NotNegative = 0.0
    """After SIGTERM, how long requests are still taken while /readyz says no: as long as whoever
    sends them needs to notice."""
    grace_s: NotNegative = 30.0
    """After that, how long running requests may go on."""
    status_page: bool = True
    """Serve /status, a page about the fleet."""
    metrics: Literal["key", "open", "off"] = "key"
    """/metrics: for keys that may see the status page, for whoever asks, or not there."""
    history_s: Positive = 600.0
    """How far back the plot of the status page goes."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("cors_origins", "models", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @model_validator(mode="after")
    def _strangers_need_keys(self) -> GatewaySettings:
        if self.keys_file is None and self.anonymous_tenant is None and not self.is_local:
            raise ValueError(
                f"host {self.host} can be reached from elsewhere and nobody would be asked for a "
                "key: give --keys-file, or name the tenant of all requests: --anonymous-tenant"
            )
        return self

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the gateway."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def stranger(self) -> str | None:
        """The tenant of requests without a key; None: they are refused."""
        if self.anonymous_tenant is None and self.keys_file is None:
            return "default"
        return self.anonymous_tenant


def load_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str], config: Path | None = None
) -> GatewaySettings:
    """Settings from flags (None = not given), environment and the config file.

    Raises:
        SettingsError: one line per wrong name, with what to write instead.
    """
    path = config or (Path(environ[CONFIG_ENV]) if environ.get(CONFIG_ENV) else None)
    given = {} if path is None else _read(path)
    for name in GatewaySettings.model_fields:
        for variable in (SHARED.get(name, ""), f"{ENV_PREFIX}{name.upper()}"):
            if environ.get(variable):
                given[name] = environ[variable]
    given |= {name: value for name, value in flags.items() if value is not None}
    try:
        return GatewaySettings(**given)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        raise SettingsError("\n".join(_sentence(p, given) for p in problems)) from None


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Variables with our prefix that are no setting, each with the nearest name that is."""
    known = {f"{ENV_PREFIX}{name.upper()}" for name in GatewaySettings.model_fields} | {CONFIG_ENV}
    found = []
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            found.append(f"{name} (did you mean {near[0]}?)" if near else name)
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"config file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"config file {path} is not valid TOML: {error}") from error


def _sentence(problem: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, GatewaySettings.model_fields, n=1)
        return f"{name} is no setting" + (f"; did you mean {near[0]}?" if near else "")
    if not name:
        return str(message)
    shown = "" if name == "redis_url" else f", got {given.get(name)!r}"  # it may hold a password
    return f"{name} ({ENV_PREFIX}{name.upper()}): {message}{shown}"
