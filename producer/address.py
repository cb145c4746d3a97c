"""Where Redis is: the URLs that clients and workers are given, read once and checked.

    redis://host:port/db              one server, or a name that leads to whoever is the master now
    rediss://host:port/db             the same over TLS
    unix:///path/to/socket?db=0       the same on this machine
    redis+sentinel://host:port,host:port/service/db     the master that the sentinels name
    redis+cluster://host:port,host:port                 a cluster; also redis://host:port?cluster=true

`rediss+sentinel` and `rediss+cluster` are those over TLS. User and password stand before the hosts.

Invariant: nothing here opens a connection, and no message made here holds a password.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from tokenfleet.producer.errors import BrokerUnsupported, InvalidJob

SINGLE, UNIX, SENTINEL, CLUSTER = "single", "unix", "sentinel", "cluster"

SCHEMES = ("redis://", "rediss://", "unix://", "redis+sentinel://", "redis+cluster://")
WAY_OUT = f"must begin with {', '.join(SCHEMES[:-1])} or {SCHEMES[-1]}"
_ENCODED = "must have '/', '?', '#' and '@' in a user or password written as %2F, %3F, %23 and %40"
DEFAULT_PORT, SENTINEL_PORT = 6379, 26379

_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_TEXTS = (*_TLS_FILES, "ssl_ca_path", "ssl_cert_reqs", "ssl_ciphers", "username", "password")
_FLAGS = ("ssl_check_hostname", "socket_keepalive", "cluster", "decode_responses")
_NUMBERS = ("db", "protocol", "max_connections", "health_check_interval")
_ALLOWED = {"protocol": range(2, 4), "max_connections": range(1, 1 << 16)}
_SENTINELS = ("sentinel_username", "sentinel_password")
_NAMES = frozenset((*_TEXTS, *_FLAGS, *_NUMBERS, *_SENTINELS, "client_name"))
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
SECRET = ("password", "sentinel_password")
"""Options that nobody is shown."""


@dataclass(frozen=True, slots=True)
class Address:
    """A checked URL."""

    kind: str
    """single, unix, sentinel or cluster."""
    shown: str
    """For messages: without user, password and options."""
    tls: bool = False
    hosts: tuple[tuple[str, int], ...] = ()
    """One server; or the sentinels, or nodes of the cluster, any of which may be asked first."""
    path: str = ""
    """The unix socket."""
    service: str = ""
    """What the sentinels call the master."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Arguments of a redis-py connection: user, password, db, TLS files."""
    sentinel_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The same for connections to the sentinels."""


def parse_address(url: str) -> Address:
    """What a URL says. Raises InvalidJob, or BrokerUnsupported where it asks to decode replies."""
    url = url.strip()  # a file's or a secret's last line break
    scheme, separator, _ = url.partition("://")
    if not separator or f"{scheme.replace('rediss+', 'redis+')}://" not in SCHEMES:
        raise _wrong(url, WAY_OUT)
    try:
        parts = urlsplit(url)
    except ValueError:  # it quotes the password
        raise _wrong(url, "must have an IPv6 address in brackets: redis://[::1]:6379") from None
    if _is_cut_short(scheme, parts):
        raise InvalidJob("redis_url", f"{scheme}://...", _ENCODED)
    options = _options(url, parts.query)
    user, _, place = parts.netloc.rpartition("@")
    name, _, password = user.partition(":")
    options |= {k: unquote(v) for k, v in (("username", name), ("password", password)) if v}
    wants_cluster = options.pop("cluster", False)
    _check_tls(url, options, tls=scheme.startswith("rediss"))
    if scheme == "unix":
        return _unix(url, parts.path, options)
    if "sentinel" in scheme:
        return _sentinel(url, scheme, place, parts.path, options)
    return _servers(
        url, scheme, place, parts.path, options, cluster=wants_cluster or "cluster" in scheme
    )


def _is_cut_short(scheme: str, parts: SplitResult) -> bool:
    """Whether user or password hold a character that ends the part of a URL they stand in."""
    names = [pair.partition("=")[0] for pair in parts.query.split("&")]
    in_path = scheme != "unix" and "@" in parts.path
    return bool(parts.fragment) or in_path or any("@" in name for name in names)


def _unix(url: str, path: str, options: dict[str, Any]) -> Address:
    if not path.strip("/"):
        raise _wrong(url, "must name the socket: unix:///path/to/redis.sock")
    return Address(UNIX, f"unix://{path}", path=unquote(path), options=options)


def _sentinel(url: str, scheme: str, place: str, path: str, options: dict[str, Any]) -> Address:
    service, _, db = path.strip("/").partition("/")
    if not service:
        raise _wrong(url, "must name the service: redis+sentinel://host:port/service/db")
    if db:
        options["db"] = _number(url, "db", db)
    theirs = {k.removeprefix("sentinel_"): options.pop(k) for k in _SENTINELS if k in options}
    theirs |= {k: v for k, v in options.items() if k.startswith("ssl_")}
    return Address(
        SENTINEL,
        f"{scheme}://{place}/{service}",
        tls=scheme.startswith("rediss"),
        hosts=_hosts(url, place, SENTINEL_PORT),
        service=service,
        options=options,
        sentinel_options=theirs,
    )


def _servers(
    url: str, scheme: str, place: str, path: str, options: dict[str, Any], *, cluster: bool
) -> Address:
    hosts = _hosts(url, place, DEFAULT_PORT)
    if db := path.strip("/"):
        options["db"] = _number(url, "db", db)
    if cluster and options.pop("db", 0):
        raise _wrong(url, "must leave out the database: a cluster has only database 0")
    if len(hosts) > 1 and not cluster:
        raise _wrong(url, "must name one host, or say redis+cluster:// or redis+sentinel://")
    return Address(
        CLUSTER if cluster else SINGLE,
        f"{scheme}://{place}",
        tls=scheme.startswith("rediss"),
        hosts=hosts,
        options=options,
    )


def without_password(url: str) -> str:
    """The URL for a message: user, password and secret options blanked."""
    place, mark, query = url.partition("?")
    if "@" in query.partition("=")[0]:  # the password had a question mark in it
        return f"{url.partition('://')[0]}://..."
    before, at, rest = place.rpartition("@")
    scheme, separator, _ = before.partition("://")
    kept = [part for part in query.split("&") if part.partition("=")[0] not in SECRET]
    start = f"{scheme}{separator}" if separator else "..." if at else ""
    return f"{start}{rest}{mark if any(kept) else ''}{'&'.join(kept)}"


def _wrong(url: str, way_out: str) -> InvalidJob:
    return InvalidJob("redis_url", without_password(url), way_out)


def _hosts(url: str, place: str, default_port: int) -> tuple[tuple[str, int], ...]:
    found = []
    for one in place.split(","):
        try:
            parts = urlsplit(f"//{one}")
            port = parts.port
        except ValueError as error:
            raise _wrong(url, f"must have a port from 1 to 65535 ({error})") from None
        found.append((unquote(parts.hostname or "localhost"), port or default_port))
    return tuple(found)


def _options(url: str, query: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, values in parse_qs(query, keep_blank_values=True).items():
        if name not in _NAMES:
            near = difflib.get_close_matches(name, _NAMES, n=1)
            hint = f", did you mean {near[0]}?" if near else f"; known are {sorted(_NAMES)}"
            raise _wrong(url, f"must not have the option {name!r}{hint}")
        options[name] = _value(url, name, values[-1])
    if options.pop("decode_responses", False):
        raise BrokerUnsupported(
            "a client with decode_responses cannot be used: jobs and events are bytes; "
            "leave decode_responses out"
        )
    return options


def _value(url: str, name: str, text: str) -> Any:
    if name in _NUMBERS:
        number = _number(url, name, text)
        if name in _ALLOWED and number not in _ALLOWED[name]:
            least, most = _ALLOWED[name][0], _ALLOWED[name][-1]
            raise _wrong(url, f"must have a {name} from {least} to {most}")
        return number
    if name == "client_name" and not (text.isascii() and text.isprintable() and " " not in text):
        raise _wrong(url, "must have a client_name without spaces and special characters")
    if name not in _FLAGS:
        return text
    if text.lower() not in (*_YES, *_NO):
        raise _wrong(url, f"must say true or false for {name}")
    return text.lower() in _YES


def _number(url: str, name: str, text: str) -> int:
    if not text.isdecimal():
        raise _wrong(url, f"must have a number for {name}")
    return int(text)


def _check_tls(url: str, options: Mapping[str, Any], *, tls: bool) -> None:
    asked = sorted(name for name in options if name.startswith("ssl_"))
    if asked and not tls:
        raise _wrong(url, f"must begin with rediss for {asked[0]} to mean anything")
    if options.get("ssl_cert_reqs", "required") not in ("required", "optional", "none"):
        raise _wrong(url, "must say required, optional or none for ssl_cert_reqs")
    for name in _TLS_FILES:
        if name in options and not Path(options[name]).is_file():
            raise _wrong(url, f"must name a file for {name}")
