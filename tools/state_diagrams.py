"""Prints docs/development/state-machines.md, made from the tables of transitions."""

from enum import StrEnum
from typing import Any

from rankwise.core.agent import transitions as of_agents
from rankwise.core.gang import transitions as of_gangs
from rankwise.core.tree import transitions as of_child_groups

HEAD = """\
# State machines

For developers. `tools/state_diagrams.py` makes the diagrams from the tables in the modules. A test
explores small machines with all possible facts, and finds exactly these transitions. A fact that is
not shown changes no phase. One fact may lead through several phases at once. Facts have the names
of the [journal](journal.md); where the class has another name, it follows in parentheses.
"""
TABLES: tuple[tuple[str, str, Any], ...] = (
    ("Gang", "the workers of one node, which start and end together", of_gangs),
    ("Agent", "one node of a run; `Answer` is any answer of the store", of_agents),
    ("Child group", "the children of a chip worker", of_child_groups),
)


def diagram(transitions: dict[StrEnum, dict[StrEnum, tuple[type, ...]]]) -> str:
    """The transitions in the language of Mermaid, which draws them."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {next(iter(transitions))}"]
    for before, ways in transitions.items():
        for after, facts in ways.items():
            names = ", ".join(map(_label, facts))
            lines.append(f"    {before} --> {after}: {names}")
    return "\n".join([*lines, "```"])


def _label(fact: type) -> str:
    config = getattr(fact, "__struct_config__", None)  # `Answer` stands for several: it has none
    name = fact.__name__
    return name if config is None or config.tag == name else f"{config.tag} ({name})"


def document() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, what, module in TABLES:
        path = module.__name__.replace(".", "/").removeprefix("rankwise/") + ".py"
        parts.append(f"## {name}\n\n`{path}`: {what}.\n\n{diagram(module.TRANSITIONS)}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(document(), end="")
