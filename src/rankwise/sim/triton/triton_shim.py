"""`import triton`, unmodified: the emulator under Triton's own name, in Triton's packages.

`installed` puts modules into `sys.modules` that are named and divided as Triton's are, and that
hold what the emulator has. A real Triton is hidden meanwhile. Libraries that look into Triton's
insides find what kernels and launches need; what a compiler or a GPU would have to be there for is
refused by name: gluon, profilers, back ends.

torch must not find it: where `import triton` succeeds, torch takes a compiler for granted. So that
statement fails in torch's own modules, and torch's `has_triton` says no to them alone. Where there
is no GPU, torch's CUDA device is the CPU (`torch_on_cpu`).
"""

import builtins
import dis
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Self, TypeAlias

from rankwise.sim import triton
from rankwise.sim.triton import (
    dtypes,
    execution,
    language,
    launch_arguments,
    random_numbers,
    runtime,
    testing,
)
from rankwise.sim.triton import tuning as autotuner
from rankwise.sim.triton.constants import constexpr_function
from rankwise.sim.triton.jit import CompiledKernel, JITFunction, KernelInterface, jit
from rankwise.sim.triton.language import core, math, standard
from rankwise.sim.triton.language.extra import cuda, libdevice
from rankwise.sim.triton.refusals import COMPILER, GLUON, NameNotEmulated, refusing
from rankwise.sim.triton.tools import mxfp
from rankwise.sim.triton.torch_on_cpu import ANSWERS, cuda_on_cpu


class OutOfResources(execution.KernelError):
    """A kernel that no device has room for; never raised here, and caught by those who tune."""


def must_use_result(x: Any, s: Any = True) -> Any:
    """Mark a function whose result a compiler must not drop; nothing here."""
    del s
    return (lambda fn: fn) if isinstance(x, str) else x


class TensorWrapper(launch_arguments.TypedArray):
    """A tensor whose elements are taken for those of another type."""

    base: Any

    def __new__(cls, base: Any, dtype: Any) -> Self:  # noqa: D102
        bits = base.numpy() if hasattr(base, "numpy") else base
        self = super().__new__(cls, bits.view(dtype.storage), dtype)
        self.base = base
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)


def reinterpret(tensor: Any, dtype: Any) -> TensorWrapper:
    """The bits of a tensor as elements of another type of the same size."""
    return TensorWrapper(getattr(tensor, "base", tensor), dtype)


def _never() -> bool:
    return False


def _never_geq(major: int, minor: int = 0) -> bool:
    """Whether it is an NVIDIA device of that capability at least."""
    del major, minor
    return False


_USES = {
    dis.opmap[name] for name in ("IMPORT_FROM", "LOAD_ATTR", "LOAD_METHOD") if name in dis.opmap
}
"""Of the interpreter's instructions, those of a program that wants a name of a module."""


def _no_gluon(name: str) -> Any:
    """Refuse what gluon's modules hold.

    Libraries import the modules beside what they use of Triton itself: those are there. As an
    `ImportError` it reaches code that has other kernels to fall back on. Code that looks through
    all modules for a name, as `hasattr` and `pickle` do, must find an `AttributeError`, which
    `NameNotEmulated` is.
    """
    caller = sys._getframe(1)  # noqa: SLF001  # its instruction tells the two apart
    is_used = caller.f_code.co_code[caller.f_lasti] in _USES
    kind = ImportError if is_used and not name.startswith("__") else NameNotEmulated
    raise kind(f"gluon's {name} is not emulated: {GLUON}")


def _nothing(*_args: Any, **_options: Any) -> None:
    """Do nothing: there is no profile to write, and no queue but one."""


