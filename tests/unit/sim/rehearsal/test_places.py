"""Lines of a program that reports name."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from rankwise.base.errors import CollectiveError
from rankwise.core.matching import CallSignature
from rankwise.simranks.world import places
from rankwise.simranks.world.collective_groups import CollectiveGroup
from rankwise.simranks.world.modules import is_shared
from rankwise.simranks.world.places import is_in_import, place_here
from rankwise.simranks.world.scheduler import Scheduler

BARRIER = CallSignature("barrier")
WITHOUT_RANKS = Scheduler(own_state=SimpleNamespace())  # they are not asked


def test_a_place_has_the_line_of_its_call() -> None:
    first, line = place_here(), sys._getframe().f_lineno
    second = place_here()

    assert first is not None
    assert second is not None
    assert (first.line, second.line) == (line, line + 1)
    assert str(first) == f"{__file__}:{line} in test_a_place_has_the_line_of_its_call"


def test_ranks_that_call_the_same_on_one_line_are_told_together() -> None:
    group = CollectiveGroup(WITHOUT_RANKS, "default", (0, 1, 2))

    group.meet(0, BARRIER, None, print), group.meet(1, BARRIER, None, print)
    pending = group.meet(2, CallSignature("broadcast"), None, print)

    with pytest.raises(CollectiveError) as raised:
        group.wait(pending)
    assert "ranks 0-1 called barrier #1 at" in str(raised.value)
    assert "rank 2 called broadcast #1 at" in str(raised.value)


def test_import_of_a_library_is_known_by_its_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    library = tmp_path / "site-packages"
    library.mkdir()
    monkeypatch.setattr(
        places, "is_shared", lambda file: file.startswith(str(library)) or is_shared(file)
    )
    ask = "import sys\nsys.modules['asking'].ask(sys._getframe())\n"
    (library / "imported_library.py").write_text(ask)
    (tmp_path / "imported_module_of_user.py").write_text(ask)
    asking = ModuleType("asking")
    asking.ask = lambda frame: seen.append(is_in_import(frame))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "asking", asking)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(library))

    for name in ("imported_library", "imported_module_of_user"):
        import_module(name)
        monkeypatch.delitem(sys.modules, name)

    assert seen == [True, False]
    assert not is_in_import(sys._getframe())


@pytest.mark.parametrize(
    ("file", "owner"),
    [("/home/me/train.py", "user"), (places.__file__, "rankwise"), (pytest.__file__, "library")],
)
def test_owner_of_a_file_is_told_by_where_packages_are(file: str, owner: str) -> None:
    assert places.owner_of(file) == owner
