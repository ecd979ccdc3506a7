"""The `rankwise` command in this process: help, errors, completion. No worker is started."""

import json
import os
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from rankwise.base.failure import (
    TIME_LIMIT_SIGNAL,
    ExitStatus,
    Failure,
    FailureCause,
    Outcome,
    OutcomeStatus,
)
from rankwise.base.units import SECOND, Instant
from rankwise.cli.main import SUBCOMMANDS, command_line, invoke
from rankwise.cli.run import RUN_OPTIONS, exit_code
from rankwise.drivers.virtual.gang_simulator import GangSimulator
from rankwise.drivers.virtual.random_plans import random_plan
from rankwise.launch.options import GROUPS, OPTIONS

LINES_OF_A_SCREEN = 24


def completions(*words: str) -> list[str]:
    completer = ShellComplete(command_line, {}, "rankwise", "_RANKWISE_COMPLETE")
    return [
        item.value if item.type == "plain" else f"<{item.type}>"
        for item in completer.get_completions(list(words[:-1]), words[-1])
    ]


def test_the_help_lists_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["--help"]) == 0

    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in SUBCOMMANDS)


@pytest.mark.parametrize("name", list(SUBCOMMANDS))
def test_every_subcommand_can_be_loaded_and_tells_its_use(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke([name, "--help"]) == 0

    shown = capsys.readouterr().out
    assert shown.startswith(f"Usage: rankwise {name}")


def test_nothing_but_the_name_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke([]) == 2

    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("Usage: rankwise ")
    assert "error" not in told.err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["--version"]) == 0
    assert capsys.readouterr().out.startswith("rankwise 0.")


def test_help_of_run_has_twelve_options_on_the_first_screen_and_fits_three(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    invoke(["run", "--help"])

    lines = capsys.readouterr().out.splitlines()
    explained = [line for line in lines[:LINES_OF_A_SCREEN] if line.startswith("  -")]
    assert len(explained) == 12
    assert len(lines) <= 3 * LINES_OF_A_SCREEN
    assert all(option.flag in " ".join(lines) for option in OPTIONS)
    assert "  rankwise run --nproc-per-node 4 train.py --epochs 3" in lines


def test_help_all_of_run_explains_all_options_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["run", "--help-all"]) == 0

    shown = " ".join(capsys.readouterr().out.split())
    assert all(f"{group}:" in shown for group in GROUPS)
    for option in RUN_OPTIONS:
        assert option.flag.long in shown
        assert all(variable in shown for variable in option.variables)


