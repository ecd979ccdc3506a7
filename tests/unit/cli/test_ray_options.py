"""From the words of `rankwise run --on ray` to the words that agents are given."""

import sys

import pytest

from rankwise.base.errors import ConfigError
from rankwise.base.units import SECOND
from rankwise.cli.main import invoke
from rankwise.cli.on_ray import ray_job
from rankwise.cli.run import STRICT_WORDS, options_in, run
from rankwise.launch.on_ray.job import (
    RayJob,
    RayRendezvous,
    agent_environment,
    agent_words,
    token_for_agents,
)

PLACE = RayRendezvous(
    backend="embedded", endpoint="10.0.0.1:7", settings="is_host=false", token="secret"
)


def job_of(words: str, **environ: str) -> RayJob:
    context = run.make_context("rankwise run", ["--on", "ray", *words.split()], obj=environ)
    return ray_job(options_in(context), context.meta[STRICT_WORDS])


def test_agents_get_the_words_of_the_user_and_where_to_meet() -> None:
    job = job_of("--nnodes 2 --nproc-per-node 2 --rdzv-id x --no-prefix train.py --on board -- a")

    assert agent_words(job, 2, PLACE) == [
        "--rdzv-id=x",
        "--nnodes=2:2",
        "--rdzv-backend=embedded",
        "--rdzv-endpoint=10.0.0.1:7",
        "--rdzv-conf=is_host=false",
        "--rdzv-once",
        "--nproc-per-node=2",
        "--no-prefix",
        *("--", "train.py", "--on", "board", "--", "a"),
    ]


def test_all_nodes_write_to_one_console_so_ranks_are_those_of_the_job() -> None:
    assert "--log-prefix=[${role_name}${rank}]:" in job_of("t.py").words
    assert "--log-prefix=x" in job_of("--log-prefix x t.py").words


def test_a_small_cluster_runs_an_elastic_job_on_fewer_nodes() -> None:
    job = job_of("--nnodes 2:8 t.py")

    assert "--nnodes=2:3" in agent_words(job, 3, PLACE)


def test_one_node_meets_nobody() -> None:
    words = agent_words(job_of("--rdzv-id x t.py"), 1, None)

    assert [word for word in words if word.startswith(("--rdzv", "--nnodes"))] == ["--rdzv-id=x"]


@pytest.mark.parametrize(
    ("words", "resources"),
    [
        ("", {"CPU": 1}),
        ("--nproc-per-node 4", {"CPU": 4}),
        ("--nproc-per-node gpu", {"CPU": 1, "GPU": None}),
        (
            "--nproc-per-node 4 --ray-resources CPU=16,GPU=4,TPU=0.5",
            {"CPU": 16, "GPU": 4, "TPU": 0.5},
        ),
    ],
)
def test_an_agent_takes_what_its_workers_need(
    words: str, resources: dict[str, float | None]
) -> None:
    assert job_of(f"{words} t.py").resources == resources


def test_a_store_of_ones_own_is_used() -> None:
    job = job_of(
        "--nnodes 2 --rdzv-backend etcd --rdzv-endpoint e:1 --rdzv-conf join_timeout=5 t.py"
    )

    assert (job.backend, job.endpoint, job.patience) == ("etcd", "e:1", 5 * SECOND)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--standalone t.py", "--standalone has no meaning with --on ray"),
        ("--node-rank 0 t.py", "--node-rank has no meaning"),
        ("--rdzv-backend static t.py", "no fixed ranks"),
        ("--rdzv-backend etcd t.py", "go together"),
        ("--rdzv-endpoint e:1 t.py", "go together"),
        ("--ray-resources CPU t.py", "'CPU' is not NAME=NUMBER"),
        ("--ray-resources CPU=-1 t.py", "'CPU=-1' is not NAME=NUMBER"),
        ("--rdzv-conf join_timeout=soon t.py", "join_timeout is 'soon'"),
        ("--nnodes 0 t.py", "--nnodes is '0'"),
        ("--rdzv-id a/b t.py", "--rdzv-id"),
    ],
)
def test_what_cannot_be_is_refused(words: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        job_of(words)


def test_agents_get_the_variables_of_launchers_and_not_those_that_have_had_their_effect() -> None:
    environ = {
        "PET_ON": "ray",
        "PET_RDZV_ENDPOINT": "e:1",
        "PET_TEE": "3",
        "NCCL_DEBUG": "INFO",
        "HOME": "somewhere",
    }

    assert agent_environment(environ, PLACE) == {
        "PET_TEE": "3",
        "NCCL_DEBUG": "INFO",
        "RANKWISE_STORE_TOKEN": "secret",
    }


def test_agents_get_a_random_token_unless_the_user_gives_one() -> None:
    tokens = {token_for_agents({}) for _ in range(3)}

    assert len(tokens) == 3
    assert all(token is not None and len(token) == 32 for token in tokens)
    assert token_for_agents({"RANKWISE_STORE_TOKEN": "mine"}) is None


def test_without_ray_the_line_to_install_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    assert invoke(["run", "--on", "ray", "t.py"]) == 2

    assert "pip install 'rankwise[ray]'" in capfd.readouterr().err


def test_a_client_of_ray_is_told_that_nodes_could_not_reach_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")

    assert invoke(["run", "--on", "ray", "t.py"]) == 2

    assert "ray job submit" in capfd.readouterr().err


@pytest.mark.parametrize("places", [("sim", "ray"), ("ray", "sim:switch8")])
def test_ranks_run_at_one_place(places: tuple[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    assert invoke(["run", "--on", places[0], "--on", places[1], "t.py", "--on", "sim"]) == 2

    told = (
        f"--on {places[0]} and --on {places[1]} exclude each other: each says where the ranks run"
    )
    assert told in capfd.readouterr().err
