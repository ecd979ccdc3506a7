"""`rankwise ps`, `stacks`, `why` and `doctor` in this process."""

import base64
import json
import os
import re
import select
import threading
import uuid
from collections.abc import Iterator, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import click
import pytest

from rankwise.cli import doctor, logs, why
from rankwise.cli.doctor import Severity
from rankwise.cli.main import invoke
from rankwise.cli.runs_here import (
    RunNotFound,
    answers,
    are_of_one_run,
    choose_agents,
    complete_run,
)
from rankwise.cli.stacks import render
from rankwise.drivers.real.hosting import signal_shield
from rankwise.launch.cluster import etcd_program
from rankwise.launch.control.addresses import shown_id
from rankwise.launch.control.client import RunAnswer, RunSummary, RunSuspended, RunUnreachable
from rankwise.launch.control.server import ControlRequest, ControlServer, Reply

MEETING = {"nproc": 2, "state": "meeting", "age_s": 65.0, "program": "train.py", "attempt": 0}
ALONE = MEETING | {
    "state": "running", "node_rank": 0, "nodes": 1, "first_rank": 0, "world_size": 2, "restarts": 0,
}  # fmt: skip
MEMBER = MEETING | {
    "state": "running", "attempt": 3, "round": 3, "node_rank": 1, "nodes": 4,
    "first_rank": 2, "world_size": 8, "restarts": 1,
}  # fmt: skip


@pytest.fixture
def status() -> dict[str, Any]:
    """What the agent says of itself."""
    return ALONE


@pytest.fixture
def is_secret() -> bool:
    """Whether others may not know the run's name."""
    return False


@pytest.fixture
def run_id(status: dict[str, Any], is_secret: bool) -> Iterator[str]:
    """The name of a run that answers while the test lasts."""
    name = f"test-{uuid.uuid4().hex[:12]}"

    def on_request(request: ControlRequest, reply: Reply) -> None:
        if request.ask == "status":
            reply.send({"run_id": name} | status)
        else:
            for rank in (1, 0):
                stacks = f'Thread 0x{rank:x} (most recent call first):\n  File "a.py", line 7 in f'
                reply.send({"rank": rank, "pid": 100 + rank, "stacks": stacks})
        reply.finish()

    end, until = os.pipe()
    with ControlServer(shown_id(name, is_secret=is_secret), on_request) as server:

        def turn() -> None:
            while end not in select.select([server.fileno(), end], [], [])[0]:
                server.on_readable()

        thread = threading.Thread(target=turn)
        thread.start()
        yield name
        os.write(until, b"x")
        thread.join(60)
    os.close(end)
    os.close(until)


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        (MEETING, ["-", "-", "0 of 2", "meeting", "-"]),
        (ALONE, ["-", "-", "0-1", "running", "0"]),
        (ALONE | {"nproc": 1, "world_size": 1}, ["-", "-", "0", "running", "0"]),
        (ALONE | {"restarts": 2, "restarts_max": 3}, ["-", "-", "0-1", "running", "2 of 3"]),
        (MEMBER, ["1 of 4", "3", "2-3 of 8", "running", "1"]),
        (MEMBER | {"nodes": 1, "node_rank": 0}, ["0 of 1", "3", "2-3 of 8", "running", "1"]),
    ],
)
def test_runs_are_listed_with_their_state_and_their_place(
    run_id: str, shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["ps"]) == 0

    header, *lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if run_id in line]
    cells = dict(zip(re.split(r"  +", header), re.split(r"  +", line), strict=True))
    # Other runs on this machine may have nodes, and rounds.
    told = {"NODE": "-", "ROUND": "-"} | cells
    assert list(told.values()) == [
        *shown[:2], run_id, str(os.getpid()), *shown[2:], "-", "-", "1 min 5 s", "train.py"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "status", [ALONE | {"workers": [{"rank": 0, "local_rank": 0, "pid": os.getsid(0)}]}]
)
def test_a_run_is_shown_with_what_its_ranks_use(
    run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["ps", "--json"]) == 0

    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (row,) = [row for row in rows if row["run_id"] == run_id]
    (worker,) = row["workers"]
    own_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert row["memory_bytes"] == worker["memory_bytes"] >= own_bytes * 0.9
    assert worker["cpu_s"] > 0
    assert row["cpu_percent"] >= 0


def test_runs_are_listed_for_programs(run_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["ps", "--json"]) == 0

    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"run_id": run_id, "pid": os.getpid(), **ALONE} in rows


