"""Orders that people expect, where the letters alone would give another."""

import re


def by_numbers(name: str) -> list[tuple[int, str]]:
    """A key for sorting names that puts chip 2 before chip 10."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]
