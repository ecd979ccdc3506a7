import subprocess
import sys

import pytest

pytestmark = pytest.mark.system


def imported_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter has after a statement."""
    source = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "from rankwise.workers import TaskArgs, DataType, ChipCallConfig; TaskArgs().add_scalar(1)",
        "from rankwise.workers import ChipCallable; ChipCallable.build([], 'f', print)",
        "from rankwise.workers import ChipBootstrapConfig; ChipBootstrapConfig().check()",
        "from rankwise.workers.wire import pack_task, unpack_task; unpack_task(pack_task(None))",
    ],
)
def test_values_do_without_numpy(statement: str) -> None:
    assert imported_by(statement).isdisjoint({"numpy", "torch", "cloudpickle"})


def test_a_chip_on_the_host_needs_neither_simulator_nor_torch() -> None:
    statement = (
        "from rankwise.workers import ChipWorker; w = ChipWorker(); w.init('host'); w.set_device(0)"
    )

    assert imported_by(statement).isdisjoint({"rankwise.sim", "torch", "greenlet"})
