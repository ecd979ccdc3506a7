"""The documents are true to the tree: links lead somewhere, examples are those that are run."""

import re
import runpy
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = re.compile(r"^```(?:python|console)\n.*?^```$", re.MULTILINE | re.DOTALL)
FOR_DEVELOPERS = re.compile(
    r"\b(?:tools|tests|benchmarks|src)/|`make \w+|\b(?:the|our) tests\b|developers|change rankwise"
)
PICTURE = re.compile(r"^!\[", re.MULTILINE)
TRANSCRIPT = re.compile(r"^```(?:console|text)\n(\$ .*?)^```$", re.MULTILINE | re.DOTALL)
CHARACTERS_OF_A_LINE = 80
LINES_OF_TWO_SCREENS = 90
MARKDOWN_LINE_MAX = 120
TABLE_LINE_MAX = 450  # a row cannot be wrapped; beyond this it is prose, which a list holds better
ADDRESS = re.compile(r"https?://([\w.-]+)")
FOLDER_OF_SOMEBODY = re.compile(r"(?<![\w.>])/(?:root|work|Users)/\w")

PARTS_WITHOUT_HOW_TOS = {"Start", "Reference", "Development"}

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


def test_the_figures_of_the_readme_are_those_of_the_page_on_performance() -> None:
    rows = re.findall(
        r"^\| .+ \| (\d.*|never) \| (\d.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    measured = (ROOT / "docs" / "performance.md").read_text()

    assert len(rows) == 5
    assert [row for row in rows for figure in row if f" {figure} |" not in measured] == []


def test_the_readme_and_the_home_page_are_short_in_both_directions() -> None:
    readme, home = (
        (ROOT / name).read_text().splitlines() for name in ("README.md", "docs/index.md")
    )

    assert len(readme) < 90
    assert [line for line in [*readme, *home] if len(line) > MARKDOWN_LINE_MAX] == []


def lines_too_long(document: Path) -> Iterator[int]:
    """The numbers of lines of prose beyond the limit; tables and examples may be wider."""
    is_example = False
    for number, line in enumerate(document.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_example = not is_example
        elif not is_example and not line.lstrip().startswith("|") and len(line) > MARKDOWN_LINE_MAX:
            yield number


def test_lines_of_documents_are_short() -> None:
    found = [
        f"{document.relative_to(ROOT)}:{number}"
        for document in documents()
        for number in lines_too_long(document)
    ]

    assert found == []


def test_rows_of_tables_hold_no_prose() -> None:
    found = [
        f"{document.relative_to(ROOT)}:{number}"
        for document in documents()
        for number, line in enumerate(document.read_text().splitlines(), 1)
        if line.startswith("|") and len(line) > TABLE_LINE_MAX
    ]

    assert found == []


def test_long_line_of_prose_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("\n".join(["x" * 121, f"| {'x' * 121} |", "```", "x" * 121, "```"]))

    assert list(lines_too_long(page)) == [1]


def test_the_home_page_shows_what_the_readme_shows() -> None:
    readme, home = ((ROOT / name).read_text() for name in ("README.md", "docs/index.md"))
    figures = re.findall(r"^\| .+ \| [\d.]+ .+ \|$", readme, re.MULTILINE)

    assert figures
    assert set(figures) <= set(home.splitlines())
    assert set(RUN.findall(readme)) <= set(RUN.findall(home))
    assert set(re.findall(r"images/\w+\.svg", readme)) <= set(re.findall(r"images/\w+\.svg", home))
    assert re.search(r"^pip install \.$", home, re.MULTILINE)
    assert len(re.findall(r"^- \*\*\[", home, re.MULTILINE)) == 6


def test_every_picture_has_an_alternative_text() -> None:
    without = {
        str(document.relative_to(ROOT)): pictures
        for document in documents()
        if (pictures := re.findall(r"!\[\s*\]\([^)]*\)|<img\b", document.read_text()))
    }

    assert without == {}


def opening(page: str) -> str:
    """What a reader sees of a page before the first example, table or second heading."""
    text = re.sub(r"<!--.*?-->", "", page, flags=re.DOTALL)
    return re.split(r"^(?:```|\||##)", text, maxsplit=1, flags=re.MULTILINE)[0]


def test_no_page_for_users_begins_with_words_for_developers() -> None:
    docs = ROOT / "docs"
    pages = [page for page in docs.rglob("*.md") if page.parent.name != "adr"]
    found = {
        page.relative_to(docs).as_posix(): words
        for page in pages
        if page.parent.name != "development"
        if (words := FOR_DEVELOPERS.findall(opening(page.read_text())))
    }

    assert len(pages) > 50
    assert found == {}


def words_of(glossary: str) -> list[str]:
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / glossary).read_text(), re.MULTILINE)
    return [row.strip() for row in rows if row.strip("- ") and row != "word"]


def test_the_glossaries_are_sorted_and_define_each_word_once() -> None:
    for_users, for_the_code = words_of("glossary.md"), words_of("development/glossary-code.md")

    assert for_users
    assert for_the_code
    assert for_users == sorted(set(for_users), key=str.lower)
    assert for_the_code == sorted(set(for_the_code), key=str.lower)
    assert set(for_users) & set(for_the_code) == set()


