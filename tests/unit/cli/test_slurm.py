"""What is taken from SLURM's variables, and what is not."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.base.errors import ConfigError
from rankwise.cli.run import config_from_cli, parse
from rankwise.cli.slurm import PORT_COUNT, PORT_MIN, Completed, SlurmStep, completed, hosts_in
from rankwise.launch.cluster import etcd_program
from rankwise.launch.cluster.plan import RendezvousPlan

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NODEID": "3",
    "SLURM_STEP_NODELIST": "127.0.0.1,far[1-3]",
}


@pytest.fixture(autouse=True)
def _a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)


def completed_of(words: str, **environ: str) -> Completed:
    environ = {**STEP, **environ}
    return completed(parse([*words.split(), "train.py"], environ), environ)


def plan_of(words: str, **environ: str) -> RendezvousPlan | None:
    return config_from_cli([*words.split(), "train.py"], {**STEP, **environ}).cluster


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1", "node1"),
        ("node1,gpu3", "node1 gpu3"),
        ("node[01-04,07],gpu3", "node01 node02 node03 node04 node07 gpu3"),
        ("node[8-11]", "node8 node9 node10 node11"),
        ("node[098-101]-ib", "node098-ib node099-ib node100-ib node101-ib"),
        ("rack[1-2]node[07-08]", "rack1node07 rack1node08 rack2node07 rack2node08"),
        ("bgl[000x011]", "bgl000 bgl001 bgl010 bgl011"),
        ("bgl[00Zx00Z,1A3]", "bgl00Z bgl1A3"),
        ("tux0 tux[2-3]", "tux0 tux2 tux3"),
    ],
)
def test_a_compressed_list_stands_for_its_hosts_in_order(text: str, expected: str) -> None:
    assert list(hosts_in(text)) == expected.split()


@pytest.mark.parametrize(
    "text",
    ["", ",", "node[1-", "node]1[", "node[]", "node[3-1]", "node[a-b]", "node[1,]", "n[[1]]"],
)
def test_what_is_no_list_is_refused_with_the_variables_name(text: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_STEP_NODELIST"):
        list(hosts_in(text))


@given(
    prefix=st.from_regex(r"[a-z]{1,5}-?", fullmatch=True),
    suffix=st.sampled_from(["", "-ib", ".cluster"]),
    width=st.integers(1, 5),
    numbers=st.lists(st.integers(0, 400), min_size=1, unique=True).map(sorted),
    grouped=st.booleans(),
)
def test_a_list_that_was_compressed_is_expanded_to_what_it_was(
    prefix: str, suffix: str, width: int, numbers: list[int], grouped: bool
) -> None:
    hosts = [f"{prefix}{number:0{width}}{suffix}" for number in numbers]

    assert list(hosts_in(compressed(prefix, suffix, width, numbers, grouped))) == hosts


def compressed(prefix: str, suffix: str, width: int, numbers: list[int], grouped: bool) -> str:
    """As SLURM writes it: runs of numbers as ranges, in one pair of brackets or in many."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    items = [
        f"{run[0]:0{width}}-{run[-1]:0{width}}" if len(run) > 1 else f"{run[0]:0{width}}"
        for run in runs
    ]
    if grouped:
        return f"{prefix}[{','.join(items)}]{suffix}"
    return ",".join(f"{prefix}[{item}]{suffix}" for item in items)


@given(st.text(alphabet="ab01-[],x ", max_size=20))
def test_whatever_stands_in_the_list_it_is_expanded_or_refused(text: str) -> None:
    try:
        hosts = list(hosts_in(text))
    except ConfigError:
        return
    assert hosts
    assert not any(set(host) & set("[], ") for host in hosts)


@given(job=st.integers(1, 2**31), step=st.integers(0, 5000))
def test_the_port_lies_in_the_documented_range(job: int, step: int) -> None:
    port = SlurmStep(job, step, 2, 2, 0, "a,b").port

    assert PORT_MIN <= port < PORT_MIN + PORT_COUNT
    assert port != SlurmStep(job, step + 1, 2, 2, 0, "a,b").port


def test_a_step_says_how_many_nodes_meet_where_and_under_which_name() -> None:
    options, notice = completed_of("--nproc-per-node 2")

    assert (options.nnodes, options.rdzv_id) == ("4", "4711.2")
    assert (options.rdzv_backend, options.rdzv_endpoint) == ("embedded", "127.0.0.1:26729")
    assert options.rdzv_conf == "is_host=false"
    assert notice == (
        "SLURM step 4711.2: this is node 3 of 4; run 4711.2 on 4 nodes, which meet at "
        "127.0.0.1:26729 (embedded, since there is no etcd in PATH: the loss of node 0 ends the "
        "run)"
    )