_ERRORS: dict[str, Any] = {
    "CompilationError": execution.KernelError,
    "InterpreterError": execution.KernelError,
    "OutOfResources": OutOfResources,
    "PTXASError": execution.KernelError,
    "TritonError": execution.KernelError,
}
_LAUNCHES: dict[str, Any] = {
    "JITFunction": JITFunction,
    "KernelInterface": KernelInterface,
    "TensorWrapper": TensorWrapper,
    "reinterpret": reinterpret,
}
_JIT = {
    **_LAUNCHES,
    "constexpr_function": constexpr_function,
    "jit": jit,
    "must_use_result": must_use_result,
    "type_canonicalisation_dict": {
        spelling: type_.name
        for type_ in dtypes.SCALAR_TYPES
        for spelling in (type_.name, repr(type_).rpartition(".")[2])
    },
}
_TUNING = {
    "Autotuner": autotuner.Autotuner,
    "Config": autotuner.Config,
    "Heuristics": autotuner.Heuristics,
    "OutOfResources": OutOfResources,
    "autotune": autotuner.autotune,
    "heuristics": autotuner.heuristics,
}
_COMPILER = {"CompiledKernel": CompiledKernel, "CompilationError": execution.KernelError}

_PROFILER: dict[str, Any] = {
    **dict.fromkeys(("activate", "deactivate", "finalize", "start"), _nothing),
    "scope": lambda *_args, **_options: nullcontext(),
}


def _unless_for_torch() -> bool:
    """Whether there is a Triton, for who asks torch: for its own modules there is none."""
    return not _is_of_torch(sys._getframe(1).f_globals)  # noqa: SLF001


_Questions: TypeAlias = Mapping[str, Mapping[str, Any]]
_QUESTIONS: _Questions = {
    "torch.cpu": {"set_stream": _nothing},
    "torch.library": {"wrap_triton": lambda kernel: kernel},
    "torch.utils._triton": dict.fromkeys(("has_triton", "has_triton_package"), _unless_for_torch),
}
"""By module of torch: functions, and what answers instead."""
_QUESTIONS_OF_CUDA: _Questions = {"torch": {}, "torch.cuda": ANSWERS}

_MODULES: Mapping[str, Mapping[str, Any]] = {
    "triton": {**vars(triton), **_JIT, **_ERRORS},
    "triton.backends": {"backends": runtime.backends},
    "triton.backends.compiler": {"GPUTarget": SimpleNamespace},
    "triton.compiler": _COMPILER,
    "triton.compiler.compiler": _COMPILER,
    "triton.compiler.errors": _ERRORS,
    "triton.errors": _ERRORS,
    "triton.experimental": {},
    "triton.experimental.gluon": {"__getattr__": _no_gluon},
    "triton.experimental.gluon.language": {"__getattr__": _no_gluon},
    "triton.knobs": {"runtime": SimpleNamespace(interpret=False)},
    "triton.language": vars(language),
    "triton.language.core": vars(core),
    "triton.language.extra": {},
    "triton.language.extra.cuda": vars(cuda),
    "triton.language.extra.cuda.libdevice": vars(libdevice),
    "triton.language.extra.libdevice": vars(libdevice),
    "triton.language.math": vars(math),
    "triton.language.random": vars(random_numbers),
    "triton.language.standard": vars(standard),
    "triton.language.target_info": {
        "current_target": runtime.driver.active.get_current_target,
        "cuda_capability_geq": _never_geq,
        **dict.fromkeys(
            ("is_cuda", "is_hip", "is_hip_cdna3", "is_hip_cdna4", "is_hip_gfx1250"), _never
        ),
    },
    "triton.profiler": _PROFILER,
    "triton.profiler.language": _PROFILER,
    "triton.profiler.viewer": {},
    "triton.runtime": {**vars(runtime), **_LAUNCHES, **_TUNING, **_ERRORS},
    "triton.runtime.autotuner": _TUNING,
    "triton.runtime.driver": {"driver": runtime.driver, "active": runtime.driver.active},
    "triton.runtime.errors": _ERRORS,
    "triton.runtime.jit": _JIT,
    "triton.testing": vars(testing),
    "triton.tools": {},
    "triton.tools.mxfp": {"MXFP4Tensor": mxfp.MXFP4Tensor, "MXScaleTensor": mxfp.MXScaleTensor},
    "triton.tools.tensor_descriptor": {"TensorDescriptor": launch_arguments.TensorDescriptor},
}
"""What each module holds besides its submodules. What is no module goes before a submodule of that
name: `triton.runtime.driver` is an object in the package, and a module to who imports from it."""

