"""Prints the oldest versions that the bounds of pyproject.toml allow, as constraints for pip.

Usage: tools/oldest_versions.py [GROUP...]: of the package's own dependencies, and of those groups.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
_BOUND = re.compile(r"(?P<name>[A-Za-z0-9._-]+)\s*(?:>=|~=|==)\s*(?P<version>[0-9.]+)")


def constraints(project: dict[str, Any], groups: list[str]) -> Iterator[str]:
    """One line for each dependency: name==version."""
    for text in project["project"]["dependencies"]:
        yield _oldest(text)
    for group in groups:
        yield from _of_group(project["dependency-groups"], group)


def _of_group(all_groups: dict[str, list[Any]], name: str) -> Iterator[str]:
    for entry in all_groups[name]:
        if isinstance(entry, dict):
            yield from _of_group(all_groups, entry["include-group"])
        else:
            yield _oldest(entry)


def _oldest(text: str) -> str:
    bound = _BOUND.match(text)
    if bound is None:
        sys.exit(f"pyproject.toml: {text!r} has no lower bound, expected NAME>=VERSION")
    return f"{bound['name']}=={bound['version']}"


if __name__ == "__main__":
    print("\n".join(constraints(tomllib.loads(PROJECT.read_text()), sys.argv[1:])))
