"""Every public name of Triton is here with the same parameters, or refused with a reason.

`triton_names.json` lists Triton's public names and their parameters, and which release it was made
from; `triton_names_older.json` has what is different in older releases: that which comes with the
build of torch for CUDA. Where the `triton` package is installed, the list of its release is made
anew and compared; it is not a dependency. `python tests/conformance/sim/test_triton_names.py`
writes the list of the installed one, or its differences to that of the newest.
"""

import ast
import enum
import importlib
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rankwise.sim.triton import installed
from rankwise.sim.triton.execution import Unsupported
from rankwise.sim.triton.language.extra import libdevice

LIST = Path(__file__).with_name("triton_names.json")
OLDER = Path(__file__).with_name("triton_names_older.json")
MODULES = (
    "triton", "triton.language", "triton.language.math", "triton.language.extra.cuda",
    "triton.language.extra.libdevice", "triton.runtime", "triton.testing",
    "triton.tools.tensor_descriptor",
)  # fmt: skip
FOR_A_COMPILER = {"_semantic", "_generator", "_builder", "_env_vars"}
NOT_FOR_USERS = {"T", "canonicalize_dtype", "cublas", "validate_block_shape"}
"""What modules have imported for themselves."""
MADE_BY_THE_LANGUAGE = {
    "CompilationError", "InterpreterError", "JITFunction", "KernelInterface", "OutOfResources",
    "PropagateNan", "TensorWrapper", "TritonError", "slice", "tensor", "tensor_descriptor", "tuple",
}  # fmt: skip
"""Classes that user code names and catches, and does not make."""


def public_names(module: str) -> dict[str, list[str] | None]:
    """The public names of a module of Triton, with their parameters if they are called."""
    found: dict[str, list[str] | None] = {}
    for name, value in sorted(vars(importlib.import_module(module)).items()):
        origin = str(getattr(value, "__module__", "") or type(value).__module__)
        if (
            name.startswith("_")
            or name in NOT_FOR_USERS
            or inspect.ismodule(value)
            or not origin.startswith("triton")
        ):
            continue
        found[name] = None if isinstance(value, enum.EnumMeta) else parameters(value)
    return found


def parameters(value: Any) -> list[str] | None:
    """Parameters as text: `mask=None`; None for what cannot be called."""
    if not callable(value):
        return None
    function = getattr(value, "fn", value)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    return [shown(each) for each in signature.parameters.values() if is_users(each)]


def is_users(parameter: inspect.Parameter) -> bool:
    return parameter.name not in FOR_A_COMPILER


def shown(parameter: inspect.Parameter) -> str:
    star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
    star = "**" if parameter.kind is parameter.VAR_KEYWORD else star
    if parameter.default is parameter.empty:
        return star + parameter.name
    default = getattr(parameter.default, "value", parameter.default)
    default = int(default) if isinstance(default, bool) else default  # some are constexpr(0)
    is_simple = isinstance(default, (int, float, str, type(None)))
    return f"{parameter.name}={default!r}" if is_simple else f"{parameter.name}=…"


def overloads() -> dict[str, str]:
    """What each function of Triton's libdevice takes and gives, read from its source."""
    theirs = importlib.import_module("triton.language.extra.cuda.libdevice")
    short = {"int": "i", "uint": "u", "fp": "f"}

    def spelled(node: ast.expr) -> str:
        (constant,) = (each for each in ast.walk(node) if isinstance(each, ast.Constant))
        kind = str(constant.value).rstrip("0123456789")
        return short[kind] + str(constant.value)[len(kind) :]

    found = {}
    for function in ast.parse(inspect.getsource(theirs)).body:
        tables = [node for node in ast.walk(function) if isinstance(node, ast.Dict)]
        if isinstance(function, ast.FunctionDef) and tables:
            (table,) = tables
            rows = []
            for key, value in zip(table.keys, table.values, strict=True):
                assert isinstance(key, ast.Tuple)
                assert isinstance(value, ast.Tuple)
                rows.append(f"{','.join(map(spelled, key.elts))}>{spelled(value.elts[1])}")
            is_truth = ".to(core.int1" in ast.unparse(function)
            found[function.name] = " ".join(sorted(rows)).replace(
                ">i32", ">i1" if is_truth else ">i32"
            )
    return found


