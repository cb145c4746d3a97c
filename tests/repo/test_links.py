"""No page leads into the void: what it links to is there, headings included."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIPPED = {".venv", "build", "node_modules", ".hypothesis", ".pytest_cache"}
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if SKIPPED.isdisjoint(path.relative_to(ROOT).parts) and path.is_file()
)


def prose(page: Path) -> str:
    """A page without its code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page: Path) -> set[str]:
    """What a heading is called in an address, as GitHub calls it."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_is_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        place, _, heading = target.partition("#")
        found = page if not place else (page.parent / place).resolve()
        assert found.exists(), target
        if heading:
            assert heading in anchors(found), target


def test_there_are_pages_to_look_at() -> None:
    assert len(PAGES) > 8
