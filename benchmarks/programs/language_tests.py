"""Triton's own language tests on the emulator: a plug-in for pytest, which tells what failed why.

    TRITON is a checkout of Triton:
    PYTHONPATH=benchmarks/programs TRITON_INTERPRET=1 python -m pytest --rankwise-triton \
        -p language_tests -m interpreter --device cpu -c /dev/null \
        TRITON/python/test/unit/language/test_core.py

What those tests import of Triton's insides is taken from their checkout, with the two names of the
compiler in it replaced. `TRITON_INTERPRET=1` is how they are told that there is no GPU.
"""

import importlib
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

_KINDS = (
    ("refused as Triton does, in other words than the test looks for",
     re.compile(r"Regex pattern did not match|^assert '.*' in |assert None$")),
    ("ask for a compiler's intermediate code", re.compile(r"KeyError: '(ttir|ttgir|llir|ptx)'")),
    ("accepted where Triton refuses", re.compile(r"DID NOT RAISE")),
    ("formats of eight bits that are refused", re.compile(r"float8e4b15|float8e4b8|float8e5b16")),
)  # fmt: skip


def pytest_load_initial_conftests(args: list[str]) -> None:
    """Offer what the tests import."""
    root, _, _ = next(each for each in args if "/python/test/" in each).partition("/test/")
    source = Path(root) / "triton/_internal_testing.py"
    tl: Any = importlib.import_module("triton.language")
    for name in ("float8e4b15", "float8e4b8", "float8e5b16"):
        setattr(tl, name, name)  # tests have them as parameters
    allocation = sys.modules["triton.runtime._allocation"] = ModuleType(
        "triton.runtime._allocation"
    )
    vars(allocation)["NullAllocator"] = object  # `set_allocator` looks at none
    helpers = sys.modules["triton._internal_testing"] = ModuleType("triton._internal_testing")
    text = source.read_text(encoding="utf-8")
    text = text.replace("tl.str_to_ty(type_canonicalisation_dict[x], None)", "tl.dtype(x)")
    exec(compile(text, str(source), "exec"), vars(helpers))
    knobs = sys.modules["triton.knobs"]
    vars(helpers)["_fresh_knobs_impl"] = lambda **_options: (lambda: knobs, lambda: None)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Count what failed by its reason, and show the rest."""
    kinds: Counter[str] = Counter()
    rest: Counter[tuple[str, str]] = Counter()
    for report in terminalreporter.stats.get("failed", []) + terminalreporter.stats.get(
        "error", []
    ):
        crash = getattr(report.longrepr, "reprcrash", None)
        words = f"{report.nodeid} {report.longrepr if crash is None else crash.message}"
        message = words.removeprefix(report.nodeid).strip()
        kind = next(
            (name for name, words_of in _KINDS if words_of.search(message) or words_of.search(report.nodeid)),
            "failed",
        )  # fmt: skip
        kinds[kind] += 1
        first = re.sub(r"0x[0-9a-f]+|\d+", "N", message.split("\n", maxsplit=1)[0])[:160]
        test = report.nodeid.rpartition("::")[2]
        rest[kind, f"{test.partition('[')[0]}: {first}"] += 1
    for kind, count in kinds.most_common():
        terminalreporter.write_line(f"{count} {kind}")
        for (of, words), number in rest.most_common():
            if of == kind:
                terminalreporter.write_line(f"    {number} {words}")
