"""API keys: who a request comes from, and which tenant's jobs it makes.

The file holds digests only. A key is 256 random bits, so a plain SHA-256 of it cannot be guessed
back; a slow digest would only slow the gateway down.

    [[keys]]
    name = "alice-laptop"                # in logs
    tenant = "alice"
    sha256 = "9f86d081884c7d65..."
    priority = "default"                 # the most urgent class it may ask for [interactive]
    status = true                        # may see /status [false]

Invariant: every entry is compared in full with what was presented, whether an earlier one matched
or not.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from tokenfleet.producer.errors import InvalidJob
from tokenfleet.producer.gateway.settings import Priority, SettingsError, Tenant
from tokenfleet.producer.keys import PRIORITIES, check_name

KEY_PREFIX = "tf-"
CHECK_S = 1.0
"""A changed file is noticed after this long at most."""

log = logging.getLogger(__name__)


class KeyEntry(BaseModel):
    """One key in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
    name: Annotated[str, Field(min_length=1, max_length=64)]
    tenant: Tenant
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")]
    priority: Priority = "interactive"
    status: bool = False


class KeyFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
    keys: tuple[KeyEntry, ...] = ()

    @field_validator("keys")
    @classmethod
    def _told_apart(cls, keys: tuple[KeyEntry, ...]) -> tuple[KeyEntry, ...]:
        for kind in ("name", "sha256"):
            values = [getattr(key, kind).lower() for key in keys]
            twice = {value for value in values if values.count(value) > 1}
            if twice:
                raise ValueError(f"{kind} is there twice: {', '.join(sorted(twice))}")
        return keys


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks."""

    tenant: str
    key_name: str
    """Of the key, for logs; `anonymous` without one."""
    priority: str = "interactive"
    """The most urgent class it may ask for."""
    sees_status: bool = False

    def may(self, priority: str) -> bool:
        """Whether it may ask for this class."""
        return PRIORITIES.index(priority) >= PRIORITIES.index(self.priority)


class Keyring:
    """The keys of one gateway; follows its file while running.

    Args:
        path: None: there are no keys.
        stranger: tenant of whoever presents none; None: refused.
        clock: monotonic seconds.

    Raises:
        SettingsError: the file cannot be used. Later, a broken file leaves the keys as they were.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        stranger: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._stranger = stranger
        self._clock = clock
        self._next_check = clock() + CHECK_S
        self._stamp = self._stamp_now()
        self._entries = () if path is None else read_keys(path)

    def caller(self, key: str | None) -> Caller | None:
        """Whose key this is; None: nobody's, the request is to be refused."""
        if not key:
            return self.stranger
        self._follow()
        digest = hashlib.sha256(key.encode()).hexdigest()
        found = [e for e in self._entries if hmac.compare_digest(e.sha256.lower(), digest)]
        if not found:
            # any key will do where none is asked for: clients insist on sending one
            return self.stranger if self._path is None else None
        entry = found[0]
        return Caller(entry.tenant, entry.name, entry.priority, entry.status)

    @property
    def stranger(self) -> Caller | None:
        """Whoever presents no key."""
        if self._stranger is None:
            return None
        return Caller(self._stranger, "anonymous", sees_status=self._path is None)

    def _follow(self) -> None:
        now = self._clock()
        if self._path is None or now < self._next_check:
            return
        self._next_check = now + CHECK_S
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._entries = read_keys(self._path)
        except SettingsError as error:
            log.error("keys_file_refused", extra={"fields": {"error": str(error)}})
        else:
            log.info("keys_file_read", extra={"fields": {"keys": len(self._entries)}})

    def _stamp_now(self) -> tuple[int, int, int] | None:
        """What changes when the file does."""
        try:
            found = self._path.stat() if self._path is not None else None
        except OSError:
            return None
        return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)


def read_keys(path: Path) -> tuple[KeyEntry, ...]:
    """The entries of a key file. Raises SettingsError naming what is wrong, and no digest."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        return KeyFile.model_validate(found).keys
    except OSError as error:
        raise SettingsError(f"keys_file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"keys_file {path} is not valid TOML: {error}") from error
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        raise SettingsError(f"keys_file {path}: {where}: {message}") from None


def new_key(tenant: str, name: str | None = None) -> tuple[str, str]:
    """A fresh key, and the entry that lets it in. Raises SettingsError for a name that is none."""
    try:
        check_name("tenant", tenant)
    except InvalidJob as error:
        raise SettingsError(str(error)) from None
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    digest = hashlib.sha256(key.encode()).hexdigest()
    called = json.dumps(name or tenant)  # as TOML writes a text, too
    entry = f'[[keys]]\nname = {called}\ntenant = "{tenant}"\nsha256 = "{digest}"\n'
    return key, entry
