"""`--report`, `--trace` and `rankwise report`: what real runs leave, looked at as tools do.

Traces are checked by the rules of the format: slices of a track lie in each other or beside each
other, and every arrow begins and ends.
"""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from etcd_servers import free_ports
from running import Finished, Running, run, start, write_program

pytestmark = pytest.mark.system

NUMPY = """
import os, time, numpy, rankwise
from rankwise import collectives
x = numpy.ones(1000)
for step in range(30):
    with rankwise.section("step"):
        with rankwise.section("load"):
            time.sleep(0.02 if rankwise.rank() == 2 else 0.001)
        x = collectives.all_reduce(x, op="mean")
    if step == 20 and rankwise.rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("<bad> shape")
"""
TORCH = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1024)
for step in range(60):
    time.sleep(0.01 if dist.get_rank() == step % dist.get_world_size() else 0)
    dist.all_reduce(x)
dist.barrier()
dist.destroy_process_group()
"""
HANDLES = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
for step in range(20):
    time.sleep(0.02 * rank)
    model(torch.ones(2, 4)).sum().backward()
    time.sleep(0.02 * rank)
    handle = dist.all_reduce(torch.ones(1024), async_op=True)
    handle.wait()
received = torch.ones(4)
if rank:
    dist.isend(received, 0).wait()
else:
    dist.irecv(received, 1).wait()
dist.destroy_process_group()
"""
ENDLESS = """
import time, numpy, rankwise
from rankwise import collectives
x = numpy.ones(10)
print("begun", flush=True)
while True:
    time.sleep(0.01)
    x = collectives.all_reduce(x, op="mean")
"""
ABSENT = """
import threading, rankwise
from rankwise import collectives
collectives.barrier()
if rankwise.rank() == 1:
    threading.Event().wait()
collectives.barrier()
"""
RECOVERING = """
import os, signal, numpy, rankwise
from rankwise import collectives
def train():
    x = numpy.ones(100)
    for step in range(30):
        with rankwise.section("step"):
            x = collectives.all_reduce(x, op="mean")
        if step == 20 and rankwise.rank() == 1 and rankwise.restart_count() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
rankwise.recover(train)
"""
PLAIN = "print('done')"
VOID = {"meta", "br", "rect", "line", "circle", "path", "polyline"}


