"""The words that manifests give to containers are run as they stand: a real etcd, real agents.

What Kubernetes would do is done by hand: it fills in variables, gives names to addresses, and
signals a pod that it drains. Names become addresses of the loopback here, and ports free ones.
"""

import http.client
import json
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from etcd_servers import find_etcd, free_ports, needs_etcd
from running import RANKWISE, Running, run, wait_for_any, write_program

pytestmark = [pytest.mark.system, needs_etcd]

POD_IP = "127.0.1.1"
"""Of the first pod; the kubelet probes it there."""
PROGRAM = """
import os, sys, time
from pathlib import Path
import rankwise
assert not rankwise.should_stop()
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
while not rankwise.should_stop() and not Path(sys.argv[1]).exists():
    time.sleep(0.01)
"""


class Cluster:
    """The pods of a manifest, on this host."""

    def __init__(self, objects: list[dict[str, Any]], folder: Path, stack: ExitStack) -> None:
        self._by_kind = {one["kind"]: one for one in objects}
        self._folder = folder
        self._stack = stack
        self._client_port, self._peer_port = free_ports(2)

    def start_etcd(self) -> None:
        spec = self._by_kind["StatefulSet"]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        program = find_etcd()
        assert program is not None
        members = []
        for index in range(spec["replicas"]):
            name = f"{self._by_kind['StatefulSet']['metadata']['name']}-{index}"
            words = [
                self._here(_filled_in(word, {"POD_NAME": name}))
                .replace("0.0.0.0", f"127.0.0.{index + 2}")
                .replace("/var/lib/etcd", str(self._folder / name))
                for word in container["args"]
            ]
            members.append(self._stack.enter_context(Running(program, *words, "--logger=zap")))
        for member in members:
            member.wait_for("serving client traffic", stream="stderr")

    def start_pod(self, index: int, health_port: int = 0) -> Running:
        (job,) = self._by_kind["JobSet"]["spec"]["replicatedJobs"]
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        variables = {
            "JOB_UID": "0f-1e",
            "POD_IP": POD_IP.replace("1.1", f"1.{index + 1}"),
            "HOST_NAME": "host7",
        }
        assert container["command"] == ["rankwise", "run"]
        words = [
            re.sub(r"--health-port=\d+", f"--health-port={health_port}", word)
            for word in (self._here(_filled_in(word, variables)) for word in container["args"])
        ]
        return self._stack.enter_context(Running(*RANKWISE, "run", *words))

    def _here(self, text: str) -> str:
        """Names of members as addresses, and their ports as those that are free here."""
        named = re.sub(
            r"[a-z-]+-etcd-(\d)\.[a-z-]+-etcd-peers",
            lambda found: f"127.0.0.{int(found[1]) + 2}",
            text,
        )
        return named.replace(":2379", f":{self._client_port}").replace(
            ":2380", f":{self._peer_port}"
        )


def _filled_in(word: str, variables: dict[str, str]) -> str:
    """As Kubernetes does it: $(NAME) is filled in, and $$ stands for $."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables[found[1]]

    return re.sub(r"\$\$|\$\(([A-Z_]+)\)", value, word)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_program(tmp_path, PROGRAM)
    return tmp_path


@pytest.fixture
def cluster(folder: Path) -> Iterator[Cluster]:
    words = ["--image", "i", "--name", "digits", "--nodes", "1:2", "--nproc-per-node", "2", "--"]
    words += ["--rdzv-conf", "lease_ttl=3", str(folder / "program.py"), str(folder / "is over")]
    done = run("manifest", "kubernetes", *words)
    assert done.code == 0, done
    with ExitStack() as stack:
        cluster = Cluster(list(yaml.safe_load_all(done.stdout)), folder, stack)
        cluster.start_etcd()
        yield cluster


def health_at(port: int) -> dict[str, Any]:
    connection = http.client.HTTPConnection(POD_IP, port, timeout=60)
    connection.request("GET", "/health")
    answer = connection.getresponse()
    assert answer.status == 200
    found: dict[str, Any] = json.loads(answer.read())
    connection.close()
    return found


def test_a_drained_pod_leaves_and_its_replacement_joins(cluster: Cluster, folder: Path) -> None:
    (port,) = free_ports(1)
    first, second = cluster.start_pod(0, port), cluster.start_pod(1)
    wait_for_any([first, second], "of 4", count=4)
    assert health_at(port)["nodes"] == 2

    second.signal(signal.SIGTERM)
    drained = second.finish()
    wait_for_any([first], "of 2", count=2)
    replacement = cluster.start_pod(1)
    wait_for_any([first, replacement], "of 4", count=first.stdout.count("of 4") + 4)
    (folder / "is over").touch()
    done = [first.finish(), replacement.finish()]

    assert drained.code == 143, drained
    assert [each.code for each in done] == [0, 0], done


def test_a_pod_that_comes_when_all_is_over_ends_as_the_run_did(
    cluster: Cluster, folder: Path
) -> None:
    (folder / "is over").touch()
    pods = [cluster.start_pod(0), cluster.start_pod(1)]
    assert [pod.finish().code for pod in pods] == [0, 0]

    late = cluster.start_pod(1).finish()

    assert late.code == 0, late
