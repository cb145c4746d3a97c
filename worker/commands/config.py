"""`tokenfleet config show`: every setting of a worker, its value, and where that comes from.

What is shown is what `tokenfleet worker` would start with: the same sources, the same validation.
Passwords are not shown.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenfleet.worker.commands import base
from tokenfleet.worker.commands.base import Output, OutputOption
from tokenfleet.worker.commands.worker import HIDDEN

if TYPE_CHECKING:
    from tokenfleet.worker.settings import WorkerSettings

COLUMNS = ("setting", "value", "from")


def config_show(
    config: Annotated[
        Path | None, typer.Option(envvar="TOKENFLEET_CONFIG", help="TOML file of settings.")
    ] = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only what is not at its default.")
    ] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show what a worker would be started with, and where each setting comes from."""
    from tokenfleet.worker.settings import SettingsError, load_settings, unknown_variables

    if config is not None:
        os.environ["TOKENFLEET_CONFIG"] = str(config)
    for name in unknown_variables():
        base.note(f"warning: this is no setting of tokenfleet: {name}")
    try:
        given = _origins(config)
        settings = load_settings(**({} if "model" in given else {"model": "."}))
    except SettingsError as error:
        base.fail(error, output)
    rows = [
        row
        for name in type(settings).model_fields
        if name not in HIDDEN or name in given
        if (row := _row(name, settings, given))["from"] != "default" or not changed
    ]
    base.print_rows(COLUMNS, rows, output, empty="every setting is at its default", show=_show)
    raise typer.Exit(base.OK)


def _origins(config: Path | None) -> Mapping[str, str]:
    """Where a setting is given: the environment goes before the file."""
    from tokenfleet.worker.settings import ENV_PREFIX, SettingsError

    found: dict[str, str] = {}
    if config is not None:
        try:
            found = dict.fromkeys(tomllib.loads(config.read_text(encoding="utf-8")), str(config))
        except OSError as error:
            raise SettingsError(f"{config} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise SettingsError(f"{config} is not valid TOML: {error}") from error
    for name, value in os.environ.items():
        if name.startswith(ENV_PREFIX) and value:
            found[name.removeprefix(ENV_PREFIX).lower()] = name
    return found


def _row(name: str, settings: WorkerSettings, given: Mapping[str, str]) -> dict[str, Any]:
    value = getattr(settings, name)
    if name == "model" and name not in given:
        return {"setting": name, "value": None, "from": "not set: a worker needs it"}
    if name == "redis_url":
        value = _without_password(value)
    elif isinstance(value, Path):
        value = str(value)
    return {"setting": name, "value": value, "from": given.get(name, "default")}


def _without_password(url: str) -> str:
    from tokenfleet.producer.address import SECRET

    place, mark, query = url.partition("?")
    user, at, host = place.rpartition("@")
    scheme, slashes, user = user.partition("://")
    name, colon, _ = user.partition(":")
    if colon:
        place = f"{scheme}{slashes}{name}:***{at}{host}"
    options = [part.partition("=") for part in query.split("&")]
    shown = [name + sign + ("***" if name in SECRET else value) for name, sign, value in options]
    return place + mark + "&".join(shown)


def _show(column: str, value: Any) -> str:
    if value is None:
        return "-"
    return (
        {True: "true", False: "false"}.get(value, str(value)) if column == "value" else str(value)
    )
