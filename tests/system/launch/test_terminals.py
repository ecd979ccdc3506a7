"""On a terminal: prompts without an end, Ctrl-Z, and a shell that goes on with the job."""

import json
import re
import shlex
import uuid
from pathlib import Path

from running import RANKWISE, OnTerminal, wait_until
from running import run as run_rankwise

CTRL_Z = "\x1a"

ASKING = """
print("Loading model ... ", end="", flush=True)
breakpoint()
print("and on")
"""


def test_a_prompt_is_shown_on_a_terminal_and_can_be_answered(tmp_path: Path) -> None:
    program = tmp_path / "ask.py"
    program.write_text(ASKING)

    with OnTerminal(*RANKWISE, "run", "--standalone", str(program), cwd=tmp_path) as run:
        run.wait_for("]:Loading model ... ")
        run.wait_for("]:(Pdb) ")
        run.type("p 6 * 7\n")
        run.wait_for("42")
        run.wait_for("]:(Pdb) ")
        run.type("c\n")
        run.wait_for("and on")
        assert run.process.wait(60) == 0


COUNTING = """
import os, time
print(f"rank is {os.getpid()}.", flush=True)
step = 0
while True:
    step += 1
    print(f"step {step}", flush=True)
    time.sleep(0.05)
"""


def test_ctrl_z_stops_the_ranks_and_fg_lets_them_go_on(tmp_path: Path) -> None:
    program = tmp_path / "count.py"
    program.write_text(COUNTING)
    words = ("--standalone", "--nproc-per-node", "2", "--hang-timeout", "5s", "--timeout", "60s")

    with OnTerminal("bash", "--norc", "-i", cwd=tmp_path) as shell:
        shell.type(f"{shlex.join((*RANKWISE, 'run', *words, str(program)))}\n")
        said = shell.wait_for("step 3\r\n") + shell.wait_for("step 3\r\n")
        ranks = [int(pid) for pid in re.findall(r"rank is (\d+)\.", said)]

        shell.type(CTRL_Z)
        shell.wait_for("Stopped")
        wait_until(lambda: [state_of(pid) for pid in ranks] == ["T", "T"])

        shell.type("fg\n")
        shell.wait_for("step")
        shell.type(CTRL_Z)
        shell.wait_for("Stopped")
        wait_until(lambda: [state_of(pid) for pid in ranks] == ["T", "T"])

        shell.type("bg; kill %1\n")
        shell.wait_for("rankwise: stopped by SIGTERM")
        shell.type("exit\n")


def test_a_suspended_run_is_called_so_and_can_be_stopped(tmp_path: Path) -> None:
    program = tmp_path / "count.py"
    program.write_text(COUNTING)
    name = f"suspended-{uuid.uuid4().hex}"
    words = (*RANKWISE, "run", "--standalone", "--rdzv-id", name, str(program))

    with OnTerminal("bash", "--norc", "-i", cwd=tmp_path) as shell:
        shell.type(f"{shlex.join(words)}\n")
        shell.wait_for("step 3\r\n")
        shell.type(CTRL_Z)
        shell.wait_for("Stopped")
        rows = map(json.loads, run_rankwise("ps", "--json").lines)
        (state,) = [row["state"] for row in rows if row["run_id"] == name]
        shown = run_rankwise("top", name, "--once").stdout
        asked = run_rankwise("why", name, "--timeout", "1000")  # it says so at once
        stopped = run_rankwise("stop", name)
        shell.wait_for("rankwise: stopped by SIGTERM")
        shell.type("exit\n")

    assert state == "suspended"
    assert "it is suspended, as by Ctrl-Z" in " ".join(shown.split())
    assert asked.code == 1
    assert re.search(
        r"is suspended, as by Ctrl-Z \(resume it: `fg` .*`kill -CONT \d+`\)", asked.stderr
    )
    assert stopped.code == 0, stopped
    assert stopped.lines[0].startswith(f"resuming {name} (pid ")
    assert stopped.lines[-1] == "stopped"


def state_of(pid: int) -> str:
    """The state of a process, `T` if it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
