"""List the result types of Triton's operations, as its own front end gives them.

    python tools/triton_result_types.py tests/conformance/sim/triton_result_types.json

Needs the `triton` package (3.9) and no GPU: `ASTSource.make_ir` stops before a device is asked for.
Each expression is compiled for each type of `x`, or each pair of types of `x` and `y`. The table
has a row for each type of `x`, with a word for each type of `y`; `.` says that Triton refuses it.
The kernels are made by `module_of`, which the test uses too, so that both run the same source.
"""

import importlib
import importlib.util
import json
import sys
import tempfile
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

TYPES = (
    "int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float8e5", "float8e4nv", "float16", "bfloat16", "float32", "float64",
)  # fmt: skip
SHORT = ("b", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64",
         "e5", "e4", "f16", "bf", "f32", "f64")  # fmt: skip
"""The words of the table, in the order of `TYPES`."""

_OPERATORS = (
    "+", "-", "*", "/", "//", "%", "&", "|", "^", "<<", ">>", "<", "<=", ">", ">=", "==", "!=",
    "and", "or",
)  # fmt: skip
_NUMBERS = ("1", "True", "1.5", "-1", "300", "2**31", "2**40", "1e300", "CONSTANT", "HALF")
"""Numbers beside a block: literals, and compile-time values of the module."""
_MATH = (
    "exp", "exp2", "log", "log2", "sin", "cos", "sqrt", "sqrt_rn", "rsqrt", "erf", "floor", "ceil",
    "abs", "sigmoid",
)  # fmt: skip

UNARY = (
    "-x", "~x", "not x", "+x",
    *(f"tl.{name}(x)" for name in _MATH),
    *(f"tl.{name}(x, 0)" for name in (
        "sum", "max", "min", "argmax", "argmin", "xor_sum", "reduce_or", "cumsum", "cumprod",
        "softmax",
    )),
    "tl.sum(x)", "tl.max(x)", "tl.min(x)", "tl.xor_sum(x)",
    "tl.max(x, 0, return_indices=True)[0]", "tl.max(x, 0, return_indices=True)[1]",
    "tl.min(x, 0, return_indices=True)[0]", "tl.min(x, 0, return_indices=True)[1]",
    "tl.reduce(x, 0, added)", "tl.associative_scan(x, 0, added)",
    "tl.reduce(x, 0, greater)", "tl.associative_scan(x, 0, greater)",
    "tl.sort(x)", "tl.topk(x, 4)", "tl.flip(x)", "tl.histogram(tl.ravel(x), 4)",
    "tl.zeros_like(x)", "tl.ravel(x)", "tl.trans(x)", "tl.join(x, x)",
    "tl.full((4,), 1, x.dtype)", "tl.full((4,), 1.5, x.dtype)", "tl.full((4,), -1, x.dtype)",
    "tl.full((4,), True, x.dtype)", "tl.full((4,), 300, x.dtype)",
    "1 if x.max() > 0 else 2", "1.5 if x.max() > 0 else 2",
    *(
        f"tl.load(p, tl.max(x) > 0, {other})"
        for other in ("0", "0.5", "-1", "300", "True", "2**40")
    ),
    "tl.swizzle2d(x, x, 4, 4, 2)[0]", "tl.swizzle2d(x, 1, 4, 4, 2)[1]",
)  # fmt: skip
BINARY = (
    *(f"x {operator} y" for operator in _OPERATORS),
    *(f"tl.{name}(x, y)" for name in (
        "maximum", "minimum", "fdiv", "div_rn", "umulhi", "cdiv", "dot",
        "interleave", "join",
    )),
    "tl.where(x, y, y)", "tl.where(CONDITION(x), x, y)", "tl.fma(x, y, x)", "tl.clamp(x, y, y)",
    "x.to(y.dtype)", "x.to(y.dtype, bitcast=True)", 'x.to(y.dtype, fp_downcast_rounding="rtz")',
    "tl.sum(x, 0, dtype=y.dtype)", "tl.cumsum(x, 0, dtype=y.dtype)",
    "tl.cumprod(x, 0, dtype=y.dtype)", "tl.dot(x, x, out_dtype=y.dtype)", "tl.dot(x, x, y)",
    "tl.dot(x, x, y, out_dtype=y.dtype)", "x if x.max() > 0 else y",
    "tl.full((4,), tl.max(x), y.dtype)",
    "tl.swizzle2d(x, y, 4, 4, 2)[0]", "tl.swizzle2d(x, x, y, y, y)[1]", "tl.cat(x, y)",
    "tl.cat(tl.ravel(x), tl.ravel(y), can_reorder=True)", "tl.load(p, tl.max(x) > 0, FIRST(y))",
)  # fmt: skip
WITH_NUMBER = (
    *(
        each
        for number in _NUMBERS
        for operator in _OPERATORS
        for each in (f"x {operator} {number}", f"{number} {operator} x")
    ),
    *(
        f"{name}({arguments})"
        for number in ("1", "1.5", "-1", "300", "1e300")
        for name, arguments in (
            ("tl.maximum", f"x, {number}"), ("tl.minimum", f"{number}, x"),
            ("tl.where", f"CONDITION(x), x, {number}"), ("tl.where", f"CONDITION(x), {number}, 1"),
            ("tl.clamp", f"x, {number}, {number}"), ("tl.fma", f"x, {number}, {number}"),
            ("tl.fdiv", f"x, {number}"), ("tl.cdiv", f"x, {number}"), ("max", f"x, {number}"),
        )
    ),
)  # fmt: skip
ATOMIC = ("add", "max", "min", "and", "or", "xor", "xchg", "cas")
IN_VARIABLES = tuple(f"held = {number}; x {operator} held"
                     for number in ("1", "1.5", "True", "2**40")
                     for operator in ("+", "/", "//", "<"))  # fmt: skip

