"""`recorded_program.py script|module NAME ARGS…`: run a program, and record what it does.

`rankwise diff` runs a program in this way twice, on simulated ranks and on processes.
"""

import random
import sys
from typing import Any

from rankwise.drivers.real.worker import bootstrap
from rankwise.simranks.world.modules import UserModules
from rankwise.simranks.world.process_patches import seeds_of
from rankwise.simranks.world.rank_events import begin_recording, note_globals, note_slow_imports
from rankwise.simranks.world.world import running_rank


def main(kind: str, name: str, *args: str) -> None:
    """Run the program as `__main__`, and record what it does; raises what it raises."""
    recorder = begin_recording()
    is_simulated = running_rank() is not None
    if not is_simulated:
        _act_as_simulated(recorder.rank)
    del sys.path[0]  # the folder of this file; a script brings its own
    try:
        bootstrap.run((kind, name, list(args)), {}, bootstrap.Reporter(None))
    except SystemExit as ending:
        if ending.code:
            raise
    note_globals(recorder, vars(sys.modules["__main__"]), _readers())
    recorder.close()
    if is_simulated and recorder.rank == 0:
        note_slow_imports(recorder.folder, sys.modules)


def _readers() -> list[Any]:
    readers: list[Any] = []
    if "torch" in sys.modules:
        from rankwise.simranks.torch.torch_events import parts_of_value  # noqa: PLC0415  # only then

        readers.append(parts_of_value)
    if "numpy" in sys.modules:
        from rankwise.collectives.recorded import part_of_array  # noqa: PLC0415  # only then

        readers.append(part_of_array)
    return readers


def _act_as_simulated(rank: int) -> None:
    """Begin as a simulated rank does: with its random states, and watched."""
    seed, numpy_seed, torch_seed = seeds_of(rank)
    random.seed(seed)

    def follow_numpy() -> None:
        sys.modules["numpy.random"].seed(numpy_seed)

    def follow_torch() -> None:
        from rankwise.simranks.torch.torch_events import install_in_process  # noqa: PLC0415  # only then

        install_in_process()
        sys.modules["torch"].manual_seed(torch_seed)

    after = {"numpy.random": follow_numpy, "torch": follow_torch}
    UserModules(_nothing, after).install()
    for name, follow in after.items():
        if name in sys.modules:
            follow()


def _nothing(_name: str) -> None:
    """Modules of the user's are imported as ever."""


if __name__ == "__main__":
    # Running the program makes this module's names `__main__`'s no more.
    from rankwise.collectives.recorded_program import main as _main

    _main(*sys.argv[1:])
