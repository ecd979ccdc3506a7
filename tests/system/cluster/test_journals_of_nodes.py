"""The journal of each of several nodes, read again by `rankwise replay`."""

import re
from pathlib import Path

import pytest
from etcd_servers import free_ports
from running import Running, run, start, write_program

pytestmark = pytest.mark.system


def test_the_journals_of_two_nodes_tell_the_same_rounds_and_the_same_root_cause(
    tmp_path: Path,
) -> None:
    script = write_program(
        tmp_path, "import rankwise\nif rankwise.rank() == 3: raise ValueError('bad shape')"
    )
    (port,) = free_ports(1)
    logs = tmp_path / "logs"

    def node(number: int) -> Running:
        return start(
            *("run", "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "2"),
            *("--master-addr", "127.0.0.1", "--master-port", str(port), "--max-restarts", "1"),
            *("--log-dir", logs, script),
        )

    with node(0) as first, node(1) as second:
        ends = [first.finish(), second.finish()]
    journals = sorted(logs.glob("*/journal.jsonl"))
    both, *each = (run("replay", place) for place in (logs, *journals))

    assert [end.code for end in ends] == [1, 1], ends
    assert [done.code for done in each] == [0, 0], [done.stderr for done in each]
    for done in each:
        rounds = re.findall(r" s  running +(\d) running ", done.stdout)
        assert sorted(set(rounds)) == ["0", "1"], done.stdout
        assert re.search(r" s  finished +\d closed ", done.lines[-2]), done.stdout
        assert done.lines[-1] == "root cause: rank 3 failed: ValueError: bad shape"
    assert sorted(" leads " in "".join(done.lines[1:]) for done in each) == [False, True]
    assert both.code == 2
    assert f"{logs} holds 2 journals, of several runs or nodes, expected one" in both.stderr
    told = f"choose a folder of {logs}; the newest: rankwise replay "
    assert any(f"{told}{each.parent})" in both.stderr for each in journals)
