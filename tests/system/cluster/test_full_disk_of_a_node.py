"""A disk that fills up beneath the journal of an agent among several nodes."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_servers import free_ports
from running import run, write_program

pytestmark = pytest.mark.system

SIZE = "80m"  # more than an agent demands before it takes part
FILL = """
import os, sys
with open(sys.argv[1], "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(1 << 16))
    except OSError as error:
        print("the disk is full", error.errno, flush=True)
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} goes on", flush=True)
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount: {mounted.stderr.decode()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_journal_that_finds_the_disk_full_is_told_of_once_and_the_run_goes_on(
    small_disk: Path, tmp_path: Path
) -> None:
    script = write_program(tmp_path, FILL)
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    meeting = ("--rdzv-backend", "embedded", "--rdzv-endpoint", endpoint)
    nodes = ("--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=0.1")

    done = run(
        *("run", *nodes, *meeting, "--log-dir", small_disk, "--no-prefix"),
        *(script, small_disk / "fill"),
    )
    (journal,) = small_disk.rglob("journal.jsonl")
    text = journal.read_text()

    assert done.code == 0, done
    assert done.lines == ["the disk is full 28", "rank 0 of 1 goes on"]
    told = [line for line in done.stderr.splitlines() if "No space left on device" in line]
    assert len(told) == 1, done.stderr
    assert "journal.jsonl" in told[0]
    assert [json.loads(line)["machine"] for line in text.splitlines()]
    assert text.endswith("\n")
