"""Asking a run: a real server on a real socket, served by a thread of the test."""

import json
import os
import select
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.units import SECOND, Instant
from rankwise.launch.control.addresses import parse_name, socket_name
from rankwise.launch.control.client import (
    RunSummary,
    RunUnreachable,
    ask_all,
    expect_over,
    list_pools,
    list_runs,
    listen,
    listen_to_all,
)
from rankwise.launch.control.server import ControlRequest, ControlServer, Question, Reply

PATIENCE_S = 60.0


def soon(seconds: float = PATIENCE_S) -> Instant:
    return Instant(time.monotonic_ns() + round(seconds * SECOND))


def ask(run: RunSummary, question: Question, deadline: Instant) -> list[dict[str, Any]]:
    return ask_all([run], question, deadline)[0].lines()


@contextmanager
def served(server: ControlServer) -> Iterator[None]:
    """Call `on_readable` whenever the server's descriptor says so, as a reactor would."""
    end, until = os.pipe()

    def turn() -> None:
        while end not in select.select([server.fileno(), end], [], [])[0]:
            server.on_readable()

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield
    finally:
        os.write(until, b"x")
        thread.join(PATIENCE_S)
        os.close(end)
        os.close(until)
        assert not thread.is_alive()


def answer_with(*lines: dict[str, object]) -> Callable[[ControlRequest, Reply], None]:
    def on_request(request: ControlRequest, reply: Reply) -> None:
        for line in lines:
            reply.send({"asked": request.ask, **line})
        reply.finish()

    return on_request


@pytest.fixture
def run_id() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


def summary(run_id: str) -> RunSummary:
    return RunSummary(run_id, os.getpid(), os.geteuid())


