"""The failure report: why the gang failed, told so that the next step is clear.

`render_plain` and `print_report` turn an outcome into text; `one_line` tells a failure in a
notice. Between outcome and text stands a value, `FailureReport`: `compose_report` chooses its
words, `plain_text` and `boxed_text` lay it out.

Loaded on demand, since a run that succeeds needs none of it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankwise.launch.failure_report.composing import (
        blocks_of_ranks,
        compose_report,
        lines_of_standing,
    )
    from rankwise.launch.failure_report.hints import hint_for
    from rankwise.launch.failure_report.model import FailureReport, ReportContext, RootCause
    from rankwise.launch.failure_report.rendering import (
        Look,
        boxed_text,
        lines_of_blocks,
        look_of,
        plain_text,
        write_report,
    )
    from rankwise.launch.failure_report.reporting import print_report, render_plain
    from rankwise.launch.failure_report.words import (
        describe_signal,
        exit_in_words,
        headline,
        one_line,
    )

__all__ = [
    "FailureReport",
    "Look",
    "ReportContext",
    "RootCause",
    "blocks_of_ranks",
    "boxed_text",
    "compose_report",
    "describe_signal",
    "exit_in_words",
    "headline",
    "hint_for",
    "lines_of_blocks",
    "lines_of_standing",
    "look_of",
    "one_line",
    "plain_text",
    "print_report",
    "render_plain",
    "write_report",
]

_MODULES = {
    "composing": ("blocks_of_ranks", "compose_report", "lines_of_standing"),
    "hints": ("hint_for",),
    "model": ("FailureReport", "ReportContext", "RootCause"),
    "rendering": ("Look", "boxed_text", "lines_of_blocks", "look_of", "plain_text", "write_report"),
    "reporting": ("print_report", "render_plain"),
    "words": ("describe_signal", "exit_in_words", "headline", "one_line"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value
