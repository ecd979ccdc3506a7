"""Ask Triton's own front end whether it takes a kernel: a program for a process of its own.

It imports the installed Triton, never the shim. A line of its input is a kernel as
`compile_check` describes it, a line of its output the answer: nothing, or what is refused, with
file and line. `ASTSource.make_ir` stops before a device is asked for.
"""

import ast
import importlib
import json
import linecache
import os
import sys
from types import SimpleNamespace
from typing import Any

_TARGET = ("cuda", 90, 32)


def main() -> None:
    """Answer until the input ends."""
    with os.fdopen(os.dup(1), "w") as out:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)  # MLIR prints what it refuses
        os.dup2(nothing, 2)
        for line in sys.stdin:
            try:
                answer = _Kernel(json.loads(line)).refusal()
            except Exception as error:  # noqa: BLE001  # another release of Triton, most likely
                answer = {"cannot": f"{type(error).__name__}: {error}"}
            out.write(json.dumps(answer) + "\n")
            out.flush()


class _Kernel:
    """A kernel, and all functions that it may call."""

    def __init__(self, described: dict[str, Any]) -> None:
        self._triton = importlib.import_module("triton")
        self._described = described["functions"]
        self._made: dict[int, Any] = {}
        self._signature = described["signature"]
        self._constants = {name: self._value(each) for name, each in described["constants"].items()}
        self._kernel = self._function(described["kernel"])

    def _function(self, number: int) -> Any:
        if number in self._made:
            return self._made[number]
        described = self._described[number]
        path, first = described["file"], described["line"]
        tree = ast.parse("".join(linecache.getlines(path)), path)
        found = next(
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            and node.name == described["name"]
            and first in {node.lineno, *(each.lineno for each in node.decorator_list)}
        )
        found.decorator_list = []
        found.returns = None
        arguments = found.args
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            is_constant = each.arg in described["constants"]
            each.annotation = ast.Name("__constexpr", ast.Load()) if is_constant else None
        arguments.defaults = [ast.Constant(None) for _each in arguments.defaults]
        arguments.kw_defaults = [each and ast.Constant(None) for each in arguments.kw_defaults]
        module = ast.fix_missing_locations(ast.Module([found], []))
        names: dict[str, Any] = {
            "__name__": described["module"], "__constexpr": self._triton.language.constexpr,
        }  # fmt: skip
        exec(compile(module, path, "exec"), names)  # noqa: S102  # the user's own source
        function = names[found.name]
        function.__defaults__ = tuple(map(self._value, described["defaults"])) or None
        keywords = {name: self._value(each) for name, each in described["keywords"].items()}
        function.__kwdefaults__ = keywords or None
        wrap = {"jit": self._triton.jit, "constexpr": self._triton.constexpr_function}
        made = self._made[number] = wrap[described["kind"]](function)
        for name, each in described["names"].items():
            names[name] = self._value(each)
        return made

    def _value(self, described: Any) -> Any:
        ((kind, value),) = described.items()
        match kind:
            case "value":
                return value
            case "constexpr":
                return self._triton.language.constexpr(self._value(value))
            case "tuple":
                return tuple(map(self._value, value))
            case "function":
                return self._function(value)
            case "module":
                return importlib.import_module(value)
            case "namespace":
                return SimpleNamespace(**{name: self._value(each) for name, each in value.items()})
            case _:
                module, name = value
                return getattr(importlib.import_module(module), name)

    def refusal(self) -> dict[str, Any]:
        """What Triton says of it; empty if it takes it."""
        compiler = importlib.import_module("triton.compiler.compiler")
        errors = importlib.import_module("triton.compiler.errors")
        ir = importlib.import_module("triton._C.libtriton").ir
        target = compiler.GPUTarget(*_TARGET)
        backend = compiler.make_backend(target)
        options = backend.parse_options({})
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        source = compiler.ASTSource(self._kernel, self._signature, self._constants)
        generate, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        try:
            source.make_ir(target, options, generate, modules, context)
        except errors.CompileTimeAssertionFailure:
            return {}  # it is one here, too: tuning passes over such a configuration
        except errors.CompilationError as error:
            return self._refusal(error, errors.CompilationError)
        return {}

    def _refusal(self, error: Any, kind: type) -> dict[str, Any]:
        # A kernel that calls another fails as well: the innermost one knows the line.
        cause: BaseException | None = error
        words = ""
        while cause is not None:
            if isinstance(cause, kind):
                error = cause
                words = str(error.error_message or "") or words
            else:
                words = str(cause) or words
            cause = cause.__cause__
        told: dict[str, Any] = {"refused": words, "version": self._triton.__version__}
        line = getattr(error.node, "lineno", None)
        for each in self._made.values():
            if line is not None and getattr(each, "src", None) == error.src:
                # Lines of `src` are counted from its `def`.
                first = each.fn.__code__.co_firstlineno
                told["line"] = line + first - 1
                told["file"] = each.fn.__code__.co_filename
        return told


if __name__ == "__main__":
    main()
