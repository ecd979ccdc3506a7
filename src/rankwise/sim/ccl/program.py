"""The vocabulary of collective algorithms, for modules of users: see `core.collectives.program`."""

from rankwise.core.collectives.program import (
    Copy,
    Fold,
    Instruction,
    Program,
    Receive,
    Send,
    Span,
    Task,
    part_of,
)

__all__ = [
    "Copy",
    "Fold",
    "Instruction",
    "Program",
    "Receive",
    "Send",
    "Span",
    "Task",
    "part_of",
]