def test_the_first_node_serves() -> None:
    plan = plan_of("", SLURM_NODEID="0")

    assert plan is not None
    assert plan.store == {"is_host": "true"}


def test_ranks_follow_slurms_topology() -> None:
    plan = plan_of("", SLURM_TOPOLOGY_ADDR="spine.leaf3.node7")

    assert plan is not None
    assert plan.topology == "spine.leaf3.node7"


def test_the_users_settings_stay() -> None:
    options, _ = completed_of("--rdzv-id mine --rdzv-conf lease_ttl=3 --rdzv-backend c10d")

    assert options.rdzv_id == "mine"
    assert options.rdzv_backend == "c10d"
    assert options.rdzv_conf == "lease_ttl=3,is_host=false"


def test_an_elastic_job_keeps_its_range_of_nodes() -> None:
    plan = plan_of("--nnodes 2:4 --max-restarts 3")

    assert plan is not None
    assert (plan.rendezvous.nodes_min, plan.rendezvous.nodes_max) == (2, 4)
    assert plan.endpoint == "127.0.0.1:26729"


def test_static_nodes_get_slurms_numbers() -> None:
    plan = plan_of("--rdzv-backend static")

    assert plan is not None
    assert (plan.backend, plan.static_rank) == ("static", 3)


def test_in_an_etcd_the_run_is_called_as_slurm_calls_the_step() -> None:
    options, notice = completed_of("--nnodes 2 --rdzv-backend etcd --rdzv-endpoint e:2379")
    named, _ = completed_of("--nnodes 2 --rdzv-backend etcd --rdzv-endpoint e:1 --rdzv-id mine")

    assert (options.rdzv_id, options.rdzv_endpoint, notice) == ("4711.2", "e:2379", None)
    assert named.rdzv_id == "mine"


def test_an_etcd_of_the_runs_own_has_its_members_on_the_first_three_nodes() -> None:
    options, notice = completed_of("--rdzv-own-etcd", SLURM_STEP_NODELIST="n[1-4]")

    assert (options.nnodes, options.rdzv_id, options.rdzv_backend) == ("4", "4711.2", "etcd")
    assert options.rdzv_endpoint == "n1:26729,n2:26729,n3:26729"
    assert notice is not None
    assert "meet in an etcd of their own at n1:26729,n2:26729,n3:26729" in notice


@pytest.fixture
def etcd_in(tmp_path: Path) -> Callable[[str], str]:
    """A PATH with an etcd that says it has this version."""

    def make(version: str) -> str:
        program = tmp_path / version / "etcd"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\necho etcd Version: {version}\n")
        program.chmod(0o755)
        return str(program.parent)

    return make


def test_three_nodes_with_an_etcd_to_be_trusted_run_their_own(
    etcd_in: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_program, "has_certificates", lambda: True)
    options, notice = completed_of(
        "", SLURM_STEP_NODELIST="n[1-4]", PATH=etcd_in("3.4.23"), SLURM_NODEID="0"
    )

    assert options.rdzv_own_etcd
    assert (options.rdzv_backend, options.rdzv_id) == ("etcd", "4711.2")
    assert options.rdzv_endpoint == "n1:26729,n2:26729,n3:26729"
    assert notice is not None
    assert "meet in an etcd of their own at n1:26729,n2:26729,n3:26729, which survives" in notice


@pytest.mark.parametrize(
    ("words", "version", "count", "why"),
    [
        ("", "3.5.4", "4", "the etcd in PATH is 3.5.4, which may corrupt what it holds"),
        ("", "3.4.23", "2", "the step has 2 nodes"),
        ("--rdzv-conf lease_ttl=3,linger=2", "3.4.23", "4", "--rdzv-conf has linger"),
    ],
)
def test_other_nodes_meet_in_an_embedded_store_and_say_why(
    words: str,
    version: str,
    count: str,
    why: str,
    etcd_in: Callable[[str], str],
) -> None:
    options, notice = completed_of(
        words, PATH=etcd_in(version), SLURM_STEP_NUM_NODES=count, SLURM_STEP_NUM_TASKS=count
    )

    assert options.rdzv_backend == "embedded"
    assert not options.rdzv_own_etcd
    assert notice is not None
    assert notice.endswith(f"(embedded, since {why}: the loss of node 0 ends the run)")


