"""Which etcd may hold a run, and where its members are."""

import os
import select
from pathlib import Path

import pytest
from etcd_servers import find_etcd, needs_etcd
from running import WITHIN_S

from rankwise.base.errors import ConfigError
from rankwise.launch.cluster.etcd_program import check_version
from rankwise.launch.cluster.own_etcd import OwnEtcd


@pytest.mark.parametrize("version", ["3.4.20", "3.4.23", "3.5.6", "3.5.15", "3.6.0"])
def test_an_etcd_that_can_be_trusted_is_taken(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["3.3.27", "3.4.19", "3.5.0", "3.5.5", "unknown"])
def test_one_that_may_corrupt_what_it_holds_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"the etcd in PATH is {version}, which may corrupt"):
        check_version(version)


@pytest.mark.parametrize("endpoints", ["a,b", "a,a,b", "a,b,a:2379"])
def test_there_must_be_three_different_endpoints(endpoints: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs three different endpoints"):
        OwnEtcd(endpoints, "run", "token", lambda: True, own_hosts=(), place=tmp_path)


def test_a_node_without_an_endpoint_runs_no_member(tmp_path: Path) -> None:
    own = OwnEtcd("a,b,c", "run", "token", lambda: True, own_hosts=("d",), place=tmp_path / "x")
    with own:
        pass

    assert list(tmp_path.iterdir()) == []


@needs_etcd
def test_a_member_that_was_cut_off_asks_before_it_makes_the_others_elect_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = find_etcd()
    assert program is not None
    monkeypatch.setenv("PATH", str(Path(program).parent))
    here = ("127.0.0.1",)
    own = OwnEtcd("127.0.0.1,b,c", "run", "token", lambda: True, own_hosts=here, place=tmp_path)
    (tmp_path / "data" / "member").mkdir(parents=True)

    assert "--pre-vote" in own.command()  # etcd 3.4 does not by itself
    own._stack.close()


def test_a_node_without_etcd_claims_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for _ in range(2):  # what the first has claimed would be another's
        with pytest.raises(ConfigError, match="needs the program etcd: No such file"):
            OwnEtcd("127.0.0.1,b,c", "run", "", bool, own_hosts=["127.0.0.1"], place=tmp_path)


def test_what_a_wrapper_has_started_ends_with_it(tmp_path: Path) -> None:
    own = OwnEtcd("a,b,c", "run", "token", lambda: True, own_hosts=(), place=tmp_path)
    said, log_fd = os.pipe()

    with own, os.fdopen(said), os.fdopen(log_fd, "wb") as log:
        own._run_member(["sh", "-c", "sleep 1000 &"], log)
        log.close()

        ready, _, _ = select.select([said], [], [], WITHIN_S)
        assert ready, "somebody could still write"
        assert os.read(said, 1) == b""
