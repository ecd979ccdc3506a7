"""From the options of `rankwise run` to a plan for a node among several."""

from pathlib import Path

import msgspec
import pytest

from rankwise.base.errors import ConfigError
from rankwise.base.units import SECOND
from rankwise.cli import several_nodes
from rankwise.cli.run import config_from_cli
from rankwise.cli.several_nodes import secrecy_notices
from rankwise.launch.cluster.plan import RendezvousPlan
from rankwise.launch.run.job import Job


@pytest.fixture(autouse=True)
def _a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)


def job_of(words: str) -> Job:
    return config_from_cli([*words.split(), "train.py"], {})


def plan_of(words: str) -> RendezvousPlan:
    plan = job_of(words).cluster
    assert plan is not None
    return plan


def test_the_nodes_count_restarts_together() -> None:
    job = job_of("--nnodes 2 --max-restarts 3 --rdzv-id nightly")

    assert job.restarts_allowed == 3
    assert job.run_id == "nightly"


def test_static_nodes_meet_at_the_masters_address() -> None:
    plan = plan_of("--nnodes 2 --node-rank 1 --master-addr 127.0.0.1 --master-port 4711")

    assert (plan.backend, plan.endpoint, plan.static_rank) == ("static", "127.0.0.1:4711", 1)
    assert plan.rendezvous.is_static
    assert plan.master_address == "127.0.0.1"
    # The agents listen at the master's port; rank 0 gets another one.
    assert plan.master_port is None


def test_static_nodes_may_meet_elsewhere() -> None:
    words = "--nnodes 2 --rdzv-endpoint 127.0.0.1:5 --master-addr 127.0.0.1 --master-port 6"

    plan = plan_of(words)

    assert (plan.endpoint, plan.master_address, plan.master_port) == ("127.0.0.1:5", "127.0.0.1", 6)


def test_an_elastic_job_has_a_range_of_nodes_and_spares() -> None:
    plan = plan_of(
        "--nnodes 2:4 --spares 1 --rdzv-backend etcd --rdzv-endpoint 127.0.0.1:1,127.0.0.1:2 "
        "--rdzv-id e "
        "--rdzv-conf last_call_timeout=2,lease_ttl=3,join_timeout=60,cacert=ca.pem"
    )

    rendezvous = plan.rendezvous
    assert (rendezvous.nodes_min, rendezvous.nodes_max, rendezvous.spares) == (2, 4, 1)
    assert rendezvous.last_call == 2 * SECOND
    assert rendezvous.lease_ttl == 3 * SECOND
    assert rendezvous.join_timeout == 60 * SECOND
    assert plan.store == {"cacert": "ca.pem"}
    assert plan.static_rank is None
    assert plan.master_address is None


def test_torchs_words_for_a_lease() -> None:
    plan = plan_of(
        "--nnodes 2 --rdzv-backend embedded --rdzv-endpoint 127.0.0.1:1 "
        "--rdzv-conf keep_alive_interval=2,keep_alive_max_attempt=4,timeout=7"
    )

    assert plan.rendezvous.lease_ttl == 8 * SECOND
    assert plan.rendezvous.join_timeout == 7 * SECOND
    assert plan.store == {}


def test_which_failures_are_final() -> None:
    policy = plan_of(
        "--nnodes 2 --no-retry ValueError,my.Error,3,-9 --max-no-progress 4 --max-node-failures 2 "
        "--retry-startup-errors"
    ).rendezvous.policy

    assert policy.final_exceptions == ("ValueError", "my.Error")
    assert policy.final_exit_codes == (3, -9)
    assert (policy.rounds_without_progress_max, policy.strikes_max) == (4, 2)
    assert policy.retries_startup_errors


def test_a_nodes_own_address() -> None:
    loopback = plan_of("--nnodes 2 --local-addr lo")

    assert loopback.address == "127.0.0.1"
    assert plan_of("--nnodes 2 --master-addr 127.0.0.1").address == "127.0.0.1"
    assert plan_of("--nnodes 2 --local-addr ::1").address == "::1"


def test_while_nobody_knows_the_endpoint_a_node_has_its_address_on_the_way_to_anywhere() -> None:
    unknown = plan_of("--nnodes 2 --master-addr nobody.invalid")

    assert unknown.address == plan_of("--nnodes 2 --master-addr 192.0.2.1").address


