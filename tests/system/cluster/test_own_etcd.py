"""Three agents that run an etcd of their own: the loss of any of them ends nothing."""

import http.client
import os
import re
import signal
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from etcd_servers import find_etcd, first_member, free_ports, members_of, needs_etcd
from running import WITHIN_S, Deaths, Running, start, wait_for_any, write_program

from rankwise.drivers.real.stores.encryption import has_certificates
from rankwise.drivers.real.stores.opening import open_store

pytestmark = [pytest.mark.system, needs_etcd]

STAY = """
import os, threading
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
threading.Event().wait()
"""


STEP = """
import os, time
import rankwise
assert not rankwise.should_stop()
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
steps = 0
while not rankwise.should_stop():
    steps += 1
    time.sleep(0.01)
print("saved at", steps)
"""
TOKEN = "what all nodes of this run know"
HOSTS = ("127.0.0.11", "127.0.0.12", "127.0.0.13")


@pytest.fixture
def port() -> int:
    """Of all members; the next one is for their peers."""
    return free_ports(1)[0]


@pytest.fixture
def program() -> str:
    return STAY


@pytest.fixture
def begin(port: int, tmp_path: Path, program: str) -> Iterator[Callable[[], Running]]:
    """Starts an agent, which runs the first member that no other one runs."""
    etcd = find_etcd()
    assert etcd is not None
    environment = {
        "PATH": f"{Path(etcd).parent}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
        "RANKWISE_STORE_TOKEN": TOKEN,
    }
    words = (
        *("run", "--nnodes", "2:3", "--rdzv-id", "own", "--max-restarts", "9"),
        *("--rdzv-backend", "etcd", "--rdzv-own-etcd"),
        *("--rdzv-endpoint", ",".join(f"{host}:{port}" for host in HOSTS)),
        write_program(tmp_path, program),
    )
    with ExitStack() as stack:
        yield lambda: stack.enter_context(start(*words, environment=environment))


@pytest.fixture
def agents(begin: Callable[[], Running]) -> list[Running]:
    """Three agents, each at an address of its own; the first runs the first member."""
    started = [begin() for _ in HOSTS]
    wait_for_any(started, "of 3", count=3)
    return started


needs_certificates = pytest.mark.skipif(
    not has_certificates(), reason="no certificates can be made: pip install 'rankwise[tls]'"
)


def settings_with(token: str, folder: Path) -> dict[str, str]:
    """How a client of the run's etcd is set up who knows this token."""
    if not has_certificates():
        return {}
    from rankwise.drivers.real.stores.token_certificate import certificate_of  # noqa: PLC0415

    folder.mkdir()
    made = certificate_of(token.encode(), HOSTS)
    certificate, key = folder / "cert.pem", folder / "key.pem"
    certificate.write_bytes(made.certificate)
    key.write_bytes(made.key)
    paths = {"cacert": str(certificate), "cert": str(certificate), "key": str(key)}
    return {"protocol": "https", **paths}


def test_the_loss_of_the_first_node_costs_a_round_and_nothing_is_left(
    agents: list[Running], tmp_path: Path
) -> None:
    lost = first_member(agents)
    others = [agent for agent in agents if agent is not lost]
    deaths = Deaths([pid for agent in agents for pid in members_of(agent)])

    lost.signal(signal.SIGKILL)
    wait_for_any(others, "of 2", count=2)
    others[0].signal(signal.SIGTERM)
    done = [agent.finish(WITHIN_S) for agent in others]

    assert [each.code for each in done] == [143, 143], done
    assert all(re.search("round 0 is over: node .* on .* is lost", each.stderr) for each in done)
    assert deaths.survivors(within_s=WITHIN_S) == []


def test_a_member_comes_back_with_its_agent_so_that_another_loss_is_survived(
    agents: list[Running], begin: Callable[[], Running], port: int, tmp_path: Path
) -> None:
    lost = first_member(agents)
    others = [agent for agent in agents if agent is not lost]
    lost.signal(signal.SIGKILL)
    wait_for_any(others, "of 2", count=2)

    returned = begin()
    wait_for_any([returned, *others], "of 3", count=3)
    assert first_member([returned]) is returned
    settings = settings_with(TOKEN, tmp_path / "client")
    endpoint = f"{HOSTS[0]}:{port}"  # the returned one alone, which asks the others
    with open_store(
        "etcd", endpoint, {**settings, "request_timeout": f"{WITHIN_S}"}, run_id=""
    ) as store:
        assert store.read("rankwise/").entries
    others[0].signal(signal.SIGKILL)
    wait_for_any([returned, others[1]], "of 2", count=3)
    returned.signal(signal.SIGTERM)

    assert [agent.finish(WITHIN_S).code for agent in (returned, others[1])] == [143, 143]