def test_the_tour_of_the_code_names_what_is_there() -> None:
    text = FENCED.sub("", (ROOT / "docs" / "development" / "tour.md").read_text())
    named = set(re.findall(r"`([^`]+)`", text))
    source = "\n".join(path.read_text() for path in (ROOT / "src" / "rankwise").rglob("*.py"))
    places = {name for name in named if "/" in name}
    words = {name for name in named if re.fullmatch(r"[A-Z]\w+|[a-z]+_\w+", name)}

    assert len(places) > 20
    assert len(words) > 15
    assert {
        place
        for place in places
        if not (ROOT / place).exists() and not (ROOT / "src" / "rankwise" / place).exists()
    } == set()
    assert {word for word in words if not re.search(rf"\b{word}\b", source)} == set()


def test_the_recipes_for_contributors_name_what_is_there() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    recipes = page.partition("## Where would I go")[2].partition("\n## ")[0]
    paths = set(re.findall(r"`((?:\w+/)+[\w.]+\.\w+)`", recipes))
    places = (ROOT / "src" / "rankwise", ROOT)

    missing = {path for path in paths if not any((place / path).exists() for place in places)}
    assert len(paths) > 20
    assert {path for path in missing if "/NAME." not in path} == set()


def test_modules_that_the_code_names_are_there() -> None:
    modules = [path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*.py")]
    of_users = {"conftest.py", "torch_train.py", "train.py"}
    named = {
        (module, name)
        for module in modules
        for name in re.findall(r"`((?:\w+/)*\w+\.py)`", (ROOT / module).read_text())
        if name not in of_users
    }

    assert len(named) > 30
    assert {
        (module, name)
        for module, name in named
        if not any(path.endswith(f"/{name}") for path in modules)
    } == set()


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
    phony = set(re.findall(r"^\.PHONY: ([\w-]+)$", makefile, re.MULTILINE))

    assert phony == set(re.findall(r"^([a-z-]+):.* ## \S", makefile, re.MULTILINE))
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(f"make {target} " in listed.stdout for target in phony)


def test_every_page_has_a_place_on_the_site() -> None:
    placed = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    docs = ROOT / "docs"
    pages = {str(path.relative_to(docs)) for path in documents() if path.is_relative_to(docs)}

    assert placed == {page for page in pages if not re.match(r"adr/\d", page)}


def pages_below(entry: Any) -> Iterator[str]:
    """The pages of a part of the site's navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from pages_below(part)


def lines_before_the_first_result(page: str) -> int:
    """As a browser breaks them; a result is a picture, or what a command prints."""
    found = [picture.start() for picture in PICTURE.finditer(page)]
    for block in TRANSCRIPT.finditer(page):
        printed = [line for line in block[1].splitlines() if not line.startswith("$ ")]
        found += [block.start(1) + block[1].index(printed[0])] if printed else []
    before = page[: min(found)] if found else pytest.fail(f"shows no result: {page[:60]}")
    return sum(1 + len(line) // CHARACTERS_OF_A_LINE for line in before.splitlines())


def test_every_how_to_page_shows_a_result_within_two_screens() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.SafeLoader)
    parts = {name: pages for part in site["nav"] for name, pages in part.items()}
    before = {
        page: lines_before_the_first_result((ROOT / "docs" / page).read_text())
        for name, pages in parts.items()
        if name not in PARTS_WITHOUT_HOW_TOS
        for page in pages_below(pages)
    }

    assert len(before) > 20
    assert {page: lines for page, lines in before.items() if lines > LINES_OF_TWO_SCREENS} == {}


def test_a_package_index_shows_the_readme_without_links_that_lead_nowhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (change,) = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]
    shown = re.sub(change["pattern"], change["replacement"], (ROOT / "README.md").read_text())

    assert LINK.findall((ROOT / "README.md").read_text())
    assert LINK.findall(shown) == []
    assert "four failures, no reason" in shown


def test_links_that_leave_the_site_become_paths_in_a_checkout() -> None:
    rewrite = runpy.run_path(str(ROOT / "tools" / "site_links.py"))["on_page_markdown"]
    page = SimpleNamespace(file=SimpleNamespace(src_uri="sim/kernels.md"))

    text = rewrite("[a](../../README.md#b) [c](../cli.md) [d](#e) ![f](x.svg)", page=page)
    named = rewrite("[pod.py](../../examples/pod.py)", page=page)

    assert text == "a (`README.md` in a checkout) [c](../cli.md) [d](#e) ![f](x.svg)"
    assert named == "`examples/pod.py` (in a checkout)"


def test_the_sites_colours_follow_the_system_until_a_visitor_chooses() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.SafeLoader)
    states = [(state["media"], state.get("scheme")) for state in site["theme"]["palette"]]

    assert states == [
        ("(prefers-color-scheme)", None),
        ("(prefers-color-scheme: light)", "default"),
        ("(prefers-color-scheme: dark)", "slate"),
    ]