def test_variables_stand_for_flags() -> None:
    environ = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "SLURM_TOPOLOGY_ADDR": "s0.s1.n7"}

    plan = config_from_cli(["train.py"], environ).cluster

    assert plan is not None
    assert (plan.static_rank, plan.topology) == (1, "s0.s1.n7")


def test_one_node_meets_nobody() -> None:
    assert job_of("--nnodes 1 --rdzv-backend etcd --rdzv-endpoint 127.0.0.1:1").cluster is None


@pytest.mark.parametrize(
    ("given", "meant"), [("lease_tll=3", "lease_ttl"), ("join_timout=3", "join_timeout")]
)
def test_a_misspelt_time_of_the_rendezvous_is_not_left_to_the_store(given: str, meant: str) -> None:
    words = f"--nnodes 2 --rdzv-id e --rdzv-backend etcd --rdzv-endpoint h:1 --rdzv-conf {given}"

    with pytest.raises(ConfigError) as raised:
        plan_of(words)

    assert raised.value.hint == f"did you mean {meant}?"


def test_nodes_of_several_hosts_with_nothing_but_the_runs_name_are_warned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANKWISE_STORE_TOKEN", raising=False)
    monkeypatch.setattr(several_nodes, "encryption_lack", lambda: None)
    words = "--nnodes 2 --rdzv-backend embedded --rdzv-endpoint"

    (notice,) = secrecy_notices(plan_of(f"{words} 192.0.2.1:1"))

    assert "RANKWISE_STORE_TOKEN" in notice
    assert secrecy_notices(plan_of(f"{words} 127.0.0.1:1")) == []
    assert secrecy_notices(plan_of(f"{words} 192.0.2.1:1 --rdzv-conf token=x")) == []
    monkeypatch.setenv("RANKWISE_STORE_TOKEN", "x")
    assert secrecy_notices(plan_of(f"{words} 192.0.2.1:1")) == []


def test_nodes_that_cannot_encrypt_say_so_once_unless_they_are_told_not_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANKWISE_STORE_TOKEN", "x")
    monkeypatch.setattr(several_nodes, "encryption_lack", lambda: "Python 3.11 needs something")
    words = "--nnodes 2 --rdzv-backend embedded --rdzv-endpoint"

    assert secrecy_notices(plan_of(f"{words} 192.0.2.1:1")) == [
        "what the nodes agree on can be read on the network: Python 3.11 needs something"
    ]
    assert secrecy_notices(plan_of(f"{words} 127.0.0.1:1")) == []
    assert secrecy_notices(plan_of(f"{words} 192.0.2.1:1 --rdzv-conf encrypts=false")) == []
    assert (
        secrecy_notices(plan_of(f"--rdzv-id e {words.replace('embedded', 'etcd')} 192.0.2.1:1"))
        == []
    )


def test_an_own_etcd_that_asks_nobody_for_a_certificate_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANKWISE_STORE_TOKEN", "x")
    monkeypatch.setattr(several_nodes, "has_certificates", lambda: False)
    plan = plan_of(
        "--nnodes 3 --rdzv-id e --rdzv-backend etcd --rdzv-own-etcd --rdzv-endpoint a,b,c"
    )

    (notice,) = secrecy_notices(plan)

    assert "read and write there (pip install 'rankwise[tls]'" in notice
    monkeypatch.setattr(several_nodes, "has_certificates", lambda: True)
    assert secrecy_notices(plan) == []
    monkeypatch.delenv("RANKWISE_STORE_TOKEN")
    assert secrecy_notices(msgspec.structs.replace(plan, has_token=False)) != []


def test_health_is_answered_for_at_the_nodes_address_unless_another_is_named() -> None:
    words = "--nnodes 2 --rdzv-backend embedded --rdzv-endpoint 127.0.0.1:1 --local-addr 127.0.0.3"

    assert plan_of(f"{words} --health-port 1").health_host == "127.0.0.3"
    assert plan_of(f"{words} --health-port 1 --health-host 0.0.0.0").health_host == "0.0.0.0"
