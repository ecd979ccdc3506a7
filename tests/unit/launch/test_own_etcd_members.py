"""Which etcd may hold a run, and where its members are."""

import os
import select
from pathlib import Path

import pytest
from running import WITHIN_S

from rankwise.base.errors import ConfigError
from rankwise.launch.cluster.etcd_program import check_version
from rankwise.launch.cluster.own_etcd import OwnEtcd
from rankwise.launch.held_folder import OF_ETCD, held_folder


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


def test_what_a_wrapper_has_started_ends_with_it(tmp_path: Path) -> None:
    own = OwnEtcd("a,b,c", "run", "token", lambda: True, own_hosts=(), place=tmp_path)
    said, log_fd = os.pipe()

    with own, os.fdopen(said), os.fdopen(log_fd, "wb") as log:
        own._run_member(["sh", "-c", "sleep 1000 &"], log)
        log.close()

        ready, _, _ = select.select([said], [], [], WITHIN_S)
        assert ready, "somebody could still write"
        assert os.read(said, 1) == b""


def test_folders_that_nobody_holds_are_removed_by_the_next_agent(tmp_path: Path) -> None:
    abandoned = tmp_path / "rankwise_abandoned"
    (abandoned / "etcd" / "data" / "member").mkdir(parents=True)
    others = [tmp_path / "rankwise_of_others", tmp_path / "of_others" / "etcd"]
    for other in others:
        other.mkdir(parents=True)

    with (
        held_folder(tmp_path / "rankwise_first", OF_ETCD) as first,
        held_folder(tmp_path / "rankwise_second", OF_ETCD) as second,
    ):
        assert first.is_dir()
        assert second.is_dir()

    assert not abandoned.exists()
    assert all(other.is_dir() for other in others)