_SETTINGS = "there is nothing that it would set: no compiler, no cache and no device"
_NO_SOURCES = dict.fromkeys(
    ("ASTSource", "IRSource", "code_generator", "compile", "make_backend"), COMPILER
)
_REFUSED: Mapping[str, Mapping[str, str]] = {
    "triton.backends": dict.fromkeys(("amd", "nvidia"), "there is no device of that kind"),
    "triton.compiler": _NO_SOURCES,
    "triton.compiler.compiler": _NO_SOURCES,
    "triton.knobs": dict.fromkeys(
        (
            "amd", "autotuning", "build", "cache", "compilation", "language", "nvidia", "proton",
            "redis",
        ),
        _SETTINGS,
    ),
}  # fmt: skip
"""What modules refuse by name, where they hold nothing that would."""


@contextmanager
def installed(*, models_cuda: bool = True) -> Iterator[None]:
    """Let `import triton` find the emulator, in this process, for a block.

    Modules imported in the block keep it; those that had imported a real Triton before keep that.

    Args:
        models_cuda: whether torch's CUDA device is the CPU meanwhile, where there is no GPU.
    """
    before = {name: module for name, module in sys.modules.items() if _is_triton(name)}
    answers = _Answers({**_QUESTIONS, **(_QUESTIONS_OF_CUDA if models_cuda else {})})
    own_import = builtins.__import__

    def import_unless_torch(name: str, *args: Any, **kwargs: Any) -> ModuleType:
        importer = (args[0] if args else kwargs.get("globals")) or {}
        # torch has modules of that name itself, which it imports relatively: `from .triton import`.
        is_relative = bool(args[3] if args[3:] else kwargs.get("level"))
        if _is_triton(name) and not is_relative and _is_of_torch(importer):
            raise ModuleNotFoundError(f"No module named {name!r} for torch", name=name)
        module = own_import(name, *args, **kwargs)
        if _is_triton(name) and not is_relative:
            _find_all(module, (args[2:3] or [kwargs.get("fromlist")])[0] or ())
        return module

    finder = _Finder(answers)
    for name in before:
        del sys.modules[name]
    sys.modules.update(_modules())
    sys.meta_path.insert(0, finder)
    builtins.__import__ = import_unless_torch
    for name in answers.questions:
        if name in sys.modules:
            answers.give(sys.modules[name])
    try:
        yield
    finally:
        builtins.__import__ = own_import
        answers.take_back()
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _is_triton(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_of_torch(namespace: Mapping[str, Any]) -> bool:
    return str(namespace.get("__name__")).startswith("torch.")


def _is_triton(name: str) -> bool:
    return name == "triton" or name.startswith("triton.")


def _find_all(module: ModuleType, words: Sequence[str]) -> None:
    """Say why a name is missing: `from module import name` itself drops the reason."""
    for word in words:
        try:
            _ = word == "*" or getattr(module, word)
        except AttributeError as error:
            raise ImportError(str(error), name=module.__name__) from None


def _modules() -> dict[str, ModuleType]:
    modules: dict[str, ModuleType] = {}
    for name in _MODULES:
        modules[name] = module_from_spec(_spec(name))
        _LOADER.exec_module(modules[name])
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if parent and isinstance(_MODULES[parent].get(last, module), ModuleType):
            setattr(modules[parent], last, module)
    return modules


class _ShimLoader(Loader):
    """Fills a module with what the emulator has under its name: new ones, and those reloaded."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__doc__ = f"rankwise's shim for {name}."
        for word, value in _MODULES[name].items():
            if not word.startswith("__") or word in {"__all__", "__getattr__", "__version__"}:
                setattr(module, word, value)
        vars(module).setdefault("__getattr__", refusing(name, _REFUSED.get(name, {})))

    def is_package(self, fullname: str) -> bool:
        """All are packages, as `_spec` says: modules are found below them by their names."""
        return fullname in _MODULES

    def get_source(self, fullname: str) -> str | None:
        """The text of the emulator's module of which most of it is."""
        return Path(_file_of(fullname)).read_text(encoding="utf-8")

    def get_code(self, fullname: str) -> None:
        """There is none: a module is filled with what is there already."""
        del fullname


_LOADER = _ShimLoader()


def _file_of(name: str) -> str:
    return str(_MODULES[name].get("__file__", __file__))


def _spec(name: str) -> ModuleSpec:
    """How a module is found: its file is that of the emulator's module of which most of it is."""
    spec = ModuleSpec(name, _LOADER, origin=_file_of(name), is_package=True)
    spec.has_location = True
    return spec


class _Installation(Distribution):
    """What is installed as `triton`, for `importlib.metadata`."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: triton\nVersion: {triton.__version__}\n"

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent.joinpath(path)


class _Answers:
    """What torch is told meanwhile, in the place of its own answers.

    Attributes:
        questions: that are answered.
    """

    def __init__(self, questions: _Questions) -> None:
        self.questions = questions
        self._taking_back = ExitStack()

    def give(self, module: ModuleType) -> None:
        """Answer the questions that one of its modules is asked, unless there is a GPU."""
        if module.__name__ == "torch.cuda" and module.is_available():
            return
        if module.__name__ == "torch" and not module.cuda.is_available():
            self._taking_back.enter_context(cuda_on_cpu(module))
        for name, answer in self.questions[module.__name__].items():
            if hasattr(module, name):
                self._taking_back.callback(setattr, module, name, getattr(module, name))
            else:
                self._taking_back.callback(delattr, module, name)
            setattr(module, name, answer)

    def take_back(self) -> None:
        """Let torch answer again."""
        self._taking_back.close()


class _Finder(MetaPathFinder):
    """Refuses what the shim lacks, and answers for torch when that is imported."""

    def __init__(self, answers: _Answers) -> None:
        self._answers = answers

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _MODULES:  # it is loaded anew
            return _spec(fullname)
        if _is_triton(fullname):
            if _is_importing():
                raise ModuleNotFoundError(
                    f"No module named {fullname!r}: {_why_missing(fullname)}", name=fullname
                )
            return None
        if fullname not in self._answers.questions:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _AnsweringLoader(spec.loader, self._answers)
        return spec

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        """Answer `importlib.metadata`: a real Triton is hidden there, too."""
        if context is None or context.name is None or context.name.lower() == "triton":
            yield _Installation()


def _is_importing() -> bool:
    """Whether a module is to be imported, not only looked for: who looks gets no reason, but None.

    `importlib` asks finders in the same way for both, so its own frame tells.
    """
    asking = sys._getframe(2).f_back  # noqa: SLF001
    return asking is not None and asking.f_code.co_name == "_find_and_load_unlocked"


def _why_missing(fullname: str) -> str:
    parent, _, last = fullname.rpartition(".")
    try:
        getattr(sys.modules.get(parent), last)
    except (ImportError, NameNotEmulated) as error:
        return str(error)
    except AttributeError:
        pass
    return "rankwise emulates Triton's kernel language, and nothing of its compiler"


class _AnsweringLoader(Loader):
    """Loads a module of torch, and gives the answers."""

    def __init__(self, loader: Loader, answers: _Answers) -> None:
        self._loader = loader
        self._answers = answers

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._answers.give(module)