LIBDEVICE_PAIRS = ("atan2", "fma", "hadd", "ldexp", "mulhi", "pow")
"""Of libdevice's functions of several operands, one of each kind: all are tables of types."""

_HEAD = """\
import triton
import triton.language as tl
from triton.language.extra import libdevice

CONSTANT = tl.constexpr(3)
HALF = tl.constexpr(0.5)
SIDE = tl.constexpr(32)
FOUND = {}


@triton.constexpr_function
def noted(type_):
    FOUND[0] = type_


@triton.jit
def added(a, b):
    return a + b


@triton.jit
def greater(a, b):
    return tl.maximum(a, b)


@triton.jit
def FIRST(x):
    return tl.reduce(tl.ravel(x), 0, first)


@triton.jit
def first(a, b):
    return a


@triton.jit
def CONDITION(x):
    return tl.full(x.shape, 1, tl.int1)


@triton.jit
def run(memory, X: tl.constexpr, Y: tl.constexpr, function: tl.constexpr):
    x = tl.full((SIDE, SIDE), 1, X)
    y = tl.full((SIDE, SIDE), 1, Y)
    result = function(x, y, memory.to(tl.pointer_type(X)))
    noted(result.dtype)
"""


def expressions(libdevice: dict[str, int]) -> dict[str, int]:
    """All expressions, and how many blocks each is of."""
    found = dict.fromkeys((*UNARY, *WITH_NUMBER, *IN_VARIABLES), 1) | dict.fromkeys(BINARY, 2)
    for name in ATOMIC:
        value = "FIRST(y), FIRST(y)" if name == "cas" else "FIRST(y)"
        found[f"tl.atomic_{name}(p, {value})"] = 2
    return found | {
        f"libdevice.{name}({', '.join('xyyy'[:count])})": min(count, 2)
        for name, count in libdevice.items()
        if count == 1 or name in LIBDEVICE_PAIRS
    }


def source_of(names: dict[str, int]) -> str:
    """A module with a kernel function for each expression, in this order: `e0`, `e1`, ..."""
    parts = [_HEAD]
    for at, (expression, _count) in enumerate(names.items()):
        *before, last = expression.split("; ")
        lines = "".join(f"    {each}\n" for each in before)
        parts.append(f"@triton.jit\ndef e{at}(x, y, p):\n{lines}    return {last}\n")
    return "\n\n".join(parts)


def module_of(source: str, folder: Path, name: str) -> ModuleType:
    """The source as a module: kernels are read from a file."""
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def table_of(triton: ModuleType, folder: Path) -> dict[str, Any]:
    """What Triton gives for all expressions and types."""
    own = importlib.import_module("triton.language.extra.cuda.libdevice")
    libdevice = {
        name: value.__wrapped__.__code__.co_argcount - 1  # but for the compiler's own
        for name, value in sorted(vars(own).items())
        if getattr(value, "__triton_builtin__", False)
    }
    names = expressions(libdevice)
    compiler = _Compiler(triton, module_of(source_of(names), folder, "result_types_of_triton"))
    return {
        "version": triton.__version__,
        "libdevice": libdevice,
        "types": {
            expression: compiler.rows(at, count)
            for at, (expression, count) in enumerate(names.items())
        },
    }


class _Compiler:
    """Triton's front end."""

    def __init__(self, triton: ModuleType, module: ModuleType) -> None:
        target = triton.compiler.compiler.GPUTarget("cuda", 90, 32)
        self._backend = triton.compiler.compiler.make_backend(target)
        self._options = self._backend.parse_options({})
        self._triton, self._module, self._target = triton, module, target

    def rows(self, at: int, count: int) -> dict[str, str]:
        """By row, the types of `x` that have it; rows without a result are left out."""
        language = self._triton.language
        found: dict[str, list[str]] = {}
        for word, name in zip(SHORT, TYPES, strict=True):
            others = TYPES if count == 2 else ("int32",)
            row = " ".join(
                self._result(at, getattr(language, name), getattr(language, other))
                for other in others
            )
            found.setdefault(row, []).append(word)
        return {" ".join(words): row for row, words in found.items() if set(row) - {".", " "}}

    def _result(self, at: int, x: Any, y: Any) -> str:
        source = self._triton.compiler.ASTSource(
            self._module.run,
            {"memory": "*i8", "X": "constexpr", "Y": "constexpr", "function": "constexpr"},
            {"X": x, "Y": y, "function": getattr(self._module, f"e{at}")},
        )
        ir = importlib.import_module("triton._C.libtriton").ir
        context = ir.context()
        ir.load_dialects(context)
        self._backend.load_dialects(context)
        self._module.FOUND.clear()
        try:
            source.make_ir(
                self._target, self._options,
                self._backend.get_codegen_implementation(self._options),
                self._backend.get_module_map(), context,
            )  # fmt: skip
        except Exception:  # noqa: BLE001  # whatever a front end says of a kernel that it refuses
            return "."
        type_ = self._module.FOUND[0]
        return SHORT[[getattr(self._triton.language, name) for name in TYPES].index(type_)]


def main() -> None:
    """Write the table to the file that is named: MLIR prints what it refuses to standard output."""
    warnings.simplefilter("ignore")
    triton = importlib.import_module("triton")
    with tempfile.TemporaryDirectory() as folder:
        table = table_of(triton, Path(folder))
    Path(sys.argv[1]).write_text(json.dumps(table, indent=0) + "\n")


if __name__ == "__main__":
    main()
