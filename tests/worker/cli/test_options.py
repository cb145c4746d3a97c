"""Options that commands share look in a shell as if each command had declared them itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from tokenfleet.worker.commands.options import flat


@dataclass(frozen=True, slots=True)
class Place:
    city: Annotated[str, typer.Option(help="Where it is.")] = "Kyoto"
    street_number: Annotated[int, typer.Option(min=1)] = 1


def visit(name: str, place: Place = Place(city="Oslo"), twice: bool = False) -> None:
    typer.echo((name, place, twice))


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(flat(visit))
    return app


def test_a_command_gets_one_value_of_all_its_options(app: typer.Typer) -> None:
    done = CliRunner().invoke(app, ["Ada", "--street-number", "7", "--twice"])
    assert done.output.strip() == str(("Ada", Place("Oslo", 7), True))


def test_an_option_is_listed_with_its_text_and_judged_by_its_own_rule(app: typer.Typer) -> None:
    help_text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    assert "Where it is." in help_text
    assert "Oslo" in help_text, "the default is that of the command's own value"
    refused = CliRunner().invoke(app, ["Ada", "--street-number", "0"])
    assert refused.exit_code == 2


def test_a_command_without_shared_options_is_left_as_it_is() -> None:
    def plain(name: str) -> None: ...

    assert flat(plain) is plain
