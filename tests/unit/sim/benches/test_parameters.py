"""What programs can be given from outside: read by type, refused before anything runs."""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

from rankwise.base.errors import ConfigError, RankwiseError
from rankwise.sim.benches import NAMES
from rankwise.sim.benches.parameters import Parameters, Size
from rankwise.sim.benches.programs import program_from_file, shipped_program
from rankwise.sim.benches.session import BenchSession, BenchSettings, simulate


def parameters_of_the_benches() -> list[tuple[str, str]]:
    pairs = [(name, each) for name in NAMES for each in shipped_program(name).parameters.names]
    return [pair for pair in pairs if pair[1] not in {"only", "seed"}]  # any text, any number


@pytest.mark.parametrize(("bench", "parameter"), parameters_of_the_benches())
@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", "", "nan", "9" * 30])
def test_a_bench_refuses_a_value_in_one_line(bench: str, parameter: str, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        BenchSession(BenchSettings(program=bench, fields={parameter: text}))

    assert f"parameter {parameter} of {bench} is {text!r}, expected " in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("bench", "field", "message"),
    [
        ("gemm", "m=0", "parameter m of gemm is '0', expected a whole number from 1 to 2147483648"),
        (
            "gemm",
            "tile=48",
            "parameter tile of gemm is '48', expected one of auto, 16, 32, 64, 128, 256, 512",
        ),
        ("gemm", "dtype=f64", "dtype of gemm is 'f64', expected one of f16, bf16, f32"),
        ("tp_mlp", "seed=1.5", "parameter seed of tp_mlp is '1.5', expected a whole number"),
        ("gemm", "dtyp=f16", r"gemm has no parameter 'dtyp' \(did you mean dtype\?\)"),
        ("softmax", "dtype=i32", "dtype of softmax is 'i32'"),
        ("ccl_allreduce", "elements=-5", "elements of ccl_allreduce is '-5', expected a whole"),
        ("all_collectives", "only=xx", "no shipped algorithm has 'xx' in its name"),
        ("tp_mlp", "inner=6", "inner of 6 cannot be cut into 4 equal parts"),
        (
            "tp_mlp",
            "hidden=2147483648",
            "tp_mlp needs .* of memory on each device, which has 16 GiB",
        ),
        ("gemm", "m=2147483648", "memory"),
    ],
)
def test_what_a_bench_cannot_do_is_told_in_one_line(bench: str, field: str, message: str) -> None:
    name, _, text = field.partition("=")

    with pytest.raises(RankwiseError, match=message) as caught:
        simulate(BenchSettings(program=bench, fields={name: text}))

    assert "\n" not in str(caught.value)


def test_texts_are_read_as_annotations_say() -> None:
    def run(  # type: ignore[no-untyped-def]  # noqa: PLR0917  # as users write
        torch: Any,
        size: Size = 3,
        mode: Literal["fast", 8] = 8,
        rate: float = 1.0,
        loud: bool = False,
        name: str = "x",
        top: int | None = None,
        plain=2,  # noqa: ANN001
        free=None,  # noqa: ANN001
    ) -> None: ...

    texts = {
        "size": "5", "mode": "8", "rate": "2", "loud": "yes", "name": "7", "top": "9",
        "plain": "4", "free": "2.5",
    }  # fmt: skip

    assert Parameters("mine", run).read(texts) == {
        "size": 5, "mode": 8, "rate": 2.0, "loud": True, "name": "7", "top": 9, "plain": 4,
        "free": 2.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("loud", "perhaps", "true or false"),
        ("rate", "fast", "a number"),
        ("size", "0", "a whole number from 1 to 5"),
        ("top", "x", "a whole number"),
        ("many", "x", "a whole number"),
    ],
)
def test_a_refusal_says_what_was_expected(name: str, text: str, expected: str) -> None:
    def run(  # type: ignore[no-untyped-def]  # noqa: PLR0917  # the same
        torch: Any,
        size: Annotated[int, msgspec.Meta(ge=1, le=5)] = 3,
        rate: float = 1.0,
        loud: bool = False,
        top: int | None = None,
        many=3,  # noqa: ANN001
    ) -> None: ...

    with pytest.raises(ConfigError, match=f"is {text!r}, expected {expected}$"):
        Parameters("mine", run).read({name: text})


def test_annotations_that_cannot_be_evaluated_leave_the_default_to_say_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\ndef run(torch: Nowhere, *, n: Nothing = 3): pass\n"
    )

    program = program_from_file(str(path))

    assert program.parameters.read({"n": "5"}) == {"n": 5}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\n", r"mine\.py has neither run\(torch\) nor worker\(rank, world_size, torch\)"),
        ("class A:\n    def run(self, torch): pass\n", r"has neither run"),
        ("def main():\n    def run(torch): pass\n", r"has neither run"),
        ("def f(:\n", r"mine\.py:1: this is not Python"),
        ("x = 1\n  y = 2\n", r"mine\.py:2: this is not Python: unexpected indent"),
        ("\0", r"this is not Python"),
    ],
)
def test_a_file_that_cannot_be_a_program_is_refused_without_running_it(
    source: str, message: str, tmp_path: Path
) -> None:
    path, trace = tmp_path / "mine.py", tmp_path / "ran"
    path.write_text(source + f"\nopen({str(trace)!r}, 'w')\n" if source != "\0" else source)

    with pytest.raises(ConfigError, match=message):
        program_from_file(str(path))

    assert not trace.exists()


@pytest.mark.parametrize(
    "source",
    [
        "def run(torch): pass\n",
        "if True:\n    def worker(rank, world_size, torch): pass\n",
        "try:\n    import nothing_like_this\nexcept ImportError:\n    run = lambda torch: None\n",
        "from rankwise.sim.benches.gemm import *\n",
        "from rankwise.sim.benches.gemm import run\n",
        "import functools as run\nrun = functools = print\n",
        "globals()['run'] = print\n",
        "for run in [print]: pass\n",
    ],
)
def test_whatever_may_define_an_entry_is_run(source: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)

    assert program_from_file(str(path)).name == str(path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def run(): pass\n", r"run is called as run\(torch\), but: too many positional"),
        (
            "def run(torch, n): pass\n",
            r"missing a required argument: 'n' \(give all further parameters a default",
        ),
        ("def worker(rank): pass\n", r"called as worker\(rank, world_size, torch\), but"),
        ("def worker(rank, world_size, torch, *, n): pass\n", r"missing a required .*'n'"),
    ],
)
def test_an_entry_that_cannot_be_called_is_refused_before_it_is(
    source: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)

    with pytest.raises(ConfigError, match=message):
        program_from_file(str(path))


def test_a_bench_that_is_a_file_and_a_file_that_is_a_bench_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("")

    with pytest.raises(ConfigError, match=r"to run a file: rankwise sim run mine\.py"):
        shipped_program("mine.py")
    with pytest.raises(ConfigError, match="rankwise sim bench gemm"):
        program_from_file("gemm")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        program_from_file(str(tmp_path))