def test_an_etcd_that_nothing_would_protect_is_not_chosen(
    etcd_in: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_program, "has_certificates", lambda: False)
    options, notice = completed_of("", PATH=etcd_in("3.5.9"))

    assert options.rdzv_backend == "embedded"
    assert notice is not None
    assert "since its protection needs the extra rankwise[tls]" in notice


def test_a_backend_that_the_user_names_is_taken(etcd_in: Callable[[str], str]) -> None:
    options, notice = completed_of("--rdzv-backend embedded", PATH=etcd_in("3.4.23"))

    assert (options.rdzv_backend, options.rdzv_own_etcd) == ("embedded", False)
    assert notice is not None
    assert notice.endswith("(embedded)")


@pytest.mark.parametrize(
    "words",
    [
        "--standalone",
        "--nnodes 1",
        "--nnodes 2 --node-rank 1 --master-port 29501",
        "--nnodes 2 --master-addr 127.0.0.1",
        "--nnodes 2 --rdzv-endpoint 127.0.0.1:5 --rdzv-backend embedded",
    ],
)
def test_nothing_is_taken_when_the_user_says_how_nodes_meet(words: str) -> None:
    before = parse([*words.split(), "train.py"], STEP)

    assert completed(before, STEP) == Completed(before, None)


def test_a_variable_of_torchruns_counts_as_said_by_the_user() -> None:
    options, notice = completed_of("", PET_RDZV_ENDPOINT="127.0.0.1:5")

    assert (options.nnodes, notice) == ("1:1", None)


def test_a_run_inside_a_worker_is_no_node_of_the_step() -> None:
    options, notice = completed_of("", RANKWISE_RUN_ID="4711.2")

    assert (options.nnodes, notice) == ("1:1", None)


def test_a_step_of_one_node_needs_nobody() -> None:
    options, notice = completed_of("", SLURM_STEP_NUM_NODES="1", SLURM_STEP_NUM_TASKS="1")

    assert (options.nnodes, notice) == ("1:1", None)


def test_several_tasks_on_a_node_are_refused_with_what_to_write_instead() -> None:
    with pytest.raises(ConfigError, match=r"8 tasks on 4 node.*--ntasks-per-node 1"):
        completed_of("", SLURM_STEP_NUM_TASKS="8")


def test_a_batch_script_without_srun_is_refused_with_the_line_to_write() -> None:
    environ = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "4", "SLURM_CPUS_PER_TASK": "8"}
    words = ["--nproc-per-node", "2", "train.py", "--name", "a b"]

    with pytest.raises(ConfigError, match="has 4 nodes, and this runs on one of them") as raised:
        completed(parse(words, environ), environ, words)

    assert raised.value.hint is not None
    assert raised.value.hint.startswith(
        "write srun --ntasks-per-node 1 --cpus-per-task 8 "
        "rankwise run --nproc-per-node 2 train.py --name 'a b', or give --standalone"
    )


@pytest.mark.parametrize(
    ("words", "nodes"), [("--standalone", "4"), ("--nnodes 1", "4"), ("", "1")]
)
def test_a_batch_script_may_use_one_node_where_it_says_so_or_has_no_other(
    words: str, nodes: str
) -> None:
    environ = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": nodes}
    before = parse([*words.split(), "train.py"], environ)

    assert completed(before, environ) == Completed(before, None)


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ConfigError, match="SLURM_NODEID is 'x'"):
        completed_of("", SLURM_NODEID="x")


@pytest.mark.parametrize(
    ("gpus_visible", "variables", "expected"),
    [
        (8, {"SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_ON_NODE": "64"}, "4"),
        (2, {"SLURM_GPUS_ON_NODE": "4"}, "2"),
        (0, {"SLURM_GPUS_ON_NODE": "4"}, "4"),
        (0, {"SLURM_CPUS_ON_NODE": "1"}, "1"),
        (3, {"SLURM_CPUS_ON_NODE": "1"}, "auto"),
        (0, {}, "auto"),
    ],
)
def test_auto_means_what_the_job_was_given_of_the_node(
    gpus_visible: int, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rankwise.launch.run.devices.visible_gpu_count", lambda _environ: gpus_visible
    )

    options, _ = completed_of("--standalone --nproc-per-node auto", **variables)

    assert options.nproc_per_node == expected


def test_a_requeued_jobs_step_is_another_run() -> None:
    options = completed_of("", SLURM_RESTART_COUNT="1").options

    assert options.rdzv_id == "4711.2-1"
    assert completed_of("", SLURM_RESTART_COUNT="0").options.rdzv_id == "4711.2"
