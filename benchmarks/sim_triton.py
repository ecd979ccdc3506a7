"""Emulated kernels of the field: ours beside Triton's own interpreter.

- **rankwise**: `rankwise.sim.triton`, programs in lockstep.
- **triton**: the same kernels under TRITON_INTERPRET=1, by the interpreter that --peer names, a
  Python that can import triton, torch and numpy. Without it, or where this Python cannot import
  triton, the peer is left out. One repetition: it takes seconds to minutes.

Every result is checked against numpy.
"""

import importlib.util
import json
import statistics
import subprocess
import sys

from measuring import PROGRAMS, Table, arguments, describe_machine, environment, seconds

CASES = {
    "add": "vector add, 1 Mi fp32",
    "softmax": "softmax, 1823 x 781 fp32",
    "matmul": "matmul, 512^3 fp16",
    "layer_norm": "layer norm, 1151 x 8192 fp16",
}


def sampled(python: str, language: str, case: str, repetitions: int, **added: str) -> float:
    """The median of the launches in one process, the first left out if there are several."""
    command = [python, str(PROGRAMS / "field_kernels.py"), language, case, str(repetitions)]
    done = subprocess.run(
        command, env=environment(**added), capture_output=True, check=False, timeout=600, text=True
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    times: list[float] = json.loads(done.stdout)
    return statistics.median(times[1:] or times)


def main() -> None:
    peer = sys.executable if importlib.util.find_spec("triton") else None
    if "--peer" in sys.argv:
        at = sys.argv.index("--peer")
        peer = sys.argv[at + 1]
        del sys.argv[at : at + 2]
    options = arguments(__doc__, repetitions=7)
    describe_machine()
    table = Table(
        "Kernels of the field", ["kernel", "rankwise", "triton", "times faster"], options.json
    )
    for case, title in CASES.items():
        ours = sampled(sys.executable, "rankwise.sim.triton", case, options.repetitions)
        theirs = None
        if peer is not None and not options.quick:
            theirs = sampled(peer, "triton", case, 1, TRITON_INTERPRET="1")
        faster = "-" if theirs is None else f"{theirs / ours:.0f}"
        table.row(title, seconds(ours), seconds(theirs), faster)


if __name__ == "__main__":
    main()
