"""What an answer of Redis means that is an error: of the call, of the server for now, or of us.

Invariant: what is not known to pass is not tried again.
"""

from __future__ import annotations

import re

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    ClusterError,
    ConnectionError,
    InvalidResponse,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    TimeoutError,
)

from tokenfleet.producer.errors import BrokerUnavailable, BrokerUnsupported

_PASSING = (
    *(ConnectionError, TimeoutError, ReadOnlyError, OSError),
    *(ClusterDownError, ClusterError, RedisClusterException),
)
_DENIED = ("The user executing the script can't", "ACL failure in script")
"""How Redis and Valkey say that an ACL forbids what a script does."""
_UNUSABLE = ("DB index is out of range", "unknown command")
"""How a server says that it is not one that can be used: a sentinel URL that leads to none, say."""
SERVER_WIDE = (
    *("MISCONF", "NOREPLICAS", "MASTERDOWN", "BUSY ", "CLUSTERDOWN", "TRYAGAIN"),
    "Attempted to access a non local key",  # a script's, whose slot is on its way to another server
    "Script attempted to access a non local key",
)
"""Replies that say something about the server for now, and nothing about what was asked."""
_ASKS_WHO = ("HELLO must be called with the client already", "Authentication required")
"""How a server answers who has said no name and no password."""
_CLIENT_SHOWN = re.compile(r"<redis\.asyncio\.client\.Redis\(.*?\)>\)>\)> - ", re.DOTALL)
"""A client as redis-py prints it into its errors, all of its settings included."""
REFUSALS = (AuthenticationError, AuthorizationError, NoPermissionError)


def refusal(error: Exception) -> BrokerUnsupported:
    """What a server's answer means that does not know us, or does not let us do it."""
    if any(words in str(error) for words in _ASKS_WHO):
        return BrokerUnsupported(
            "Redis asks for a user and a password, and none was given; "
            "they belong into its URL: redis://USER:PASSWORD@HOST:PORT/0"
        )
    if isinstance(error, NoPermissionError):
        return BrokerUnsupported(
            f"Redis refuses: {error}; `tokenfleet acl` prints the rights that each role needs"
        )
    return BrokerUnsupported(f"Redis refuses: {error}")


def says_of_server(error: Exception) -> bool:
    """Whether a reply says something about the server for now, and nothing about what was asked."""
    return str(error).startswith(SERVER_WIDE)


def said(error: Exception) -> str:
    """An error's words, without what redis-py prints of its settings."""
    return _CLIENT_SHOWN.sub("", str(error)) or type(error).__name__


def meaning_of(error: Exception, server: str, doubt: str) -> Exception | None:
    """What is to be raised for an error; None where the same call may succeed a moment later.

    Args:
        error: as it came from redis-py; returned itself where it is about the call.
        server: its address for messages.
        doubt: what may be wrong where something else than Redis answers.
    """
    if isinstance(error, REFUSALS):
        return refusal(error)
    if isinstance(error, OutOfMemoryError):
        return BrokerUnavailable(f"Redis is out of memory: {error}")
    if isinstance(error, _PASSING):
        if "CERTIFICATE_VERIFY_FAILED" not in str(error):
            return None
        return BrokerUnsupported(
            f"{server} shows a certificate that is not trusted ({error}); "
            "give the CA's file: ?ssl_ca_certs=/path/to/ca.pem"
        )
    if isinstance(error, InvalidResponse):
        return BrokerUnsupported(f"what answers is no Redis ({server}: {error}); {doubt}")
    if any(words in str(error) for words in _UNUSABLE):
        return BrokerUnsupported(f"{server} cannot be used: {error}; is the address right?")
    if any(words in str(error) for words in _DENIED):
        return BrokerUnsupported(
            f"Redis refuses a script: {error}; `tokenfleet acl` prints the rights it needs"
        )
    return None if says_of_server(error) else error