def asked(host: str, port: int, path: str, tls: ssl.SSLContext | None) -> bytes:
    """What a port answers to a question that changes nothing."""
    connection: http.client.HTTPConnection
    if tls is None:
        connection = http.client.HTTPConnection(host, port, timeout=WITHIN_S)
    else:
        connection = http.client.HTTPSConnection(host, port, timeout=WITHIN_S, context=tls)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.read() if answer.status == 200 else b""
    finally:
        connection.close()


def context_of(settings: dict[str, str]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # a stranger does not care whom it talks to
    if settings:
        context.load_cert_chain(settings["cert"], settings["key"])
    return context


def ignored_by(pid: int) -> set[signal.Signals]:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(status.partition("SigIgn:")[2].split()[0], 16)
    return {each for each in signal.Signals if mask >> (each - 1) & 1}


@pytest.mark.parametrize("program", [STEP])
def test_members_outlive_a_signal_to_all_processes_so_that_the_ranks_agree_at_once(
    agents: list[Running],
) -> None:
    members = [member for agent in agents for member in members_of(agent)]
    deaths = Deaths(members)

    # Of what ends a job: a program that hears it would end within seconds.
    told = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    assert all(set(told) <= ignored_by(member) for member in members)
    for member in members:
        for signum in told:
            os.kill(member, signum)
    for agent in agents:
        agent.signal(signal.SIGTERM)
    done = [agent.finish(WITHIN_S) for agent in agents]

    saved = {line.partition("saved at ")[2] for each in done for line in each.lines[1:]}
    assert len(saved) == 1, done
    assert [each.code for each in done] == [143, 143, 143], done
    assert deaths.survivors(within_s=WITHIN_S) == []


@needs_certificates
@pytest.mark.usefixtures("agents")
def test_strangers_can_neither_read_nor_write_at_any_port_of_any_member(
    port: int, tmp_path: Path
) -> None:
    ours = context_of(settings_with(TOKEN, tmp_path / "ours"))
    strangers = (
        None,
        context_of({}),
        context_of(settings_with("another token", tmp_path / "theirs")),
    )
    doors = [(host, port, "/version") for host in HOSTS]
    doors += [(host, port + 1, "/members") for host in HOSTS]

    for door in doors:
        assert asked(*door, ours), door
        for stranger in strangers:
            # TLS 1.3 tells a client that it is refused when it reads, if the connection lives.
            try:
                assert asked(*door, stranger) == b"", door
            except (OSError, http.client.HTTPException):
                continue


@needs_certificates
@pytest.mark.usefixtures("agents")
def test_no_file_holds_the_key_that_follows_from_the_token(tmp_path: Path) -> None:
    files = [path for path in tmp_path.glob("rankwise_*/**/*") if path.is_file()]

    assert any(path.name == "etcd.log" for path in files), files
    assert [path for path in files if b"PRIVATE KEY" in path.read_bytes()] == []


@needs_certificates
@pytest.mark.usefixtures("agents")
def test_a_node_with_another_token_is_told_so(port: int, tmp_path: Path) -> None:
    endpoints = ",".join(f"{host}:{port}" for host in HOSTS)
    words = ("--rdzv-backend", "etcd", "--rdzv-own-etcd", "--rdzv-endpoint", endpoints)
    script = write_program(tmp_path, STAY)
    environment = {"RANKWISE_STORE_TOKEN": "another", "TMPDIR": str(tmp_path)}

    with start(
        "run", "--nnodes", "2:4", "--rdzv-id", "own", *words, script, environment=environment
    ) as stranger:
        done = stranger.finish(WITHIN_S)

    assert done.code == 2, done
    assert "belongs to another run: its token is not ours" in done.stderr
