"""Importing torch's names from rankwise costs little, and never torch."""

import subprocess
import sys
from pathlib import Path

import pytest

import rankwise.compat.torch

MODULES = sorted(
    {
        ".".join(path.relative_to(Path(rankwise.compat.torch.__path__[0])).with_suffix("").parts)
        for path in Path(rankwise.compat.torch.__path__[0]).rglob("*.py")
        if path.name != "__init__.py"
    }
)


def modules_loaded_by(statement: str) -> set[str]:
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    finished = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return set(finished.stdout.split())


def test_no_module_imports_torch_or_anything_else_that_is_large() -> None:
    statement = "".join(f"import rankwise.compat.torch.{module}\n" for module in MODULES)

    loaded = modules_loaded_by(statement)

    assert len(MODULES) > 50
    assert loaded.isdisjoint({"torch", "numpy", "rich", "asyncio", "cloudpickle", "click"})


def test_record_loads_nothing_of_the_launcher() -> None:
    # Every worker of every job pays for it.
    loaded = modules_loaded_by(
        "from rankwise.compat.torch.elastic.multiprocessing.errors import record"
    )

    assert loaded.isdisjoint({"socket", "dataclasses", "msgspec", "subprocess"})
    assert not any(name.startswith(("rankwise.launch", "rankwise.drivers")) for name in loaded)


@pytest.mark.parametrize(
    "package",
    [
        "elastic.agent.server",
        "elastic.events",
        "elastic.metrics",
        "elastic.multiprocessing",
        "elastic.multiprocessing.errors",
        "elastic.multiprocessing.subprocess_handler",
        "elastic.rendezvous",
        "elastic.rendezvous.etcd_server",
        "elastic.utils",
        "launch",
        "launcher",
        "numa.binding",
        "run",
    ],
)
def test_every_public_name_of_a_package_can_be_imported(package: str) -> None:
    loaded = modules_loaded_by(
        f"from rankwise.compat.torch.{package} import *\n"
        f"import rankwise.compat.torch.{package} as package\n"
        "assert all(hasattr(package, name) for name in package.__all__)\n"
        "assert not hasattr(package, 'no_such_name')"
    )

    assert f"rankwise.compat.torch.{package}" in loaded
