"""`tokenfleet-gateway`: every setting is a flag, made from the settings themselves.

argparse, and not what the worker's command line uses: the light client has no more.

Exit codes: 0 ended when told to, 2 the settings cannot be served.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

NEEDS = "the gateway needs {name}, which is not installed; use: pip install 'tokenfleet[gateway]'"
BAD_INPUT = 2
_UNSET = re.compile(r"[;,] None = (.+)\.$")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the gateway and exit with its code."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str], prog: str = "tokenfleet-gateway") -> int:
    """Run the gateway; its exit code. `prog` is what was typed to get here."""
    try:
        from tokenfleet.producer.gateway import api_keys, logs, server, settings
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tokenfleet"):
            raise
        return _say(NEEDS.format(name=error.name))
    given = vars(_parser(settings.GatewaySettings, prog).parse_args(arguments))
    config, tenant, name = given.pop("config"), given.pop("new_key"), given.pop("key_name")
    for variable in settings.unknown_variables(os.environ):
        sys.stderr.write(f"warning: this is no setting of the gateway: {variable}\n")
    try:
        if tenant is not None:
            return _print_key(*api_keys.new_key(tenant, name))
        found = settings.load_settings(given, os.environ, config)
        logs.configure(found.log_level)
        server.serve(found)
    except settings.SettingsError as error:
        return _say(str(error))
    return 0


def _parser(kind: Any, prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Serve an OpenAI-compatible API over a fleet of workers.",
        epilog="Every setting is also TOKENFLEET_GATEWAY_<NAME> in the environment, and its name "
        f"in the config file. Example:  {prog} --port 8000 --keys-file keys.toml",
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="PATH", help="TOML file of settings.")
    parser.add_argument(
        "--new-key",
        metavar="TENANT",
        help="Print a fresh key and its entry for keys_file, and end.",
    )
    parser.add_argument("--key-name", metavar="NAME", help="Its name; the tenant's if not given.")
    for name, field in kind.model_fields.items():
        text = " ".join((field.description or "").split()).replace("%", "%%")
        text = _with_default(text, field.default)
        flag = f"--{name.replace('_', '-')}"
        if field.annotation is bool:
            action: Any = argparse.BooleanOptionalAction
            parser.add_argument(flag, action=action, default=None, help=text)
        else:
            metavar = _metavar(field.annotation)
            parser.add_argument(flag, metavar=metavar, help=text)
    return parser


def _with_default(text: str, default: object) -> str:
    """The text of a setting, and what it is when nothing is said."""
    unset = _UNSET.search(text)
    if unset is not None:
        return f"{text[: unset.start()]}. [default: {unset[1]}]"
    if default in (None, ()):
        return text
    shown = ("off", "on")[default] if isinstance(default, bool) else default
    return f"{text} [default: {shown}]".strip()


def _metavar(annotation: Any) -> str:
    """What to write: a|b for a choice, otherwise the kind of value."""
    choices = [part for part in get_args(annotation) if isinstance(part, str)]
    if choices:
        return "|".join(choices)
    spelled = str(annotation)
    for kind, word in (("Path", "PATH"), ("int", "INT"), ("float", "NUMBER")):
        if kind in spelled:
            return word
    return "TEXT"


def _print_key(key: str, entry: str) -> int:
    """The key goes to whoever may use it, the entry into the file; neither is kept here."""
    sys.stdout.write(f"{key}\n\n{entry}")
    sys.stderr.write("above: the key, for whoever may use it, and its entry for the keys file\n")
    return 0


def _say(message: str) -> int:
    sys.stderr.write(f"tokenfleet-gateway: {message}\n")
    return BAD_INPUT
