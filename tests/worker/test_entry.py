"""The command says what to install instead of showing a traceback."""

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