def test_every_option_of_run_is_completed() -> None:
    assert {option.flag for option in OPTIONS} | {"--help-all"} <= set(completions("run", "--"))


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["run", "--nproc-per-node", "x y", "a.py"]) == 2

    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == (
        "rankwise run: error: --nproc-per-node is 'x y', expected a number, auto, cpu, gpu or xpu\n"
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["rnu"], "rankwise: error: no such command 'rnu'"),
        (["run"], "rankwise run: error: no script given (try 'rankwise run --help')\n"),
        (["run", "--max-r", "x", "a"], "rankwise run: error: --max-restarts: 'x' is not a valid "),
        (["run", "--frob", "a"], "rankwise run: error: no such option: --frob"),
        (["ps", "--frob"], "rankwise ps: error: no such option"),
        (["completion", "tcsh"], "rankwise completion: error: SHELL: 'tcsh' is not one of"),
    ],
)
def test_errors_name_the_command_and_exit_with_2(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(words) == 2
    told = capsys.readouterr().err
    assert told.startswith(line)
    assert told.count("\n") == 1


def test_an_error_is_one_line_whatever_a_name_is_made_of(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert invoke(["run", "--rdzv-id", "a/b", os.fsdecode(b"caf\xe9\x1b[31m\n.py")]) == 2

    assert capfd.readouterr().err.startswith(
        r"rankwise run: error: script 'caf\xe9\x0a.py' does not exist in"
    )


def test_options_are_completed_with_dashes_and_once() -> None:
    assert completions("run", "--nproc") == ["--nproc-per-node"]
    assert completions("run", "--rdzv") == [
        "--rdzv-id",
        "--rdzv-own-etcd",
        "--rdzv-once",
        "--rdzv-backend",
        "--rdzv-endpoint",
        "--rdzv-conf",
    ]


def test_choices_are_completed() -> None:
    assert completions("run", "--start-method", "s") == ["subprocess", "spawn"]
    assert completions("run", "--nproc-per-node", "2", "--numa-binding", "e") == ["exclusive"]
    assert completions("completion", "z") == ["zsh"]
    assert completions("run", "--on", "r") == ["ray"]


def test_options_of_nested_commands_are_completed() -> None:
    assert completions("manifest", "k") == ["kubernetes"]
    assert completions("manifest", "kubernetes", "--etcd") == ["--etcd-image", "--etcd-storage"]
    assert completions("manifest", "kubernetes", "--output", "jo") == ["<file>"]


def test_subcommands_scripts_and_their_arguments_are_completed() -> None:
    assert completions("ru") == ["run"]
    assert completions("run", "--tee", "3", "tr") == ["<file>"]
    assert completions("run", "train.py", "da") == ["<file>"]
    assert completions("run", "--log-dir", "lo") == ["<dir>"]


def test_options_of_the_script_are_not_taken_for_ours() -> None:
    assert completions("run", "train.py", "--") == []
    assert completions("run", "-m", "mypackage.train", "--log") == []
    assert completions("run", "--nproc-per-node", "2", "--log-d") == ["--log-dir"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_call_the_command(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["completion", shell]) == 0
    assert "_RANKWISE_COMPLETE" in capsys.readouterr().out


def test_a_shell_that_is_not_named_is_asked_for_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert invoke(["completion"]) == 2

    assert capsys.readouterr().err == (
        "rankwise completion: error: missing argument '{bash|zsh|fish}', choose from bash, zsh, "
        "fish (try 'rankwise completion --help')\n"
    )


def test_nodes_that_are_alone_are_drawn_as_clusters_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["sim", "cluster", "--alone", "--random", "--seeds", "20"]) == 0

    told = capsys.readouterr().out
    assert told.startswith("20 clusters in ")
    assert told.endswith("; 0 broken\n")

    assert invoke(["sim", "cluster", "--alone", "--random", "--seed", "17"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "nodes             1, alone",
        "verdict           succeeded",
        "rounds, restarts  3, 2",
    ]
    assert len(lines) == 5

    assert invoke(["sim", "cluster", "--alone", "--nproc-per-node", "3", "--plan-only"]) == 0
    assert '"is_alone": true' in capsys.readouterr().out

    assert invoke(["sim", "cluster", "--alone", "--nodes", "3"]) == 2
    assert "nodes is 3, expected 1 where is_alone is true" in capsys.readouterr().err


def test_a_drawn_cluster_takes_no_sizes_and_names_those_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert invoke(["sim", "cluster", "--random", "--nodes", "3", "--spares", "0"]) == 2

    assert capsys.readouterr().err == (
        "rankwise sim cluster: error: --random draws the whole plan from the seed (leave out "
        "--nodes, --spares)\n"
    )


def test_a_fault_of_a_cluster_is_written_as_one_of_simulated_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    faults = ("--faults", "kill:node=1,at=10s,back_after=4s", "--faults=leave:node=0,at=20s")

    assert invoke(["sim", "cluster", "--nnodes", "2:3", "--spares=1", *faults, "--plan-only"]) == 0

    plan = json.loads(capsys.readouterr().out)
    assert plan["nodes"] == 4
    assert plan["faults"] == [
        {"what": "kill-agent", "at": 10 * SECOND, "node": 1, "back_after": 4 * SECOND},
        {"what": "leave", "at": 20 * SECOND, "node": 0},
    ]


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        (["kil:node=1,at=1s"], "--faults kil:node=1,at=1s: there is no fault 'kil' (did you mean"),
        (["kill:node=1,at=1"], "kill:node=1,at=1: at is '1', expected a duration with its unit"),
        (["kill:node"], "--faults kill:node: 'node' is not a field, expected NAME=VALUE"),
        (["nowhere"], "--faults nowhere: neither a file nor a fault; expected one"),
        (["a.yaml", "b.yaml"], "--faults names the plans a.yaml and b.yaml, expected one"),
    ],
)
def test_a_fault_of_a_cluster_that_is_none_is_refused(
    faults: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["sim", "cluster", *(f"--faults={each}" for each in faults)]) == 2

    error = capsys.readouterr().err
    assert error.startswith("rankwise sim cluster: error: ")
    assert told in error


@pytest.mark.parametrize(
    "words",
    [
        ["sim", "cluster", "--standalone", "--nproc_per_node", "3", "--plan_only"],
        ["sim", "topology", "default", "--set", "system.sips.count=2"],
        ["sim", "bench", "ccl_allreduce", "--timing_only", "--max_time", "1m"],
    ],
)
def test_every_command_takes_options_with_underscores(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(words) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "no.py"], "rankwise run: error: script 'no.py' does not exist in "),
        (["diff", "no.py"], "rankwise diff: error: script 'no.py' does not exist in "),
        (["sim", "run", "no.py"], "rankwise sim run: error: program 'no.py' does not exist in "),
        (["sim", "bench", "no"], "rankwise sim bench: error: there is no bench 'no' (there are "),
        (["sim", "bench", "--topology", "no"], "--topology is given, but no bench; "),
        (["sim", "topology", "no"], "rankwise sim topology: error: "),
        (["run", "--topology=pod64", "no.py"], "did you mean --on sim:MACHINE?"),
        (["run", "--max-time", "3s", "no.py"], "did you mean --timeout?"),
    ],
)
def test_every_command_says_by_its_whole_name_what_it_misses(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(words) == 2

    assert told in capsys.readouterr().err


def test_an_empty_journal_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = tmp_path / "journal.jsonl"
    journal.write_text("\n")

    assert invoke(["replay", str(journal)]) == 2

    told = capsys.readouterr().err
    assert "holds no entry (is it the journal.jsonl of a run" in told


def test_a_journal_without_end_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert invoke(["replay", "/dev/zero"]) == 2

    assert "/dev/zero has a line of more than 16 MiB, or no end" in capfd.readouterr().err


def test_a_journal_that_was_cut_off_is_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = tmp_path / "journal.jsonl"
    journal.write_text('{"at":1,"machine":"gang","stimulus":{"type":"Started"}}\n{"at":2,"mach')

    assert invoke(["replay", str(journal)]) == 2

    assert "ends in the middle of line 2 (its writer was killed" in capsys.readouterr().err


@pytest.fixture
def journal_of_agent(tmp_path: Path) -> tuple[Path, list[bytes]]:
    """A file for a journal, and the lines of one whose middle has a fact with two orders."""
    lines = GangSimulator(3).run_plan(random_plan(3)).journal.splitlines(keepends=True)
    return tmp_path / "journal.jsonl", lines


def place_of_orders(lines: list[bytes], count: int) -> int:
    """Where a fact stands that so many orders follow, at least."""
    return next(
        place
        for place, line in enumerate(lines)
        if b'"stimulus"' in line
        and all(b'"effect"' in each for each in lines[place + 1 : place + 1 + count])
    )


def test_a_journal_that_ends_between_a_fact_and_its_orders_is_said_to_end_there(
    journal_of_agent: tuple[Path, list[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    journal, lines = journal_of_agent
    place = place_of_orders(lines, 2)
    told = []
    for kept in (1, 2):
        journal.write_bytes(b"".join(lines[: place + kept]))
        assert invoke(["replay", str(journal)]) == 0
        told.append(capsys.readouterr().err)

    assert all(each.startswith("the journal ends after ") for each in told)
    assert "orders that follow" in told[0]
    assert told[0] != told[1]


def test_an_order_that_is_missing_inside_a_journal_is_a_different_decision(
    journal_of_agent: tuple[Path, list[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    journal, lines = journal_of_agent
    place = place_of_orders(lines, 2)
    journal.write_bytes(b"".join(lines[: place + 2] + lines[place + 3 :]))

    assert invoke(["replay", str(journal)]) == 1

    assert "decides differently now" in capsys.readouterr().err


def test_an_order_that_is_no_longer_given_is_a_different_decision_at_the_end_too(
    journal_of_agent: tuple[Path, list[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    journal, lines = journal_of_agent
    place = place_of_orders(lines, 1)
    journal.write_bytes(b"".join([*lines[: place + 2], lines[place + 1]]))

    assert invoke(["replay", str(journal)]) == 1

    assert "decides differently now" in capsys.readouterr().err


def test_an_unknown_machine_is_told_with_all_that_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()

    codes = [invoke(["run", "--on", f"sim:{name}", str(script)]) for name in ("foo", "h200x")]

    assert codes == [2, 2]
    nothing_like_it, nearly = capsys.readouterr().err.splitlines()
    assert "there is no machine, preset or topology file 'foo' (machines are a100-40gb, " in (
        nothing_like_it
    )
    assert "; presets are default, " in nothing_like_it
    assert nearly.endswith("file 'h200x' (did you mean h200?)")


def outcome(status: OutcomeStatus, code: int | None = None, stop: int | None = None) -> Outcome:
    failure = Failure(
        local_rank=0,
        attempt=0,
        cause=FailureCause.EXITED,
        at=Instant(0),
        exit=None if code is None else ExitStatus(code),
    )
    failures = () if status is OutcomeStatus.SUCCEEDED else (failure,)
    return Outcome(status=status, attempts=1, failures=failures, stop_signal=stop)


@pytest.mark.parametrize(
    ("became", "code"),
    [
        (outcome(OutcomeStatus.SUCCEEDED), 0),
        (outcome(OutcomeStatus.FAILED, code=7), 7),
        (outcome(OutcomeStatus.FAILED, code=-9), 137),
        (outcome(OutcomeStatus.FAILED, code=0), 1),
        (outcome(OutcomeStatus.FAILED, code=None), 1),
        (outcome(OutcomeStatus.STOPPED, code=-15, stop=15), 143),
        (outcome(OutcomeStatus.STOPPED, code=0, stop=2), 130),
        (outcome(OutcomeStatus.STOPPED, code=0, stop=TIME_LIMIT_SIGNAL), 124),
        (outcome(OutcomeStatus.STOPPED), 1),
    ],
)
def test_the_exit_code_tells_what_became_of_the_run(became: Outcome, code: int) -> None:
    assert exit_code(became) == code


def test_completion_survives_words_that_cannot_be_read() -> None:
    assert completions("run", "--frob", "x", "--nnod") == ["--nnodes"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["ok.py"], "rankwise: error: no such command 'ok.py', write rankwise run ok.py"),
        (
            ["ok.py", "--lr", "3", "--nproc_per_node", "2", "--tee=3", "--log-dir", "x"],
            "write rankwise run --nproc_per_node 2 --tee=3 ok.py --lr 3 --log-dir x (try",
        ),
        (["runn", "ok.py"], "rankwise: error: no such command 'runn', did you mean rankwise run?"),
        (["stack"], "rankwise: error: no such command 'stack', did you mean rankwise stacks?"),
        (["frobnicate"], "rankwise: error: no such command 'frobnicate' (try"),
        (
            ["--nproc-per-node", "2", "ok.py"],
            "no such option: --nproc-per-node, write rankwise run --nproc-per-node 2 ok.py (try",
        ),
        (["run", "--nproc", "2", "python", "ok.py"], "(leave out python: rankwise run ok.py)\n"),
        (["run", "python3.11", "ok.py"], "(leave out python3.11: rankwise run ok.py)\n"),
        (["run", sys.executable, "ok.py"], "is a Python interpreter (leave out "),
        (
            ["run", "ok.py --lr 3"],
            "(the quotes make it one word: write ok.py --lr 3 without them)\n",
        ),
        (
            ["run", "python ok.py --lr 3"],
            "(leave out python and the quotes: rankwise run ok.py --lr 3)\n",
        ),
        (["run", "--rdzv-backend", "ectd", "ok.py"], "is 'ectd', did you mean etcd?\n"),
        (["run", "--signals-to-handle=SIGTREM", "ok.py"], "(did you mean SIGTERM?)\n"),
        (["run", "book.ipynb"], "is a notebook (call rankwise.run("),
        (["run", "lost.ipynb"], "lost.ipynb' does not exist in "),
    ],
)
def test_words_of_other_launchers_lead_to_ours(
    words: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "ok.py").touch()
    (tmp_path / "book.ipynb").touch()
    monkeypatch.chdir(tmp_path)

    assert invoke(words) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "lost.ipynb to run a module" not in error
    assert error.count("\n") == 1
