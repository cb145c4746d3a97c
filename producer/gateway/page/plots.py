"""Plots as inline SVG: lines over the last minutes, scaled by the page, with labels as HTML.

Invariant: a sample that is missing leaves a gap; nothing is drawn that was not seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 1000, 100
"""Units of the drawing; the page stretches it."""
GAP_S = 15.0
"""Samples further apart than this are not joined."""

Points = Sequence[tuple[float, float]]
"""Seconds ago and value, oldest first."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line."""

    name: str
    style: str
    """CSS class: one or two."""
    points: Points
    filled: bool = False


def plot(title: str, unit: str, series: Sequence[Series], span_s: float) -> str:
    """A figure with its title, a key where there are several lines, and both axes."""
    top = ceiling(max((value for one in series for _, value in one.points), default=0.0))
    lines = "".join(_line(one, span_s, top) for one in series)
    grid = "".join(
        f'<line class="grid" x1="0" x2="{WIDTH}" y1="{y}" y2="{y}"/>' for y in (0, 50, HEIGHT)
    )
    y_axis = "".join(f"<span>{short(value)}</span>" for value in (top, top / 2, 0))
    x_axis = "".join(f"<span>{label}</span>" for label in _times(span_s))
    key = "" if len(series) < 2 else _key(series)
    return (
        f'<figure><div class="head"><h2>{escape(title)}</h2><span class="key">{key}</span></div>'
        f'<div class="plot"><div class="y" aria-hidden="true">{y_axis}</div>'
        f'<svg role="img" aria-label="{escape(_spoken(title, unit, series, span_s))}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">{grid}{lines}</svg>'
        f'<div class="x" aria-hidden="true">{x_axis}</div></div></figure>'
    )


def ceiling(most: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... that is not below `most`; halves read well."""
    if most <= 2:
        return 2.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= most)


def short(value: float) -> str:
    """A number for an axis: 1500 -> 1.5k."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _line(one: Series, span_s: float, top: float) -> str:
    drawn = []
    for run in _runs(one.points, span_s):
        spots = [
            f"{WIDTH * (1 - ago / span_s):.1f},{HEIGHT * (1 - value / top):.1f}"
            for ago, value in run
        ]
        path = "M" + "L".join(spots if len(spots) > 1 else spots * 2)
        if one.filled:
            left, right = spots[0].split(",")[0], spots[-1].split(",")[0]
            drawn.append(f'<path class="area" d="{path}L{right},{HEIGHT}L{left},{HEIGHT}Z"/>')
        drawn.append(f'<path class="line {one.style}" d="{path}"/>')
    return "".join(drawn)


def _runs(points: Points, span_s: float) -> Iterable[list[tuple[float, float]]]:
    """Points without a gap between them."""
    run: list[tuple[float, float]] = []
    for ago, value in points:
        if ago > span_s:
            continue
        if run and run[-1][0] - ago > GAP_S:
            yield run
            run = []
        run.append((ago, value))
    if run:
        yield run


def _times(span_s: float) -> tuple[str, ...]:
    return (_ago(span_s), _ago(span_s / 2), "now")


def _ago(seconds: float) -> str:
    if seconds >= 120 and seconds % 60 == 0:
        return f"{seconds / 60:g} min ago"
    return f"{seconds:g} s ago"


def _key(series: Sequence[Series]) -> str:
    return "".join(f'<i class="{one.style}"></i>{escape(one.name)}' for one in series)


def _spoken(title: str, unit: str, series: Sequence[Series], span_s: float) -> str:
    """What the picture says, in words."""
    parts = []
    for one in series:
        values = [value for ago, value in one.points if ago <= span_s]
        now, most = (values[-1], max(values)) if values else (0.0, 0.0)
        parts.append(f"{one.name} {now:g} {unit} now, at most {most:g}")
    return f"{title} over the last {span_s / 60:g} minutes: {'; '.join(parts)}"