def test_without_textual_the_command_that_installs_it_is_told(
    run_id: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rankwise.cli.top.find_spec", lambda _name: None)
    monkeypatch.setattr("rankwise.cli.top._is_on_terminal", lambda: True)
    monkeypatch.setattr("sys.executable", "/some where/python")

    assert invoke(["top", run_id]) == 1

    assert capsys.readouterr().err == (
        "rankwise top: error: the live view of rankwise top needs textual, which is not "
        "installed (install it: '/some where/python' -m pip install 'rankwise[tui]'; or print it "
        "once: rankwise top --once)\n"
    )


@pytest.mark.parametrize(
    "status",
    [
        {"state": "of the future", "nproc": "some"},
        ALONE | {"workers": [{"rank": 0, "local_rank": 0, "pid": 1, "state": "of the future"}]},
    ],
)
def test_top_shows_a_run_that_answers_in_other_words_as_one_that_does_not(
    run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["top", "--json", run_id]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["run_id"], row["pid"], row["state"]) == (run_id, os.getpid(), "silent")
    assert "of another version" in row["problem"]

    assert invoke(["top", "--once", run_id]) == 0
    assert "of another version of rankwise" in capsys.readouterr().out

    assert invoke(["top", "--interval=10ms"]) == 2
    assert "--interval: expected at least 100ms" in capsys.readouterr().err


@pytest.mark.parametrize("by", ["name", "beginning"])
def test_stacks_are_shown_and_equal_ones_once(
    run_id: str, by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["stacks", run_id if by == "name" else run_id[:-2]]) == 0

    assert capsys.readouterr().out == (
        "ranks 0-1 (pids 100, 101)\n"
        "Thread 0x0 (most recent call first):\n"
        '  File "a.py", line 7 in f\n'
    )


def test_stacks_are_shown_for_programs(run_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["stacks", "--json", run_id]) == 0

    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["rank"], row["pid"]) for row in rows] == [(0, 100), (1, 101)]


def test_stacks_of_py_spy_that_differ_in_numbers_only_are_shown_once() -> None:
    text = 'Process {pid}: python train.py\nThread {pid} (idle): "MainThread"\n    0x7f{pid} (libc)'
    ranks = [{"rank": n, "pid": 20 + n, "stacks": text.format(pid=20 + n)} for n in (0, 1)]

    assert render(ranks).startswith("ranks 0-1 (pids 20, 21)\nProcess 20: python train.py\n")
    assert render(ranks).count("MainThread") == 1


@pytest.mark.parametrize(
    "frame",
    [
        "    all_reduce (/x/site-packages/torch/distributed/distributed_c10d.py:3189)",
        "    gloo::wait() (/x/site-packages/torch/lib/libtorch_cpu.so)",
        '  File "/x/site-packages/torch/nn/modules/module.py", line 1 in _call_impl',
    ],
)
def test_what_goes_on_inside_of_torch_is_told_in_a_line(frame: str) -> None:
    lines = ["Thread 7", "    poll (libc.so.6)", frame, frame, "    step (/home/me/train.py:88)"]

    (shown,) = render([{"rank": 0, "pid": 20, "stacks": "\n".join(lines)}]).split("\n\n")

    assert shown.splitlines()[1:] == [*lines[:2], "  ... (2 frames of torch)", lines[-1]]


