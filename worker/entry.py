"""The `tokenfleet` command: says what to install when the light client is all there is."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

_TOLD_TO_END = 128 + signal.SIGTERM


def main() -> None:
    """Run the command line; exit code 2 when a library it needs is not installed.

    `tokenfleet gateway` needs less than the others, and runs without their libraries.
    """
    if os.getpid() == 1:  # of a container: the kernel keeps from it what it has no handler for
        signal.signal(signal.SIGTERM, _end)
    try:
        from tokenfleet.worker.commands.cli import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tokenfleet"):
            raise
        if sys.argv[1:2] == ["gateway"]:
            _gateway(sys.argv[2:])
        sys.stderr.write(
            f"tokenfleet: the command line needs {error.name}, which is not installed; "
            "use: pip install 'tokenfleet[worker]'\n"
        )
        sys.exit(2)
    run()


def _end(_number: int, _frame: FrameType | None) -> None:
    """While libraries are loaded there is nothing to hand back."""
    os._exit(_TOLD_TO_END)


def _gateway(arguments: list[str]) -> NoReturn:
    from tokenfleet.producer.gateway.command import main as run

    run(arguments)


if __name__ == "__main__":
    main()