class Page(HTMLParser):
    """What a page says; sees to it that what is opened is closed, in its order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.html = path.read_text()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(self.html)
        assert self.open == []
        assert not re.search(r"""(src|href)=|url\(|<script|@import""", self.html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        del attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        """Nothing is left open."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def headings(self) -> list[str]:
        return re.findall(r"<h2>(.*?)</h2>", self.html)


class Trace:
    """A trace, after the rules of its format were checked."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        self.all = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        self.events: list[dict[str, Any]] = self.all["traceEvents"]
        self.names = {
            (event["pid"], event["tid"]): event["args"]["name"]
            for event in self.events
            if event["name"] == "thread_name"
        }
        self._check_nesting()
        self._check_arrows()

    def slices(self, category: str, name: str = "") -> list[dict[str, Any]]:
        return [
            event
            for event in self.events
            if event["ph"] == "X" and event["cat"] == category and event["name"].startswith(name)
        ]

    def count(self, category: str, name: str = "") -> int:
        return len(self.slices(category, name))

    def track_of(self, event: dict[str, Any]) -> str:
        return str(self.names[event["pid"], event["tid"]])

    def _check_nesting(self) -> None:
        tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for event in self.events:
            if event["ph"] == "X":
                begin, duration = round(event["ts"] * 1000), round(event["dur"] * 1000)
                tracks.setdefault((event["pid"], event["tid"]), []).append(
                    (begin, begin + duration)
                )
        for key, slices in tracks.items():
            assert key in self.names
            ends: list[int] = []
            for begin, end in slices:  # in the order of the file: the outer one first
                while ends and ends[-1] <= begin:
                    ends.pop()
                assert not ends or end <= ends[-1], (key, begin, end, ends)
                ends.append(end)

    def _check_arrows(self) -> None:
        phases: dict[int, list[str]] = {}
        for event in self.events:
            if event["ph"] in "stf":
                phases.setdefault(event["id"], []).append(event["ph"])
        assert all(
            (each[0], each[-1], {*each[1:-1]} - {"t"}) == ("s", "f", set())
            for each in phases.values()
        )
        self.arrow_count = len(phases)


def test_a_run_that_failed_once_leaves_a_page_and_a_trace(tmp_path: Path) -> None:
    script = write_program(tmp_path, NUMPY)
    page, trace = tmp_path / "run.html", tmp_path / "run.json.gz"

    done = run(
        *("run", "--nproc-per-node", "3", "--max-restarts", "1"),
        *("--report", page, "--trace", trace, script, "--api-key", "hunter2"),
    )

    assert done.code == 0, done
    assert f"rankwise: report: {page}\n" in done.stderr
    assert f"rankwise: trace: {trace} (open it at https://ui.perfetto.dev)\n" in done.stderr
    shown = Page(page)
    assert shown.headings == [
        *("Timeline", "Failures", "Lateness", "Collectives", "Sections", "Resources"),
        "Environment",
    ]
    assert "Attempt 1, root cause: rank 1 failed: ValueError: <bad> shape" in shown.text
    assert 'raise ValueError("<bad> shape")' in shown.text
    assert "3 ranks on 1 node, 2 attempts" in shown.text
    assert "all_reduce (mean) of (1000,) float64 program.py:9" in shown.text
    assert re.search(
        r"rank of the time others waited came last in 2 [\d.]+ % .* (9\d|100) %", shown.text
    )
    assert "hunter2" not in shown.html
    drawn = Trace(trace)
    assert drawn.count("attempt", "attempt 0") == 3
    assert drawn.count("attempt", "attempt 1") == 3
    assert {drawn.track_of(each) for each in drawn.slices("collective")} == {
        "rank 0",
        "rank 1",
        "rank 2",
    }
    assert drawn.count("collective") >= 3 * 30 + 3 * 20
    # The other two may have begun another one before they were told to stop.
    assert 3 * 30 + 3 * 21 <= drawn.count("section", "load") <= 3 * 30 + 3 * 21 + 2
    assert drawn.count("waiting", "waits for rank 2") > 2 * 40
    assert drawn.arrow_count >= 50
    assert any(event["cat"] == "failure" for event in drawn.events if event["ph"] == "i")
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("width", [360, 1200])
def test_a_page_fits_into_windows_of_any_width(width: int, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser is installed")
    script, page = write_program(tmp_path, NUMPY), tmp_path / "run.html"
    assert run("run", "--nproc-per-node", "3", "--report", page, script).code == 1
    frame = tmp_path / "frame.html"
    frame.write_text(
        f"<iframe id=f src=run.html style='width:{width}px;height:900px;border:0'></iframe>"
        "<script>onload = () => { const page = f.contentDocument, root = page.documentElement;"
        "document.title = [root.scrollWidth - root.clientWidth,"
        "page.querySelectorAll('svg rect').length, page.querySelector('h1').clientHeight]"
        ".join(' ') }</script>"
    )

    done = subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}"),
            frame.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    shown = re.search(r"<title>(\d+) (\d+) (\d+)</title>", done.stdout)

    assert shown is not None, done
    too_wide, rectangles, heading_height = map(int, shown.groups())
    assert not too_wide  # charts and tables scroll by themselves
    assert rectangles > 20
    assert heading_height > 10


def test_ranks_that_are_stopped_by_ctrl_c_have_a_page(tmp_path: Path) -> None:
    script, page = write_program(tmp_path, ENDLESS), tmp_path / "run.html"
    with start("run", "--nproc-per-node", "2", "--report", page, script) as running:
        running.wait_for("begun", count=2)
        running.signal_group(signal.SIGINT)
        done = running.finish()

    assert done.code == 130, done
    assert f"report: {page}" in done.stderr
    assert "Stopped after" in Page(page).text


def test_a_rank_that_was_never_seen_to_come_is_waited_for(tmp_path: Path) -> None:
    script, trace = write_program(tmp_path, ABSENT), tmp_path / "run.json"

    done = run("run", "--nproc-per-node", "2", "--hang-timeout", "3", "--trace", trace, script)

    assert done.code == 124, done
    waiting = Trace(trace).slices("waiting", "waits for rank 1")
    assert max(each["dur"] for each in waiting) > 2_000_000


def test_ranks_that_hung_are_one_failure_in_the_words_of_the_report(tmp_path: Path) -> None:
    script, page = write_program(tmp_path, ABSENT), tmp_path / "run.html"

    done = run("run", "--nproc-per-node", "3", "--hang-timeout", "3", "--report", page, script)

    assert done.code == 124, done
    shown = Page(page)
    assert shown.html.count("<h3>") == 1
    hung = "the gang hung: no progress for 3 s; rank 1 has not come to barrier"
    assert f"<h3>Root cause: {hung}" in shown.html
    assert "ranks 0-2 on " in shown.text
    assert "ranks 0, 2, innermost call first waits for barrier" in shown.text
    assert re.search(r'rank 1, innermost call first .*program\.py", line 6 in <module>', shown.text)
    assert "bootstrap.py" not in shown.text


def test_a_rank_that_is_called_again_has_a_life_in_each_attempt(tmp_path: Path) -> None:
    script, trace = write_program(tmp_path, RECOVERING), tmp_path / "run.json"

    done = run("run", "--nproc-per-node", "2", "--max-restarts", "1", "--trace", trace, script)

    assert done.code == 0, done
    drawn = Trace(trace)
    (earlier,) = (
        each for each in drawn.slices("attempt", "attempt 0") if drawn.track_of(each) == "rank 0"
    )
    (later,) = (
        each for each in drawn.slices("attempt", "attempt 1") if drawn.track_of(each) == "rank 0"
    )
    assert earlier["args"] == {"ended": "left its function, to be called again"}
    assert later["args"] == {"ended": "well"}
    assert earlier["ts"] + earlier["dur"] <= later["ts"]
    assert 2 * 30 + 2 * 21 <= drawn.count("section", "step") <= 2 * 30 + 2 * 21 + 1


def test_torch_programs_are_recorded_and_a_journal_tells_later(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = write_program(tmp_path, HANDLES)
    logs, page, trace = tmp_path / "logs", tmp_path / "later.html", tmp_path / "later.json"

    done = run("run", "--nproc-per-node", "2", "--log-dir", logs, script)
    told = run("report", logs, "-o", page, "--trace", trace)

    assert done.code == 0, done
    assert told.lines == [f"report: {page}", f"trace: {trace} (open it at https://ui.perfetto.dev)"]
    shown = Page(page).text
    assert "all_reduce (sum) of (1024,) float32 program.py:10" in shown
    assert "wait for all_reduce (sum) of (1024,) float32 program.py:11" in shown
    assert "Rank 1 came last in " in shown
    assert " of the calls that C++ begins, as DDP does; " in shown
    assert "How long the other ranks waited in the calls of Python for one rank alone" in shown
    assert "No rank cost the others a notable part of the run." not in shown
    drawn = Trace(trace)
    assert drawn.count("collective", "all_reduce") == 2 * 20
    assert drawn.count("collective", "wait for all_reduce") == 2 * 20
    assert drawn.count("collective", "wait") == 2 * 20 + 2, "and for two messages"
    assert drawn.count("waiting", "waits for rank 1") >= 15
    from_cpp = drawn.slices("calls from C++ (sampled)")
    assert {drawn.track_of(each) for each in from_cpp} == {
        f"rank {rank}: calls from C++ (sampled)" for rank in (0, 1)
    }
    assert sum(each["name"].startswith("all_reduce") for each in from_cpp) == 2 * 20
    assert drawn.all["otherData"]["calls_recorded"] == 1
    assert run("replay", logs).code == 0


def test_two_nodes_are_joined_on_one_clock(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = write_program(tmp_path, TORCH)
    port = free_ports(1)[0]

    def node(number: int) -> Running:
        return start(
            *("run", "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "2"),
            *("--master-addr", "127.0.0.1", "--master-port", str(port)),
            *("--log-dir", tmp_path / f"node{number}", "--report", tmp_path / f"{number}.html"),
            script,
        )

    with node(0) as first, node(1) as second:
        ends = [first.finish(), second.finish()]
    page, trace = tmp_path / "both.html", tmp_path / "both.json"
    told = run("report", tmp_path / "node0", tmp_path / "node1", "-o", page, "--trace", trace)

    assert [end.code for end in ends] == [0, 0], ends
    assert f"report: {tmp_path / '0.html'}; holds 1 of 2 nodes" in ends[0].stderr
    assert "The run had 2 nodes. This page holds ranks 0-1" in Page(tmp_path / "0.html").text
    assert not (tmp_path / "1.html").exists()
    assert "the node of rank 0 writes" in ends[1].stderr
    assert re.fullmatch(
        rf"report: {page}; the clocks of 2 nodes agree within \S+ [mu]s, measured at the ends "
        r"of 61 shared collectives \(at most \S+ ms, by the order of waits\)",
        told.lines[0],
    )
    joined = Page(page).text
    assert "4 ranks on 2 nodes" in joined
    assert "This page holds" not in joined
    drawn = Trace(trace)
    # Both nodes are this machine, so that the true offset is nothing: whoever waits in a call
    # leaves it after the last has come, on the other node as well.
    ends_of: dict[str, list[float]] = {}
    begins_of: dict[str, list[float]] = {}
    for each in drawn.slices("collective", "all_reduce"):
        begins_of.setdefault(each["name"], []).append(each["ts"])
        ends_of.setdefault(each["name"], []).append(each["ts"] + each["dur"])
    assert drawn.count("collective", "wait") == 0, "what torch waits for in a call is that call"
    assert len(ends_of) == 60
    assert all(len(each) == 4 for each in ends_of.values())
    error = drawn.all["otherData"]["clock_error_us"]
    assert all(min(ends_of[name]) > max(begins_of[name]) - 3000 - error for name in ends_of)


@pytest.mark.parametrize("nnodes", ["1", "1:2"])
def test_journals_of_different_runs_are_not_joined(nnodes: str, tmp_path: Path) -> None:
    script = write_program(tmp_path, PLAIN)
    for name in ("one", "two"):
        endpoint = f"127.0.0.1:{free_ports(1)[0]}"
        nodes = ("--nnodes", nnodes, "--rdzv-conf", "last_call_timeout=0.1")
        meeting = ("--rdzv-backend", "embedded", "--rdzv-endpoint", endpoint)
        done = run("run", *nodes, *meeting, "--log-dir", tmp_path / name, script)
        assert done.code == 0, done

    done = run("report", tmp_path / "one", tmp_path / "two", "-o", tmp_path / "x.html")

    assert done.code == 2
    assert "the journals are of different runs" in done.stderr
    assert not (tmp_path / "x.html").exists()


def test_the_journal_of_an_agent_that_was_killed_gives_a_page(tmp_path: Path) -> None:
    script = write_program(tmp_path, ENDLESS)
    logs, page = tmp_path / "logs", tmp_path / "run.html"
    with start("run", "--nproc-per-node", "2", "--log-dir", logs, script) as running:
        running.wait_for("begun", count=2)
        journal = wait_for_records(logs)
        running.signal(signal.SIGKILL)
        running.wait_over()
    whole = journal.read_bytes().rstrip(b"\n")
    journal.write_bytes(whole[: whole.rindex(b"\n") + 40])  # in the middle of the last line

    trace = tmp_path / "run.json"
    done = run("report", logs, "-o", page)
    lost = run("report", logs, "-o", "/dev/full", "--trace", trace)

    assert done.code == 0, done
    assert lost.code == 1
    assert "'/dev/full' cannot be written: No space left on device" in lost.stderr
    assert (trace.exists(), lost.stdout.count("trace: ")) == (True, 1), lost
    text = Page(page).text
    assert "No end was recorded" in text
    assert "ends in the middle of a line: its agent was killed" in text
    assert "all_reduce (mean)" in text


def wait_for_records(logs: Path) -> Path:
    """The journal, once calls are in it."""
    (journal,) = logs.glob("*/journal.jsonl")
    with subprocess.Popen(["tail", "-n", "+1", "-F", journal], stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        while b"CallsSeen" not in reader.stdout.readline():
            assert reader.poll() is None
        reader.kill()
    return journal


@pytest.mark.parametrize("flags", [("--no-python", "true"), ("--no-ledger", "SCRIPT")])
def test_a_run_without_calls_has_a_page_too(flags: tuple[str, str], tmp_path: Path) -> None:
    script = write_program(tmp_path, PLAIN)
    words = [str(script) if word == "SCRIPT" else word for word in flags]

    done = run("run", "--quiet", "--report", tmp_path / "run.html", *words)

    assert done.code == 0, done
    assert done.stderr == ""
    assert Page(tmp_path / "run.html").headings[0] == "Timeline"


def test_the_journal_of_several_simulated_nodes_is_refused_by_what_it_is(tmp_path: Path) -> None:
    script = write_program(tmp_path, "import rankwise; rankwise.collectives.barrier()")
    run("run", "--on=sim", "--nnodes=1:2", "--log-dir=logs", str(script), cwd=tmp_path)

    done = run("report", "logs", cwd=tmp_path)

    assert done.code == 2
    assert "is of several simulated nodes (--on sim), of which there is no page" in done.stderr


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    script = write_program(tmp_path, PLAIN)

    done = run("run", "--report", tmp_path / "nowhere" / "run.html", script)

    assert done.code == 2
    assert done.stdout == ""
    assert "error: --report: " in done.stderr
    assert "there is no directory" in done.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    mounted = subprocess.run(["mount", *options], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount: {mounted.stderr.decode()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def full_disk_run(disk: Path, tmp_path: Path, *flags: str | Path) -> Finished:
    """A run while the disk is full."""
    script = write_program(tmp_path, PLAIN)
    with (disk / "fill").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return run("run", "--no-prefix", *flags, script)


@pytest.mark.parametrize("lost", ["report", "trace"])
def test_a_file_for_which_there_is_no_room_is_told_of_and_the_other_one_written(
    lost: str, small_disk: Path, tmp_path: Path
) -> None:
    folders = {"report": tmp_path, "trace": tmp_path, lost: small_disk}
    page, trace = folders["report"] / "run.html", folders["trace"] / "run.json"

    done = full_disk_run(small_disk, tmp_path, "--report", page, "--trace", trace)

    assert done.code == 0
    assert done.lines == ["done"]
    told = {line.split(": ")[1]: line for line in done.stderr.splitlines()}
    assert list(told) == ["report", "trace"]
    assert "cannot be written: No space left on device" in told.pop(lost)
    assert "cannot be" not in str(told)
    assert (page.exists(), trace.exists()) == (lost == "trace", lost == "report")
    assert [each.name for each in small_disk.iterdir()] == ["fill"]


def test_a_journal_for_which_there_is_no_room_ends_no_run(small_disk: Path, tmp_path: Path) -> None:
    done = full_disk_run(
        small_disk, tmp_path, "--log-dir", small_disk, "--report", tmp_path / "run.html"
    )

    assert done.code == 0
    assert done.lines == ["done"]
    told = [line for line in done.stderr.splitlines() if "No space left on device" in line]
    assert len(told) == 1, done.stderr
    assert "has no entries of an agent" in done.stderr
