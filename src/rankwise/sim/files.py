"""Read what users write for the simulator: files of a sensible size, and YAML as they mean it."""

import re
from pathlib import Path
from typing import Any

import yaml

from rankwise.base.errors import ConfigError

SIZE_MAX = 16 * 2**20
"""No file written by hand is larger; devices and pipes may never end."""


def read_bytes(path: str | Path) -> bytes:
    """Read a file, which may be a pipe.

    Raises:
        ConfigError: it has more than 16 MiB, or does not end.
        OSError: it cannot be read.
    """
    with Path(path).open("rb") as file:
        content = file.read(SIZE_MAX + 1)
    if len(content) > SIZE_MAX:
        raise ConfigError(f"{str(path)!r} has more than {SIZE_MAX // 2**20} MiB, or no end")
    return content


def read_text(path: str | Path) -> str:
    """Read a file of UTF-8, likewise."""
    return read_bytes(path).decode("utf-8")


class Loader(yaml.SafeLoader):
    """YAML in which `1e3` is a number, as everywhere but in YAML 1.1."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def load_yaml(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        yaml.YAMLError: it is none.
    """
    return yaml.load(text, Loader)  # noqa: S506 (a safe loader)


def read_fields(path: str, what: str) -> dict[str, Any]:
    """What a YAML file says, as fields; none if it is empty.

    Args:
        path: of the file.
        what: what errors call it, as in `the plan`.

    Raises:
        ConfigError: it cannot be read, or has no fields.
    """
    try:
        tree = load_yaml(read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        shown = " ".join(str(error).split())
        raise ConfigError(f"{what} {path} is not YAML: {shown}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{what} {path} is a {type(tree).__name__}, expected fields")
    return tree
