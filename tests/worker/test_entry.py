"""The command says what to install instead of showing a traceback."""

import signal
import subprocess
import sys

import pytest

from tokenfleet.worker import entry


def test_a_light_client_is_told_what_the_command_line_needs(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    for name in [name for name in sys.modules if name.startswith("tokenfleet.worker.commands")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 2
    assert "tokenfleet[worker]" in capsys.readouterr().err


_AS_PID_1 = """
import os, signal, sys, types
os.getpid = lambda: 1
{before}
cli = types.ModuleType("cli")
cli.main = lambda: (print("loading", flush=True), signal.pause())
sys.modules["tokenfleet.worker.commands.cli"] = cli
from tokenfleet.worker import entry
entry.main()
"""


def test_the_first_process_of_a_container_ends_when_told_to_while_it_still_loads():
    """The kernel gives such a process no signal that it has no handler for."""
    as_the_kernel = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    command = [sys.executable, "-c", _AS_PID_1.format(before=as_the_kernel)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"loading\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
