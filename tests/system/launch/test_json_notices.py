"""`--log-format json`: one object for each notice, round, failure and restart."""

import json
import socket
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from etcd_servers import free_ports
from running import run, start, write_program

pytestmark = pytest.mark.system

FAILS_ONCE = """
import os
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("not this time")
"""
FAILS = "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('never')\n"


def notices(stderr: str) -> list[dict[str, Any]]:
    """The objects among what ranks have written."""
    return [json.loads(line) for line in stderr.splitlines() if line.startswith("{")]


def test_restarts_and_failures_are_objects_with_rank_attempt_node_and_time(tmp_path: Path) -> None:
    script = write_program(tmp_path, FAILS)
    words = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")

    done = run("run", *words, "--log-format", "json", script)

    told = {each["event"]: each for each in notices(done.stderr)[::-1]}
    assert done.code == 1
    assert "rankwise: " not in done.stderr
    assert (told["restart"]["rank"], told["restart"]["attempt"]) == (1, 0)
    failure = told["failure"]
    assert (failure["rank"], failure["attempt"], failure["root_cause"]) == (1, 1, True)
    assert failure["error"] == "ValueError: never"
    assert "raise ValueError" in failure["traceback"]
    assert told["end"]["status"] == "failed"
    for each in told.values():
        assert each["node"] == socket.gethostname()
        assert datetime.fromisoformat(each["time"]).utcoffset() is not None


def test_rounds_are_objects_on_every_node(tmp_path: Path) -> None:
    script = write_program(tmp_path, FAILS_ONCE)
    words = ("run", "--nnodes", "2", "--max-restarts", "1", "--log-format", "json")
    meeting = ("--rdzv-backend", "embedded", "--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}")
    with start(*words, *meeting, script) as one, start(*words, *meeting, script) as other:
        done = [one.finish(), other.finish()]

    assert [each.code for each in done] == [0, 0], done
    for node in done:
        events = [each["event"] for each in notices(node.stderr)]
        rounds = [each for each in notices(node.stderr) if each["event"] == "round"]
        assert events == ["round", "round-over", "round", "end"]
        assert [each["round"] for each in rounds] == [0, 1]
        hosts = rounds[1]["hosts"]  # two agents of one host are told apart by their ids
        assert [host.partition("/")[0] for host in hosts] == [socket.gethostname()] * 2
        assert len(set(hosts)) == 2
        assert {each["node"] for each in notices(node.stderr)} == {hosts[rounds[1]["node_rank"]]}
        assert "ValueError" in rounds[1]["why"]