def connect(run_id: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Without a time limit, since with one a full queue fails at once; the server is here.
    connection.connect(socket_name(run_id, os.getpid()))
    connection.settimeout(PATIENCE_S)
    return connection


def test_a_run_is_listed_while_its_server_lives(run_id: str) -> None:
    with ControlServer(run_id, answer_with()):
        assert summary(run_id) in list_runs()

    assert summary(run_id) not in list_runs()


def test_only_runs_of_the_user_are_listed_and_root_sees_all(tmp_path: Path) -> None:
    table = tmp_path / "unix"
    table.write_text(
        "Num       RefCount Protocol Flags    Type St Inode Path\n"
        "0000: 00000002 00000000 00010000 0001 01 11 @rankwise/1000/mine/5\n"
        "0000: 00000003 00000000 00000000 0001 03 12 @rankwise/1000/mine/5\n"
        "0000: 00000002 00000000 00010000 0001 01 13 @rankwise/1001/yours/6\n"
        "0000: 00000002 00000000 00010000 0001 01 14 @rankwise/x/broken/7\n"
        "0000: 00000002 00000000 00010000 0001 01 15 /run/some where\n"
        "0000: 00000002 00000000 00000000 0002 01 16\n"
    )

    mine, yours = RunSummary("mine", 5, 1000), RunSummary("yours", 6, 1001)
    assert list_runs(1000, table) == [mine]
    assert list_runs(0, table) == [mine, yours]


def test_an_answer_is_all_lines_that_were_sent(run_id: str) -> None:
    on_request = answer_with({"rank": 0}, {"rank": 1, "stacks": "a\nb"})
    with ControlServer(run_id, on_request) as server, served(server):
        lines = ask(summary(run_id), "stacks", soon())

    assert lines == [
        {"asked": "stacks", "rank": 0},
        {"asked": "stacks", "rank": 1, "stacks": "a\nb"},
    ]


def test_an_answer_larger_than_any_buffer_arrives_whole(run_id: str) -> None:
    text = "x" * 3_000_000
    with (
        ControlServer(run_id, answer_with({"stacks": text}, {"last": True})) as server,
        served(server),
    ):
        lines = ask(summary(run_id), "stacks", soon())

    assert [len(str(line.get("stacks", ""))) for line in lines] == [3_000_000, 0]


def test_an_answer_may_come_later(run_id: str) -> None:
    """As in an agent: the stacks come in after `on_readable` has returned."""
    replies: list[Reply] = []
    with (
        ControlServer(run_id, lambda _, reply: replies.append(reply)) as server,
        connect(run_id) as client,
    ):
        client.sendall(b'{"ask": "stacks"}\n')
        while not replies:
            assert select.select([server], [], [], PATIENCE_S)[0]
            server.on_readable()
        assert select.select([server], [], [], 0)[0] == []

        replies[0].send({"rank": 0})
        assert select.select([server], [], [], 0)[0] == []
        replies[0].finish()

        assert client.makefile().readlines() == ['{"rank":0}\n']
        assert not replies[0].is_wanted


def test_a_client_that_leaves_is_forgotten(run_id: str) -> None:
    replies: list[Reply] = []
    with ControlServer(run_id, lambda _, reply: replies.append(reply)) as server:
        with connect(run_id) as client:
            client.sendall(b'{"ask": "status"}\nand more\n')
            while not replies:
                assert select.select([server], [], [], PATIENCE_S)[0]
                server.on_readable()
            assert replies[0].is_wanted

        assert select.select([server], [], [], PATIENCE_S)[0]
        server.on_readable()

        (reply,) = replies
        assert not reply.is_wanted
        reply.send({})
        reply.finish()
        assert select.select([server], [], [], 0)[0] == []


@pytest.mark.parametrize("nonsense", [b"hello\n", b'{"ask": "shutdown"}\n', b"\xff\n", b"[]\n"])
def test_nonsense_is_answered_with_an_error(run_id: str, nonsense: bytes) -> None:
    with (
        ControlServer(run_id, answer_with({})) as server,
        served(server),
        connect(run_id) as client,
    ):
        client.sendall(nonsense)
        (line,) = client.makefile().readlines()

    assert json.loads(line)["error"].startswith("not a request")


def test_endless_questions_are_hung_up_on(run_id: str) -> None:
    with (
        ControlServer(run_id, answer_with({})) as server,
        served(server),
        connect(run_id) as client,
    ):
        client.sendall(b"x" * 5000)

        # The kernel says reset rather than end when unread bytes were thrown away.
        with suppress(ConnectionResetError):
            assert client.recv(10) == b""


def test_abandoned_connections_do_not_lock_others_out(run_id: str) -> None:
    with ControlServer(run_id, answer_with({"rank": 0})) as server, served(server):
        abandoned = [connect(run_id) for _ in range(60)]
        try:
            assert ask(summary(run_id), "status", soon()) == [{"asked": "status", "rank": 0}]
        finally:
            for connection in abandoned:
                connection.close()


def test_a_stopped_agent_is_given_up_and_costs_the_others_nothing(run_id: str) -> None:
    stopped, alive = f"{run_id}-a", f"{run_id}-b"
    with (
        ControlServer(stopped, answer_with()),
        ControlServer(alive, answer_with({"state": "running"})) as server,
        served(server),
    ):
        first, second = ask_all([summary(stopped), summary(alive)], "status", soon(2))

    with pytest.raises(RunUnreachable, match="has not answered in time"):
        first.lines()
    assert second.lines() == [{"asked": "status", "state": "running"}]


def test_of_several_agents_lines_are_heard_as_they_come_and_why_one_is_silent(run_id: str) -> None:
    names = [f"{run_id}-{each}" for each in ("talks", "refuses", "stopped", "gone")]
    with ExitStack() as stack:
        answers = answer_with({"rank": 0}, {"rank": 1}), answer_with({"error": "no rank 3"})
        for name, on_request in zip(names, answers, strict=False):
            server = stack.enter_context(ControlServer(name, on_request))
            stack.enter_context(served(server))
        stack.enter_context(ControlServer(names[2], answer_with()))  # nobody looks after it

        runs = [summary(name) for name in names]
        heard = list(listen_to_all(runs, ControlRequest("logs"), soon(0.5)))

    lines = {name: [told for run, told in heard if run.run_id == name] for name in names}
    assert [len(each) for each in lines.values()] == [2, 1, 1, 1]
    assert lines[names[0]] == [{"asked": "logs", "rank": 0}, {"asked": "logs", "rank": 1}]
    whys = ["refused: no rank 3", "has not answered in time", "cannot be reached"]
    for name, why in zip(names[1:], whys, strict=True):
        assert isinstance(lines[name][0], RunUnreachable)
        assert why in str(lines[name][0])


@contextmanager
def talking(run_id: str) -> Iterator[None]:
    """An agent that answers with a line after another, until nobody listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(socket_name(run_id, os.getpid()))
        listener.listen()

        def talk() -> None:
            connection, _ = listener.accept()
            with connection, suppress(BrokenPipeError, ConnectionResetError):
                for _ in range(10_000_000):
                    connection.sendall(b'{"rank": 0}\n')

        thread = threading.Thread(target=talk)
        thread.start()
        yield
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("to_the_end", [False, True])
def test_an_agent_that_talks_on_hides_nothing_of_one_that_is_silent(
    to_the_end: bool, run_id: str
) -> None:
    talks, silent = f"{run_id}-a", f"{run_id}-b"
    with talking(talks), ControlServer(silent, answer_with()):
        runs = [summary(talks), summary(silent)]
        heard = listen_to_all(runs, ControlRequest("logs"), soon(0.3), to_the_end=to_the_end)
        late = (run.run_id for run, told in heard if isinstance(told, RunUnreachable))
        expected = {talks, silent} if to_the_end else {silent}
        assert set(islice(late, len(expected))) == expected
        del late, heard  # which hangs up


def test_an_agent_that_takes_no_more_calls_is_given_up(run_id: str) -> None:
    with ControlServer(run_id, answer_with()), ExitStack() as stack:
        while True:  # until the queue of the server, which never looks, is full
            connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            connection.settimeout(0)
            if connection.connect_ex(socket_name(run_id, os.getpid())) != 0:
                break

        with pytest.raises(RunUnreachable, match="has not answered in time"):
            ask(summary(run_id), "status", soon(0.1))


def test_a_run_that_has_ended_is_told(run_id: str) -> None:
    with pytest.raises(RunUnreachable, match="cannot be reached"):
        ask(summary(run_id), "status", soon())


def test_an_agent_that_dies_before_its_answer_is_told(run_id: str) -> None:
    hung_up = threading.Event()
    with ControlServer(run_id, lambda _request, _reply: hung_up.set()) as server:

        def serve_and_leave() -> None:
            while not hung_up.is_set():
                select.select([server], [], [], PATIENCE_S)
                server.on_readable()
            server.close()

        thread = threading.Thread(target=serve_and_leave)
        thread.start()
        with pytest.raises(RunUnreachable, match="ended before it had answered"):
            ask(summary(run_id), "status", soon())
        thread.join(PATIENCE_S)


def test_a_process_that_took_the_name_of_another_is_not_believed(run_id: str) -> None:
    somebody_else = RunSummary(run_id, 1, os.geteuid())
    with (
        ControlServer(run_id, answer_with({}), pid=1),
        pytest.raises(RunUnreachable, match="held by another process"),
    ):
        ask(somebody_else, "status", soon())


@given(st.text(max_size=80), st.integers(1, 4_194_304), st.integers(0, 4_294_967_295))
def test_a_name_leads_back_to_the_run(run_id: str, pid: int, uid: int) -> None:
    run_id = run_id.encode(errors="replace").decode()
    name = socket_name(run_id, pid, uid)

    assert len(name) <= 107
    shown = name.replace(b"\0", b"@").decode()
    parsed = parse_name(shown)
    assert parsed is not None
    assert parsed[1:] == (pid, uid)
    assert socket_name(*parsed) == name
    if len(run_id.encode()) <= 20:
        assert parsed[0] == run_id


def test_name_that_a_fork_keeps_after_the_death_of_its_pools_process_is_no_pool(
    tmp_path: Path,
) -> None:
    table = tmp_path / "unix"
    uid, own, dead = os.geteuid(), os.getpid(), 4_194_305
    lines = [
        f"0: 00000002 00000000 00010000 0001 01 1 @{family}/{uid}/{name}/{pid}"
        for family, name, pid in (
            ("rankwise-pool", "folds", own),
            ("rankwise-pool", "forked", dead),
            ("rankwise", "nightly", own),
        )
    ]
    table.write_text("\n".join(["head", *lines]))

    assert list_pools(uid, table) == [RunSummary("folds", own, uid, is_pool=True)]
    assert list_runs(uid, table) == [RunSummary("nightly", own, uid)]


def test_who_reads_logs_makes_room_and_is_told_that_the_run_goes_on(run_id: str) -> None:
    def never(request: ControlRequest, reply: Reply) -> None:
        reply.send({"asked": request.ask})

    def begin(question: Question) -> Iterator[dict[str, object]]:
        answer = listen(summary(run_id), ControlRequest(question), soon())
        assert next(answer) == {"asked": question}
        return answer

    with ControlServer(run_id, never) as server:
        with served(server):
            stopper = begin("stop")
            readers = [begin("logs") for _ in range(31)]
            others = [begin("stop"), begin("stop")]
            for reader in readers[:2]:
                with pytest.raises(RunUnreachable, match="refused: 32 newer requests came"):
                    next(reader)
        server.close()

        assert [next(answer, None) for answer in (stopper, *others, readers[2])] == [None] * 4
        expect_over(summary(run_id))


def test_an_answer_that_breaks_off_while_the_run_goes_on_is_no_end(run_id: str) -> None:
    with (
        ControlServer(run_id, answer_with()),
        pytest.raises(RunUnreachable, match="and still runs"),
    ):
        expect_over(summary(run_id))
