"""The documents are true to the tree: links lead somewhere, examples are those that are run."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ADDRESS = re.compile(r"https?://([\w.-]+)")
FOLDER_OF_SOMEBODY = re.compile(r"(?<![\w.>])/(?:root|work|Users)/\w")

HOSTS_FOR_READERS = {
    "archive.ics.uci.edu",
    "creativecommons.org",
    "doi.org",
    "json.schemastore.org",
    "keepachangelog.com",
    "localhost",
    "pytorch.org",
    "semver.org",
    "ui.perfetto.dev",
    "www.apache.org",
    "www.w3.org",
}


def tracked_files() -> Iterator[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("only a git checkout knows which files belong to it")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return (path for path in paths if path.is_file())


def documents() -> list[Path]:
    return sorted(path for path in tracked_files() if path.suffix == ".md")


def anchors(document: Path) -> set[str]:
    """The names that forges give to headings."""
    text = FENCED.sub("", document.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def test_every_relative_link_leads_somewhere() -> None:
    broken = []
    for document in documents():
        for target in LINK.findall(FENCED.sub("", document.read_text())):
            if target.startswith(("http:", "https:", "mailto:")):
                continue
            path, _, anchor = target.partition("#")
            found = (document.parent / path) if path else document
            if not found.exists() or (anchor and anchor not in anchors(found)):
                broken.append(f"{document.relative_to(ROOT)}: {target}")

    assert broken == []


def test_every_decision_is_listed_and_says_what_a_decision_must() -> None:
    folder = ROOT / "docs" / "adr"
    listed = set(LINK.findall((folder / "README.md").read_text()))
    pages = {path.name: path.read_text() for path in folder.glob("[0-9]*.md")}

    assert pages.keys() == listed
    for name, text in pages.items():
        assert text.startswith(f"# {name[:4]}: "), name
        for heading in ("Context", "Decision", "What follows"):
            assert f"\n## {heading}\n" in text, f"{name} has no heading '{heading}'"


def test_every_code_block_of_the_readme_is_run_as_part_of_the_tutorial() -> None:
    blocks = {
        block
        for block in FENCED.findall((ROOT / "README.md").read_text())
        if block[0] in ("python", "console")
    }

    assert blocks
    assert blocks <= set(FENCED.findall((ROOT / "docs" / "tutorial.md").read_text()))


def test_the_glossary_is_sorted_and_defines_each_word_once() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    words = [row.strip() for row in rows if row.strip("- ") and row != "word"]

    assert words
    assert words == sorted(set(words), key=str.lower)


def text_of(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError:  # pictures and arrays
        return ""


def test_no_file_knows_somebodys_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {place}"
        for path in tracked_files()
        for place in FOLDER_OF_SOMEBODY.findall(text_of(path))
    ]

    assert found == []


def test_only_addresses_for_readers_are_named_outside_of_tests() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {host}"
        for path in tracked_files()
        if not path.is_relative_to(ROOT / "tests")
        for host in ADDRESS.findall(text_of(path))
        if host not in HOSTS_FOR_READERS
    ]

    assert found == []


def test_every_make_target_has_a_line_of_help() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = set(re.findall(r"^\.PHONY: (\w+)$", makefile, re.MULTILINE))

    assert phony == set(re.findall(r"^([a-z-]+):.* ## \S", makefile, re.MULTILINE))
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(f"make {target} " in listed.stdout for target in phony)
