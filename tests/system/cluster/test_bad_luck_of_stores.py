"""What agents say of a store that is not there, or will not have them, with real processes."""

import http.client
import json
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from etcd_servers import EtcdCluster, EtcdMember, etcd_cluster, free_ports, needs_etcd
from running import Finished, Running, start, wait_for_any, write_program

from rankwise.base.keys import Put, Transaction
from rankwise.core.rendezvous.records import RunKeys
from rankwise.drivers.real.stores.opening import open_store

pytestmark = [pytest.mark.system, needs_etcd]

HELLO = """
import os
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
"""
STAY = HELLO + "import threading; threading.Event().wait()\n"


class Agents:
    """Agents on this host."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack

    def start(self, program: str, *words: str, **environment: str) -> Running:
        script = write_program(self._folder, program)
        return self._stack.enter_context(start("run", *words, script, environment=environment))

    def at_etcd(self, etcd: EtcdCluster, program: str, *words: str, **environment: str) -> Running:
        place = ("--rdzv-backend", "etcd", "--rdzv-endpoint", endpoint(etcd))
        return self.start(program, *place, *words, **environment)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with ExitStack() as stack:
        yield Agents(tmp_path, stack)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


def endpoint(etcd: EtcdCluster) -> str:
    (host, port), *_ = etcd.endpoints
    return f"{host}:{port}"


def post(member: EtcdMember, path: str, body: object) -> None:
    host, port = member.endpoint
    connection = http.client.HTTPConnection(host, port, timeout=60)
    connection.request("POST", path, json.dumps(body))
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    connection.close()


def both(one: Running, two: Running) -> tuple[Finished, Finished]:
    return one.finish(), two.finish()


def test_agents_wait_for_an_etcd_that_starts_after_them(agents: Agents, tmp_path: Path) -> None:
    etcd = EtcdCluster(tmp_path)
    try:
        words = ("--nnodes", "2", "--rdzv-id", "late")
        one = agents.at_etcd(etcd, HELLO, *words)
        two = agents.at_etcd(etcd, HELLO, *words)
        etcd.start()
        done = both(one, two)
    finally:
        etcd.kill()

    assert [each.code for each in done] == [0, 0], done
    assert sorted(each.stdout[-12:] for each in done) == ["rank 0 of 2\n", "rank 1 of 2\n"]


def test_a_wrong_password_ends_an_agent_at_once_and_is_named(
    agents: Agents, tmp_path: Path
) -> None:
    with etcd_cluster(tmp_path) as etcd:
        (member,) = etcd.members
        post(member, "/v3/auth/user/add", {"name": "root", "password": "secret"})
        post(member, "/v3/auth/role/add", {"name": "root"})
        post(member, "/v3/auth/user/grant", {"user": "root", "role": "root"})
        post(member, "/v3/auth/enable", {})
        words = ("--nnodes", "1:2", "--rdzv-id", "users", "--rdzv-conf")

        wrong = agents.at_etcd(etcd, HELLO, *words, "user=root,password=guess").finish()
        nobody = agents.at_etcd(etcd, HELLO, *words, "last_call_timeout=1").finish()
        quick = "user=root,password=secret,last_call_timeout=0.1"
        right = agents.at_etcd(etcd, HELLO, *words, quick).finish()

    assert (wrong.code, nobody.code, right.code) == (1, 1, 0), (wrong, nobody, right)
    assert "refuses user 'root'" in wrong.stderr
    assert "check user and password" in wrong.stderr
    assert "asks for a user" in nobody.stderr


def test_a_node_of_another_version_is_named(agents: Agents, etcd: EtcdCluster) -> None:
    charter = RunKeys("newer").charter
    with open_store("etcd", endpoint(etcd), {}, run_id="newer") as store:
        store.commit(Transaction(puts=(Put(charter, b'{"version":99}'),)))

    done = agents.at_etcd(etcd, HELLO, "--nnodes", "1:2", "--rdzv-id", "newer").finish()

    assert done.code == 1
    assert "has protocol version 99" in done.stderr
    assert "run the same version of rankwise on every node" in done.stderr


def test_a_node_with_another_number_of_nodes_is_told_while_the_run_lives(
    agents: Agents, etcd: EtcdCluster
) -> None:
    quick = ("--rdzv-id", "sizes", "--rdzv-conf", "last_call_timeout=0.1")
    one = agents.at_etcd(etcd, STAY, "--nnodes", "1:2", *quick)
    one.wait_for("rank 0 of 1")

    other = agents.at_etcd(etcd, STAY, "--nnodes", "1:3", *quick).finish()
    one.signal(signal.SIGTERM)

    assert other.code == 2
    assert "was started by other nodes with nodes_max 2 (here: 3)" in other.stderr
    assert one.finish().code == 143


def test_a_node_with_another_token_or_none_is_told_while_the_run_lives(
    agents: Agents, etcd: EtcdCluster
) -> None:
    words = ("--nnodes", "1:2", "--rdzv-id", "tokens", "--rdzv-conf", "last_call_timeout=0.1")
    one = agents.at_etcd(etcd, STAY, *words, RANKWISE_STORE_TOKEN="ours")
    one.wait_for("rank 0 of 1")

    other = agents.at_etcd(etcd, STAY, *words, RANKWISE_STORE_TOKEN="theirs").finish()
    none = agents.at_etcd(etcd, STAY, *words).finish()
    one.signal(signal.SIGTERM)

    told = r"started by other nodes with fingerprint of RANKWISE_STORE_TOKEN '\w{8}' \(here: "
    assert (other.code, none.code) == (2, 2)
    assert re.search(told + r"'\w{8}'\)", other.stderr), other.stderr
    assert re.search(told + r"none\)", none.stderr), none.stderr
    finished = one.finish()
    assert finished.code == 143
    assert "round 1" not in finished.stderr, "no other node has got a place"


def test_another_run_at_an_embedded_store_is_told_whose_it_is(agents: Agents) -> None:
    words = ("--nnodes", "1:2", "--rdzv-backend", "embedded")
    place = ("--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}")
    quick = ("--rdzv-conf", "last_call_timeout=0.1")
    one = agents.start(STAY, *words, *place, *quick, "--rdzv-id", "mine")
    wait_for_any([one], "rank 0 of 1")

    other = agents.start(HELLO, *words, *place, *quick, "--rdzv-id", "yours").finish()
    one.signal(signal.SIGTERM)

    assert other.code == 2
    assert "belongs to another run: its token is not ours" in other.stderr
    assert one.finish().code == 143


STEPS = """
import time
import rankwise
assert not rankwise.should_stop()
print("stepping", flush=True)
while not rankwise.should_stop():
    time.sleep(0.01)
print("saved", flush=True)
"""


def test_ranks_save_though_their_store_is_silent_when_they_are_to_stop(
    agents: Agents, tmp_path: Path
) -> None:
    with etcd_cluster(tmp_path) as etcd:
        words = ("--nnodes", "2", "--rdzv-id", "silent", "--rdzv-conf", "lease_ttl=3")
        nodes = [agents.at_etcd(etcd, STEPS, *words) for _ in range(2)]
        wait_for_any(nodes, "stepping", count=2)
        for member in etcd.members:
            member.stop()

        for node in nodes:
            node.signal(signal.SIGTERM)
        done = [node.finish() for node in nodes]

    assert [each.code for each in done] == [143, 143], done
    assert all("saved" in each.stdout for each in done), done
    assert all("the others have not answered in time" in each.stderr for each in done), done
