"""Runs `tokenfleet` commands as processes of their own that need not import everything anew.

Started as a script with a socket as its standard input. Each message is a command line and an
environment, with the three standard streams of the command; the answer is its number and exit code.

Invariant: a command runs in a fork of a process that has run none.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
from typing import Any

MESSAGE_BYTES = 1 << 20


def serve(line: socket.socket) -> dict[str, Any] | None:
    """Fork for each command. In a fork: what it is to run; in the end: None."""
    while True:
        message, streams, _, _ = socket.recv_fds(line, MESSAGE_BYTES, 3)
        if not message:
            return None
        asked = dict(json.loads(message))
        child = os.fork()
        if child == 0:
            line.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            return asked
        for stream in streams:
            os.close(stream)
        _, status = os.waitpid(child, 0)
        line.send(f"{asked['number']} {os.waitstatus_to_exitcode(status)}".encode())


def main() -> None:
    """The command's own exit, as if it had been called by a shell."""
    for name in ("admin", "cli", "doctor", "job_view", "tables"):  # and what they import in turn
        importlib.import_module(f"tokenfleet.worker.commands.{name}")
    wanted = serve(socket.socket(fileno=os.dup(0)))
    if wanted is None:
        return
    os.environ.clear()
    os.environ.update(wanted["environment"])
    sys.argv = ["tokenfleet", *wanted["arguments"]]
    sys.modules["tokenfleet.worker.commands.cli"].main()


if __name__ == "__main__":
    main()
