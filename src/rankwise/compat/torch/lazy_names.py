"""Attributes of packages that are imported when they are first used.

A worker that says `from rankwise.compat.torch.elastic.multiprocessing.errors import record` should
pay for `record`, not for supervision, sockets and log files.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the `__getattr__` of a package.

    Args:
        package: the package's `__name__`.
        homes: from each public name to the module inside the package that defines it; a module
            stands for itself.
    """

    def find(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{home}")
        return module if name == home else getattr(module, name)

    return find


def names_of_torch(module: str) -> Callable[[str], Any]:
    """Make the `__getattr__` of a module whose names are torch's own objects.

    Args:
        module: its `__name__`; torch's module has the same place in `torch.distributed`.

    Raises:
        ModuleNotFoundError: by the `__getattr__`, if torch is not installed.
    """

    def find(name: str) -> Any:
        if name.startswith("__"):  # asked of any module, by `inspect` and importlib
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        try:
            original = import_module(module.replace("rankwise.compat.torch", "torch.distributed"))
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ModuleNotFoundError(
                f"{module}.{name} is torch's own: pip install torch", name="torch"
            ) from None
        return getattr(original, name)

    return find
