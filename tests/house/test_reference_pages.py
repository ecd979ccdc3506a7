"""The tables behind generated reference pages have what the code reads and returns."""

import re
from pathlib import Path

import pytest

from rankwise.base.errors import ConfigError
from rankwise.cli import exit_codes
from rankwise.cli.variables import VARIABLES
from rankwise.drivers.real.stores.opening import open_store
from rankwise.launch.cluster.settings import TIMING_SETTINGS, split_settings

ROOT = Path(__file__).parents[2]


def test_every_variable_of_rankwise_is_documented_for_users_or_for_developers() -> None:
    for_developers = (ROOT / "docs" / "development" / "architecture.md").read_text()
    read = {
        name
        for folder in ("src", "tools")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r'"(RANKWISE_[A-Z_]+[A-Z])"', path.read_text())
        if path.name != "variables.py"
    }

    assert set(VARIABLES) <= read
    assert {name for name in read - set(VARIABLES) if f"`{name}`" not in for_developers} == set()


def test_every_documented_time_is_taken_by_the_rendezvous_under_both_spellings() -> None:
    spellings = {
        name
        for setting in TIMING_SETTINGS.values()
        for name in re.findall(r"`(\w+)`", setting.torch_spelling)
    }

    for name in (*TIMING_SETTINGS, *spellings):
        assert split_settings({name: "20"}).store == {}, name
    assert split_settings({"unknown": "20"}).store == {"unknown": "20"}


@pytest.mark.parametrize("backend", ["etcd", "embedded", "c10d"])
def test_undocumented_setting_of_a_store_is_refused(backend: str) -> None:
    with pytest.raises(ConfigError, match=f"the backend {backend} has no setting colour"):
        open_store(backend, "127.0.0.1:1", {"colour": "red"}, run_id="x")


def test_every_exit_code_of_our_own_is_documented() -> None:
    own = {value for name, value in vars(exit_codes).items() if name.startswith("EXIT_CODE_OF_")}

    assert own == {2, 75, 77, 124}
    assert {str(code) for code in own} <= exit_codes.EXIT_CODES_OF_RUN.keys()
