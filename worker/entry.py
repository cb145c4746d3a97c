"""The `tokenfleet` command: says what to install when the light client is all there is."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; exit code 2 when a library it needs is not installed."""
    try:
        from tokenfleet.worker.commands.cli import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tokenfleet"):
            raise
        sys.stderr.write(
            f"tokenfleet: the command line needs {error.name}, which is not installed; "
            "use: pip install 'tokenfleet[worker]'\n"
        )
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