def test_without_py_spy_the_command_that_installs_it_is_told(
    run_id: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sys.executable", "/nowhere/python")

    assert invoke(["stacks", "--native", run_id]) == 1

    assert capsys.readouterr().err == (
        "rankwise stacks: error: --native needs py-spy, which is not installed "
        "(install it: /nowhere/python -m pip install py-spy)\n"
    )


def test_what_py_spy_complains_of_is_told(
    run_id: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    refusing = tmp_path / "py-spy"
    refusing.write_text("#!/bin/sh\necho 'Error: Permission Denied' >&2; exit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))

    assert invoke(["stacks", "--native", run_id]) == 1

    told = capsys.readouterr().err
    assert "py-spy cannot read process 100: Error: Permission Denied (it needs the right" in told


def test_a_rank_that_py_spy_cannot_read_does_not_hide_the_others(
    run_id: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    choosy = tmp_path / "py-spy"
    choosy.write_text(
        '#!/bin/sh\n[ "$4" = 101 ] && echo "frames of 101" && exit\n'
        'echo "No such process" >&2; exit 1\n'
    )
    choosy.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))

    assert invoke(["stacks", "--native", run_id]) == 0

    assert capsys.readouterr().out.split("\n\n") == [
        "rank 0 (pid 100)\n  py-spy cannot read process 100: No such process",
        "rank 1 (pid 101)\nframes of 101\n",
    ]


def test_of_what_was_the_last_lines_are_shown_and_all_that_follows(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    def piece(attempt: int, data: bytes) -> dict[str, Any]:
        name = {"rank": 0, "attempt": attempt, "stream": "stdout"}
        return {**name, "data": base64.b64encode(data).decode()}

    answer = [
        {"streams": 1}, piece(0, b"one\ntwo\nthree\n"), piece(1, b"four\nfive\n"),
    ]  # fmt: skip

    logs.show([(ALPHA, piece) for piece in answer], logs.LogPrinter(has_prefix=False), lines=1)

    assert capfdbinary.readouterr().out == b"three\nfour\nfive\n"


WAITING = {
    "is_stopped": False, "doing": "waits", "waits_for": "barrier #2 (a.py:6): rank 2 has not come",
    "frames": ["  ... (7 frames of rankwise)", '  File "a.py", line 6 in <module>'],
}  # fmt: skip
STUCK = {
    "is_stopped": False, "doing": "nothing", "waits_for": "",
    "frames": ['  File "a.py", line 5 in <module>'],
}  # fmt: skip


def test_why_tells_for_how_long_a_rank_is_awaited() -> None:
    stuck = STUCK | {"rank": 2, "pid": 9, "still_s": 0.6, "awaited_s": 41.0}

    told = why.render({"verdict": "rank 2 has not come to barrier #2"}, [stuck]).splitlines()

    assert told[1] == "rank 2 (pid 9), awaited for 41 s, innermost call first:"


def test_why_tells_the_verdict_and_where_each_rank_stands() -> None:
    verdict = "rank 2 has not come to barrier #2 (a.py:6), in which ranks 0-1 wait"
    ranks: list[dict[str, Any]] = [
        WAITING | {"rank": 0, "pid": 7, "still_s": 40.5},
        WAITING | {"rank": 1, "pid": 8, "still_s": 41.0},
        STUCK | {"rank": 2, "pid": 9, "still_s": 0.6},
    ]

    assert why.render({"verdict": verdict}, ranks).splitlines() == [
        verdict,
        "ranks 0-1 (pids 7, 8), in a collective call for 41 s, innermost call first:",
        "    waits for barrier #2 (a.py:6): rank 2 has not come",
        "    ... (7 frames of rankwise)",
        '    File "a.py", line 6 in <module>',
        "rank 2 (pid 9), no progress in the last 600 ms, innermost call first:",
        '    File "a.py", line 5 in <module>',
    ]


@pytest.mark.parametrize(
    ("doings", "told"),
    [
        (["computes", "advances"], "every rank makes progress"),
        (
            ["nothing", "transfers"],
            "rank 1 makes progress, and no call shows which rank is missing",
        ),
        (["nothing", "nothing"], "no rank makes progress, and no call shows which rank is missing"),
    ],
)
def test_without_a_verdict_why_tells_who_gets_on(doings: list[str], told: str) -> None:
    ranks = [
        STUCK | {"rank": rank, "pid": rank, "doing": doing, "frames": [], "still_s": 1}
        for rank, doing in enumerate(doings)
    ]

    lines = why.render({"verdict": ""}, ranks).splitlines()

    assert lines[0] == told
    assert "    no stack is available" in lines


def test_why_tells_which_ranks_are_stopped() -> None:
    silent = STUCK | {"frames": [], "still_s": 1}
    ranks = [silent | {"rank": 0, "pid": 7}, silent | {"rank": 1, "pid": 8, "is_stopped": True}]

    assert why.render({"verdict": ""}, ranks).splitlines()[1:] == [
        "rank 0 (pid 7), no progress in the last 1 s, innermost call first:",
        "    no stack is available",
        "rank 1 (pid 8), no progress in the last 1 s, innermost call first:",
        "    it is stopped by a signal (SIGSTOP) or a debugger; `kill -CONT` resumes it",
    ]


@pytest.mark.parametrize("command", ["stacks", "why", "logs", "stop"])
def test_an_unknown_run_is_told_with_those_there_are(
    run_id: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke([command, "nothing-like-it"]) == 2

    told = capsys.readouterr().err
    assert told.startswith(
        f"rankwise {command}: error: no active run is called 'nothing-like-it'; active:"
    )
    assert run_id in told


def test_a_process_that_holds_the_name_of_anothers_run_is_no_run(
    run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ControlServer(run_id, lambda _request, _reply: None, pid=1):
        assert invoke(["stacks", run_id]) == 0
        assert 'File "a.py", line 7 in f' in capsys.readouterr().out

        assert invoke(["ps", "--json"]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["pid"] for row in rows if row["run_id"] == run_id] == [os.getpid()]


NO_MATTER = (click.Context(click.Command("stacks")), click.Argument(["run"]))
ALPHA, BETA, BEST = (
    RunSummary(name, 10 + n, 0) for n, name in enumerate(["alpha", "beta", "best"])
)


def chosen(runs: Sequence[RunSummary], name: str | None) -> list[RunSummary]:
    return choose_agents(runs, name, {run: run.run_id for run in runs})


def test_a_run_is_chosen_by_name_beginning_or_pid_or_for_want_of_others() -> None:
    runs = [ALPHA, BETA, BEST]

    assert chosen(runs, "alpha") == [ALPHA]
    assert chosen(runs, "bet") == [BETA]
    assert chosen(runs, "12") == [BEST]
    assert chosen([BETA], None) == [BETA]


def test_a_run_whose_id_is_a_secret_is_chosen_by_it_all_the_same() -> None:
    hidden = RunSummary(shown_id("alpha", is_secret=True), 20, 0)

    assert hidden.run_id.startswith("run-")
    assert chosen([BETA, hidden], "alpha") == [hidden]


def test_a_run_whose_id_is_a_secret_is_told_by_it_and_not_by_what_others_see() -> None:
    hidden = [RunSummary(shown_id("alpha", is_secret=True), pid, 0) for pid in (20, 21)]
    names = {BETA: "beta", **dict.fromkeys(hidden, "alpha")}

    assert choose_agents([BETA, hidden[0]], "al", names) == [hidden[0]]
    for name in ("alpha", "alp"):
        assert choose_agents([BETA, *hidden], name, names) == hidden
    assert choose_agents(hidden, None, names) == hidden
    assert choose_agents([BETA, *hidden], "21", names) == [hidden[1]]


def test_agents_of_one_name_are_of_one_run_if_they_meet_at_one_place() -> None:
    alpha, other = (RunSummary("alpha", pid, 0) for pid in (20, 21))
    here, there = "embedded at h1:29400", "embedded at h2:29400"

    assert are_of_one_run(
        [RunAnswer(alpha, [{"place": here}]), RunAnswer(other, [{"place": here}])]
    )
    assert not are_of_one_run(
        [RunAnswer(alpha, [{"place": here}]), RunAnswer(other, [{"place": there}])]
    )
    assert not are_of_one_run(
        [RunAnswer(alpha, [{"place": ""}]), RunAnswer(other, [{"place": ""}])]
    )
    with pytest.raises(RunSuspended):
        are_of_one_run(
            [RunAnswer(alpha, [{"place": here}]), RunAnswer(other, RunSuspended("by Ctrl-Z"))]
        )


def test_why_of_two_agents_tells_one_verdict_and_all_ranks_of_this_machine() -> None:
    lines = [STUCK | {"rank": rank, "pid": rank, "still_s": 1} for rank in (0, 1)]
    first = {"verdict": "", "others": ["vm/b", "h2"], "silent": [], "ledger": "it is off"}
    second = {"verdict": "rank 2 has not come", "others": ["vm/a", "h2"], "silent": []}

    header, ranks = why.together([[first, lines[1]], [second, lines[0]]])

    assert header == second | {"others": ["h2"], "ledger": "it is off"}
    assert ranks == lines


@pytest.mark.parametrize("is_secret", [True])
def test_its_own_user_calls_a_run_by_the_beginning_of_a_secret_id(
    run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["stacks", run_id[:-2]]) == 0
    assert 'File "a.py", line 7 in f' in capsys.readouterr().out

    assert invoke(["stacks", "nothing-like-it"]) == 2
    assert run_id in capsys.readouterr().err

    names = [item.value for item in complete_run(*NO_MATTER, run_id[:8])]
    assert names == [run_id]


def test_an_empty_name_means_no_run() -> None:
    with pytest.raises(click.UsageError, match="the name of the run is empty"):
        chosen([BETA], "")


def test_an_exact_name_is_never_ambiguous() -> None:
    longer = RunSummary("alpha-2", 20, 0)

    assert chosen([ALPHA, longer], "alpha") == [ALPHA]


def test_no_choice_is_made_for_the_user() -> None:
    with pytest.raises(click.UsageError, match=r"several runs.*alpha \(pid 10\), beta \(pid 11\)"):
        chosen([ALPHA, BETA], None)
    with pytest.raises(
        RunNotFound, match=r"'be' could be any of: beta \(pid 11\), best \(pid 12\)"
    ):
        chosen([ALPHA, BETA, BEST], "be")
    with pytest.raises(RunNotFound, match="no run of yours is active"):
        chosen([], None)


def test_a_rank_without_answer_is_shown_as_such() -> None:
    assert render([{"rank": 3, "pid": 9, "stacks": ""}]) == "rank 3 (pid 9)\n  (no answer)"


def test_the_doctor_finds_this_machine_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["doctor"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(doctor.CHECKS)
    assert all(line.split()[0] in ("ok", "warning") for line in lines)


def test_the_doctor_exits_with_1_when_there_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (lambda: doctor.check_kernel("4.9.0"),))

    assert invoke(["doctor"]) == 1
    assert capsys.readouterr().out == "problem  kernel  Linux 4.9.0; 5.4 or newer is needed\n"


def test_the_doctor_tells_whether_the_simulator_is_compiled(tmp_path: Path) -> None:
    kernel = tmp_path / "sim" / "kernel"
    kernel.mkdir(parents=True)
    (kernel / "simulator.py").touch()
    assert "plain Python" in doctor.check_simulator(tmp_path).text

    (kernel / f"simulator{EXTENSION_SUFFIXES[0]}").touch()
    assert "is compiled" in doctor.check_simulator(tmp_path).text


def test_the_doctor_says_what_to_do(tmp_path: Path) -> None:
    findings = [
        doctor.check_python((3, 9)),
        doctor.check_proc(str(tmp_path)),
        doctor.check_open_files(256),
        doctor.check_processes(100),
        doctor.check_shared_memory(tmp_path / "gone"),
        doctor.check_memory_accounting(str(tmp_path)),
    ]

    assert [finding.verdict for finding in findings] == [
        Severity.PROBLEM,
        Severity.PROBLEM,
        Severity.WARNING,
        Severity.WARNING,
        Severity.WARNING,
        Severity.WARNING,
    ]
    assert findings[2].text == "at most 256; many ranks may need more: ulimit -n 4096"


def test_the_doctor_tells_whether_a_member_of_an_own_etcd_can_be_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    etcd = tmp_path / "etcd"
    monkeypatch.setattr(etcd_program, "has_certificates", lambda: True)
    assert doctor.check_own_etcd(str(tmp_path)).verdict is Severity.OK  # none is needed

    etcd.write_text("#!/bin/sh\necho etcd Version: 3.5.4")
    etcd.chmod(0o700)
    refused = doctor.check_own_etcd(str(tmp_path))
    etcd.write_text("#!/bin/sh\necho etcd Version: 3.5.6")
    fit = doctor.check_own_etcd(str(tmp_path))
    monkeypatch.setattr(signal_shield, "_ARCHITECTURES", {})
    unshielded = doctor.check_own_etcd(str(tmp_path))

    assert (refused.verdict, fit.verdict) == (Severity.WARNING, Severity.OK)
    assert "3.5.4, which may corrupt" in refused.text
    assert "a member of a run's own" in fit.text
    assert unshielded.verdict is Severity.WARNING
    assert unshielded.text.startswith("seccomp is refused")


def test_the_doctor_finds_the_memory_accounting_that_runs_use(tmp_path: Path) -> None:
    own, group = tmp_path / "proc" / "self", tmp_path / "sys" / "fs" / "cgroup" / "user" / "run"
    own.mkdir(parents=True)
    group.mkdir(parents=True)
    (own / "cgroup").write_text("7:cpu,cpuacct:/x\n0::/user/run\n")
    (own / "mountinfo").write_text("41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    (group / "memory.events").write_text("oom_kill 0\n")

    found = doctor.check_memory_accounting(str(tmp_path))

    assert found.verdict is Severity.OK
    assert str(group) in found.text


def test_where_no_agent_has_an_answer_it_is_told_what_each_has_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    heard = [(ALPHA, RunUnreachable("its ranks are 0 to 1")), (ALPHA, RunUnreachable("2 to 3"))]

    with pytest.raises(RunUnreachable, match="2 to 3"):
        list(answers(heard, tells=False))

    assert capsys.readouterr().err == "rankwise: its ranks are 0 to 1\n"
