"""Tables on a terminal and in a pipe.

Invariant: no value is ever cut, and none is read as markup: what is shown can be copied.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tokenfleet.worker.commands import base

GAP = 2
READABLE = 16
"""Columns of a cell whose text goes on in the next line."""
PIPE_WIDTH = 10_000
"""A pipe has no width: a line there is as long as it has to be."""


class Screen(Console):
    """A console whose reader may go; the library's own would end the process with exit code 1."""

    def on_broken_pipe(self) -> None:
        """See Console."""
        base.reader_gone()


def console() -> Console:
    """Standard output."""
    found = Screen()
    return found if found.is_terminal else Screen(width=PIPE_WIDTH)


def table_of(titles: Sequence[str], *, right: Collection[str] = ()) -> Table:
    """A table without rows. Long values go on in the next line of their cell.

    Args:
        right: titles of columns of numbers.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, GAP, 0, 0))
    for title in titles:
        table.add_column(title, justify="right" if title in right else "left", overflow="fold")
    return table


@dataclass(frozen=True, slots=True)
class Rows:
    """A table as wide as its longest values; where there is no room for it, row below row with the
    title before each value.

    Args:
        right: titles of columns of numbers.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[Text]]
    right: Collection[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """See rich."""
        table = table_of(self.titles, right=self.right)
        for row in self.rows:
            table.add_row(*row)
        room = options.update(width=PIPE_WIDTH)
        if Measurement.get(console, room, table).maximum <= options.max_width:
            yield table
            return
        for first, *others in self.rows:
            yield first
            cells = (
                Text(f"{title} " if title else "") + cell
                for title, cell in zip(self.titles[1:], others)
            )
            yield Padding(
                Columns((cell for cell in cells if cell.plain.strip()), padding=(0, GAP)),
                (0, 0, 0, GAP),
            )


def print_table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], *, whole: Collection[str] = ()
) -> None:
    """The rows as a table, or one below the other where a table would be too narrow to read.

    Args:
        whole: titles of columns whose values are copied, and stay on one line.
    """
    screen = console()
    table = table_of(titles)
    for column in table.columns:
        column.no_wrap = column.header in whole
    for row in rows:
        table.add_row(*map(Text, row))
    if _fits(titles, rows, whole, screen.width):
        screen.print(table)
        return
    wide = max(map(len, titles))
    for row in rows:
        for title, value in zip(titles, row, strict=True):
            if value:
                screen.print(Text(f"{title:{wide}}  {value}"), soft_wrap=True)
        screen.print()


def _fits(
    titles: Sequence[str], rows: Sequence[Sequence[str]], whole: Collection[str], width: int
) -> bool:
    """Whether each column gets the width of its longest value, or enough of it to be read."""
    needed = 0
    for title, values in zip(titles, zip(*rows, strict=True), strict=True):
        longest = max(map(cell_len, (title, *values)))
        needed += GAP + (longest if title in whole else min(longest, READABLE))
    return needed <= width