def recomputed() -> dict[str, Any]:
    triton = importlib.import_module("triton")
    return {
        "version": triton.__version__,
        "modules": {module: public_names(module) for module in MODULES},
        "libdevice": overloads(),
    }


def listed() -> Iterator[tuple[str, str, list[str] | None]]:
    for module, names in json.loads(LIST.read_text())["modules"].items():
        for name, expected in names.items():
            yield module, name, expected


def accepts(mine: Callable[..., Any], expected: list[str]) -> bool:
    """Whether a function takes what Triton's takes, by the same names, in the same places.

    It may take more by name, and may have a default where Triton has none.
    """
    own = parameters(mine)
    if own is None or len(own) < len(expected):
        return False
    return all(
        ours in {theirs, "*" + theirs} or ours.partition("=")[0] == theirs
        for ours, theirs in zip(own, expected, strict=False)
    )


@pytest.mark.parametrize(("module", "name", "expected"), list(listed()))
def test_a_name_of_triton_is_here_or_refused_with_the_reason(
    module: str, name: str, expected: list[str] | None
) -> None:
    with installed():
        emulated = importlib.import_module(module)
        if not hasattr(emulated, name):
            with pytest.raises(Unsupported, match=r"is not emulated: "):
                getattr(emulated, name)
            return
        value = getattr(emulated, name)

    if expected is not None and name not in MADE_BY_THE_LANGUAGE:
        assert accepts(value, expected), f"{parameters(value)} instead of {expected}"


def test_functions_of_libdevice_take_and_give_the_same_types() -> None:
    for name, expected in json.loads(LIST.read_text())["libdevice"].items():
        mine = libdevice.TYPES.get(name)
        if mine is not None:
            assert " ".join(sorted(mine.split())) == expected, name


def of_older() -> dict[str, dict[str, Any]]:
    """What is different in older releases: by release and module."""
    older: dict[str, dict[str, Any]] = json.loads(OLDER.read_text())
    return older


def lists() -> dict[str, dict[str, Any]]:
    """The lists by release."""
    newest = json.loads(LIST.read_text())
    found = {newest["version"]: newest}
    for version, differences in of_older().items():
        modules = {}
        for module, names in newest["modules"].items():
            here = differences.get(module, {"names": {}, "absent": []})
            kept = {name: names[name] for name in names if name not in here["absent"]}
            modules[module] = kept | here["names"]
        found[version] = {**newest, "version": version, "modules": modules}
    return found


@pytest.mark.parametrize("version", of_older())
def test_names_and_parameters_of_an_older_triton_are_here_too(version: str) -> None:
    with installed():
        for module, here in of_older()[version].items():
            for name, expected in here["names"].items():
                if name in MADE_BY_THE_LANGUAGE or expected is None:
                    continue
                try:
                    own = parameters(getattr(importlib.import_module(module), name))
                except Unsupported as refusal:
                    assert "is not emulated: " in str(refusal)  # noqa: PT017  # not all are refused
                    continue
                words = {each.partition("=")[0] for each in own or ()}
                assert {each.partition("=")[0] for each in expected} <= words, (module, name, own)


def test_the_list_is_that_of_the_installed_triton() -> None:
    pytest.importorskip("triton.language")  # `triton` alone may be a directory of our own tests
    known, version = lists(), importlib.import_module("triton").__version__
    if version not in known:
        pytest.skip(f"no list of Triton {version} here, of {' and '.join(known)} only: see above")

    assert recomputed() == known[version]


def write() -> None:
    """Write the list of the installed Triton, or how it differs from the newest."""
    found, newest = recomputed(), json.loads(LIST.read_text())
    if tuple(map(int, found["version"].split("."))) >= tuple(
        map(int, newest["version"].split("."))
    ):
        LIST.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        return
    differences = {}
    for module, names in newest["modules"].items():
        mine = found["modules"][module]
        changed = {
            name: mine[name] for name in mine if name not in names or names[name] != mine[name]
        }
        absent = [name for name in names if name not in mine]
        if changed or absent:
            differences[module] = {"names": changed, "absent": absent}
    older = {**of_older(), found["version"]: differences}
    OLDER.write_text(json.dumps(older, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write()
