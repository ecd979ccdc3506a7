"""What users of other launchers type, and what it is called here."""

import itertools
import os
import shlex
from collections.abc import Collection, Iterable, Sequence

OPTIONS_ELSEWHERE = {
    **dict.fromkeys(
        (
            "-n", "-np", "--n", "--np", "--nprocs", "--procs", "--num-procs", "--num-processes",
            "--num-workers", "--ntasks", "--ntasks-per-node", "--gpus", "--num-gpus", "--ngpus",
            "--gpus-per-node", "--devices", "--ranks", "--world-size",
        ),
        "--nproc-per-node",
    ),
    **dict.fromkeys(("-N", "--nodes", "--num-nodes", "--num-machines"), "--nnodes"),
    **dict.fromkeys(("--machine-rank", "--nodeid"), "--node-rank"),
    "--main-process-ip": "--master-addr",
    "--main-process-port": "--master-port",
    "--alone": "--standalone", "--seeds": "--explore", "--topology": "--on sim:MACHINE",
    **dict.fromkeys(("--max-time", "--time", "--time-limit"), "--timeout"),
}  # fmt: skip
"""Options of mpirun, srun, accelerate, deepspeed, Lightning and `rankwise sim`, with those of
`rankwise run` that do the same."""

_SCRIPTS_OWN = ("--help", "--module", "--log-dir", "--role", "--quiet", "--on", "--preload")
"""Options of ours that programs often have for themselves."""


def option_meant(name: str) -> str | None:
    """Our option for one that another launcher has; None if it is none."""
    return OPTIONS_ELSEWHERE.get(name.replace("_", "-"))


def note_on_options_of_script(
    script: str, words: Iterable[str], ours: Collection[str], given: Collection[str]
) -> str | None:
    """The notice for options of ours that stand after the script, where they belong to the script.

    Args:
        script: the script.
        words: the script's own words.
        ours: the names of our options.
        given: those that stand before the script as well, and so are not mistaken.
    """
    names = [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]
    found = [
        name
        for name in dict.fromkeys(names)
        if name in ours and name not in given and name not in _SCRIPTS_OWN
    ]
    if not found:
        return None
    told = ", ".join(found)
    if len(found) == 1:
        return f"{told} is after {script}, which gets it; for rankwise, write it before"
    return f"{told} stand after {script}, which gets them; for rankwise, write them before"


def hint_on_command(words: Sequence[str], commands: Iterable[str]) -> str | None:
    """The probable meaning of a command that does not exist, and the words after it."""
    from rankwise.base.suggestions import nearest  # noqa: PLC0415  # only for mistakes

    if words[0].endswith(".py") or os.path.isfile(words[0]):
        return f"write {shlex.join(['rankwise', 'run', *_options_first(words)])}"
    meant = nearest(words[0], commands)
    return f"did you mean rankwise {meant}?" if meant else None


def _options_first(words: Sequence[str]) -> list[str]:
    """The words with the options of `rankwise run` among them, and their values, in front."""
    from rankwise.launch.options import FLAG, OPTIONS  # noqa: PLC0415  # only for mistakes

    takes_value = {option.flag: option.kind is not FLAG for option in OPTIONS}
    first: list[str] = []
    rest: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, equals, _ = word.partition("=")
        flag = name.replace("_", "-")
        if flag not in takes_value or name in _SCRIPTS_OWN:
            rest.append(word)
            continue
        first.append(word)
        if takes_value[flag] and not equals:
            first += itertools.islice(remaining, 1)
    return first + rest
