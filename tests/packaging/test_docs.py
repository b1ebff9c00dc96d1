"""Links of the documentation lead somewhere."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
FEATURES = [source for source in SOURCES if "Figures:" in source.read_text("utf-8")]

LINK = re.compile(r"\]\(([^)\s]+)\)")
FIGURES = re.compile(r"Figures: (\S+?\.md)")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def links_of(page: Path) -> list[str]:
    """The targets of a page's links, code blocks left out."""
    lines = [line for line in page.read_text("utf-8").splitlines() if not line.startswith("    ")]
    return LINK.findall("\n".join(lines))


def anchors_of(page: Path) -> set[str]:
    """The anchors that a page's headings make: small letters, hyphens for spaces."""
    headings = re.findall(r"^#+ +(.*)$", page.read_text("utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def missing(paths: Iterable[Path]) -> list[str]:
    """The files that are not there, from the root on."""
    return [name_of(path) for path in paths if not path.exists()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_of_a_page_leads_to_a_file_and_a_heading(page: Path):
    links = [link.partition("#") for link in links_of(page) if "://" not in link]
    targets = [((page.parent / name).resolve() if name else page, at) for name, _, at in links]
    for path, anchor in targets:
        if anchor and path.exists():
            assert anchor in anchors_of(path), path
    assert missing(path for path, _ in targets) == []


@pytest.mark.parametrize("source", FEATURES, ids=name_of)
def test_the_page_with_the_figures_of_a_feature_is_there(source: Path):
    pages = FIGURES.findall(source.read_text("utf-8"))
    assert pages, "after `Figures: ` stands the path of a page"
    assert missing(ROOT / page for page in pages) == []
