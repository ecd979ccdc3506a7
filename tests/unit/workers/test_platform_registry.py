import sys
from pathlib import Path

import pytest

from rankwise.base.errors import ConfigError
from rankwise.workers import ChipWorker, load_platform, platform_names

MODULE = """
from rankwise.workers.platforms.host import HostDevice

class Mine:
    name = "mine"

    def __init__(self, option="plain"):
        self.option = option

    def open(self, device_id):
        return HostDevice(device_id + 100)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution that registers platforms, as pip would have put it there."""
    (tmp_path / "my_platforms.py").write_text(MODULE)
    metadata = tmp_path / "my_platforms-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-platforms\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[rankwise.platforms]\nmine = my_platforms:Mine\nbroken = no_such_module:Nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_platforms", raising=False)
    return tmp_path


def test_a_platform_of_another_package_is_found_by_its_entry_point(installed: Path) -> None:
    worker = ChipWorker()

    worker.init("mine:fast")
    worker.set_device(1)

    assert worker.platform == "mine"
    assert worker.device_id == 101
    assert platform_names() == ["broken", "host", "mine", "sim"]
    worker.finalize()


def test_what_stands_behind_the_colon_is_the_platforms_option(installed: Path) -> None:
    assert getattr(load_platform("mine:fast"), "option", None) == "fast"
    assert getattr(load_platform("mine"), "option", None) == "plain"


def test_a_platform_that_cannot_be_loaded_says_whose_it_is(installed: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'broken' of no_such_module:Nothing cannot be loaded: No module named"
    ):
        load_platform("broken")


def test_own_platforms_are_found_without_any_entry_point() -> None:
    assert load_platform("host").name == "host"
    assert load_platform("sim").name == "sim"


@pytest.mark.parametrize("name", ["sim:nowhere", "sim:no/such.yaml", "host:option", "nothing"])
def test_a_platform_that_cannot_be_made_is_an_error_of_a_tree_and_about_a_value(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_platform(name)

    assert isinstance(caught.value, RuntimeError)
