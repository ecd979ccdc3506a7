"""Pages of the reference that are written by hand name what the code has."""

import re
from pathlib import Path

from rankwise.cli import run
from rankwise.drivers.real.stores import opening
from rankwise.launch.cluster import settings
from rankwise.launch.environment import VARIABLES_OF_RANKS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "settings.md").read_text()


def keys_under(heading: str) -> set[str]:
    """The names in the first two columns of the table under a heading, torch's spelling too."""
    section = PAGE.partition(f"\n### {heading}")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| (`.*)$", section, re.MULTILINE)
    rows += re.findall(r"^\| (\| `.*)$", section, re.MULTILINE)  # torch's word alone
    has_spelling = "torch's spelling" in section
    cells = [" ".join(row.split("|")[: 2 if has_spelling else 1]) for row in rows]
    return set(re.findall(r"`(\w+)`", " ".join(cells)))


def test_every_variable_of_rankwise_is_named_for_users_or_for_those_who_work_on_the_code() -> None:
    named = PAGE + (ROOT / "docs" / "development" / "architecture.md").read_text()
    read = {
        name
        for path in (ROOT / "src").rglob("*.py")
        for name in re.findall(r'"(RANKWISE_[A-Z_]+[A-Z])"', path.read_text())
    }

    assert read
    assert {name for name in read if f"`{name}`" not in named} == set()


def test_every_variable_that_a_rank_finds_is_named() -> None:
    assert {name for name in VARIABLES_OF_RANKS if f"`{name}`" not in PAGE} == set()


def test_the_settings_of_the_rendezvous_are_those_that_it_takes() -> None:
    spellings = {ours: theirs for theirs, ours in opening._SPELLINGS.items()}
    etcd = set(opening._ETCD_SETTINGS)

    assert keys_under("For nodes that meet") == {*settings._DURATIONS, *settings._KEEP_ALIVE}
    assert keys_under("`etcd`") == etcd | {spellings[key] for key in etcd & spellings.keys()}
    assert keys_under("`embedded`") == set(opening._EMBEDDED_SETTINGS)
    assert keys_under("`c10d`") == set(opening._C10D_SETTINGS)


def test_the_exit_codes_of_our_own_are_in_their_table() -> None:
    page = (ROOT / "docs" / "exit-codes.md").read_text()
    own = {value for name, value in vars(run).items() if name.startswith("EXIT_CODE_OF_")}

    assert own
    assert {code for code in own if f"\n| {code} | " not in page} == set()
