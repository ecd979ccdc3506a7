"""Arguments of the Python functions: a wrong one is named, with its value, and nothing starts."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rankwise
from rankwise.base.errors import ConfigError
from rankwise.base.units import SECOND, Duration
from rankwise.core.gang.vocabulary import GangSpec
from rankwise.launch.arguments import log_plan
from rankwise.launch.run.environment import VARIABLES_OF_RANKS, worker_environment
from rankwise.launch.run.function_job import function_job
from rankwise.launch.run.job import Job, LogPlan, Script, Streams
from rankwise.launch.run.node_ranks import NodeRanks


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def refusal(call: Callable[..., Any], *positional: Any, **named: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*positional, **named)
    message = str(caught.value)
    assert "\n" not in message
    assert "--" not in message, "an option of the command line is nothing to a Python program"
    return message


@pytest.mark.parametrize(
    ("name", "hint"),
    [("a", r"for the function: kwargs=\{'a': 1\}"), ("nproc", r"did you mean nprocs\?")],
)
def test_an_argument_that_run_does_not_have_is_refused_with_what_was_meant(
    name: str, hint: str
) -> None:
    untyped: Any = rankwise.run

    with pytest.raises(TypeError, match=rf"rankwise.run\(\) has no argument '{name}' \({hint}\)"):
        untyped(print, **{name: 1})


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("args", 5, "args is 5, expected a tuple of the function's arguments (for a single"),
        ("args", "text", "args is 'text', expected a tuple"),
        ("args", {"a": 1}, "args is {'a': 1}, expected a tuple"),
        ("nprocs", 0, "nprocs is 0, expected 1 or more workers"),
        ("nprocs", -1, "nprocs is -1, expected 1 or more workers"),
        ("nprocs", 4097, "nprocs is 4097, expected at most 4096 workers"),
        ("nprocs", 10**20, "nprocs is 100000000000000000000, expected at most 4096 workers"),
        ("nprocs", 2.0, "nprocs is 2.0, expected the number of workers, a whole number"),
        ("nprocs", True, "nprocs is True, expected the number of workers"),
        ("nprocs", "2", "nprocs is '2', expected the number of workers"),
        ("nprocs", None, "nprocs is None, expected the number of workers"),
        ("nprocs", Unshowable(), "nprocs is <a Unshowable that cannot be shown>, expected"),
        ("start_method", "thread", "start_method is 'thread', expected 'spawn', 'forkserver'"),
        ("start_method", 3, "start_method is 3, expected 'spawn'"),
        ("preload", "numpy", "(for a single module: preload=['numpy'])"),
        ("preload", [3], "preload has 3, expected a module's name"),
        ("preload", ["a b"], "preload has 'a b', expected a module's name"),
        ("preload", 7, "preload is 7, expected a list of modules' names"),
        ("server", "warm", "server is 'warm', expected a rankwise.ForkServer"),
        ("max_restarts", 1.5, "max_restarts is 1.5, expected the number of restarts, a whole"),
        ("max_restarts", -1, "max_restarts is -1, expected 0 or more"),
        ("max_restarts", 10**30, "expected 0 or more, at most 1000000000"),
        ("max_restarts", "1", "max_restarts is '1', expected the number of restarts"),
        ("grace", "30", "grace is '30', expected seconds, as a number"),
        ("grace", None, "grace is None, expected seconds, as a number"),
        ("grace", -1, "grace is -1.0, expected seconds, from 0 to ten years (315360000)"),
        ("grace", float("inf"), "grace is inf, expected seconds, from 0 to ten years"),
        ("grace", float("nan"), "grace is nan, expected seconds, from 0 to ten years"),
        ("grace", 10**400, "grace is inf, expected seconds, from 0 to ten years"),
        ("hang_timeout", 0, "hang_timeout is 0, expected more than 0 seconds"),
        ("hang_timeout", 1e-12, "hang_timeout is 1e-12, expected more than 0 seconds"),
        ("hang_timeout", -5, "hang_timeout is -5.0, expected seconds, from 0"),
        ("hang_timeout", 1e30, "hang_timeout is 1e+30, expected seconds, from 0 to ten years"),
        ("hang_timeout", "5m", "hang_timeout is '5m', expected seconds, as a number"),
        ("timeout", 0, "timeout is 0, expected more than 0 seconds"),
        ("timeout", "5m", "timeout is '5m', expected seconds, as a number"),
        ("env", [("A", "1")], "env is [('A', '1')], expected a mapping"),
        ("env", {"A": 1}, "env['A'] is 1, expected a string"),
        ("env", {"A": "a\0"}, "env['A'] is 'a\\x00', expected a string without NUL"),
        ("env", {1: "a"}, "env has a variable 1, expected a name"),
        ("env", {"": "a"}, "env has a variable '', expected a name"),
        ("env", {"A=B": "a"}, "env has a variable 'A=B', expected a name without '='"),
        ("env", {"A\0": "a"}, "env has a variable 'A\\x00', expected a name"),
        ("env", {"RANK": "7"}, "env has RANK, which rankwise itself sets for every worker"),
        ("log_dir", 3, "log_dir is 3, expected a directory's path"),
        ("log_dir", b"logs", "log_dir is b'logs', expected a directory's path"),
        ("log_dir", "", "log_dir is '', expected a directory's path"),
        ("log_dir", "a\0b", "log_dir is 'a\\x00b', expected a directory's path"),
        ("log_dir", __file__, "log_dir is " + __file__ + ", but "),
        ("redirects", 3, 'redirects is 3, expected a string ("0" none, "1" stdout'),
        ("redirects", "x", "redirects is 'x', expected streams (0 none"),
        ("redirects", "9:1", "redirects names local rank 9, but this node's ranks are 0 to 1"),
        ("tee", None, "tee is None, expected a string"),
        ("tee", "2:3", "tee names local rank 2, but this node's ranks are 0 to 1"),
        ("prefix", 5, "prefix is 5, expected a string"),
        ("run_id", "", "run_id is '', expected a name that can be part of a file's name"),
        ("run_id", "a/b", "run_id is 'a/b', expected a name"),
        ("run_id", 7, "run_id is 7, expected a string"),
        ("role", "two\nlines", "role is 'two\\nlines', expected a word for prefixes"),
        ("role", None, "role is None, expected a string"),
    ],
)
def test_run_refuses_a_wrong_argument_by_its_name(argument: str, value: Any, message: str) -> None:
    told = refusal(rankwise.run, print, **{"nprocs": 2, argument: value})

    assert message in told


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"args": 5}, "args is 5"),
        ({"nprocs": 10**20}, "expected at most 4096 workers"),
        ({"start_method": "thread"}, "start_method is 'thread'"),
    ],
)
def test_spawn_refuses_a_wrong_argument_by_its_name(named: dict[str, Any], message: str) -> None:
    assert message in refusal(rankwise.spawn, print, **named)


def test_a_fork_server_refuses_what_is_no_list_of_modules() -> None:
    assert "for a single module: preload=['numpy']" in refusal(rankwise.ForkServer, "numpy")
    assert "preload has 3" in refusal(rankwise.ForkServer, [3])
    assert "preload is None" in refusal(rankwise.ForkServer, None)


def test_nothing_is_called_in_a_directory_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    for call in (lambda: rankwise.run(print), lambda: rankwise.spawn(print), rankwise.ForkServer):
        assert "the working directory cannot be used" in refusal(call)


def test_right_arguments_reach_the_job() -> None:
    job = function_job(
        print,
        ["a"],
        2,
        start_method="fork",
        logs=LogPlan(),
        max_restarts=3,
        grace=1.5,
        hang_timeout=60,
        environment={"A": "1"},
        preload=["json", "email.mime"],
        run_id="nightly",
        role="",
    )

    assert job.gang == GangSpec(
        size=2, grace=Duration(SECOND * 3 // 2), hang_timeout=Duration(60 * SECOND)
    )
    assert job.policy.restarts_max == 3
    assert job.environment["A"] == "1"
    assert job.preload == ("json", "email.mime")
    assert (job.run_id, job.role) == ("nightly", "")


def test_a_log_directory_may_be_a_path_object(tmp_path: Path) -> None:
    plan = log_plan(log_dir=tmp_path, redirects="3", tee="0:1", prefix=None, nprocs=2)

    assert plan == LogPlan(
        directory=os.fspath(tmp_path), redirects=Streams.BOTH, tee={0: Streams.OUT}
    )


def test_the_variables_that_are_refused_are_those_that_workers_get() -> None:
    job = Job(program=Script("a.py"), gang=GangSpec(size=1), run_id="x")

    world = NodeRanks(size=1, master_addr="127.0.0.1", master_port=1)
    made = worker_environment(job, world, local_rank=0, attempt=0, inherited={})

    assert {name for name in made if not name.startswith(("RANKWISE_", "TORCH_NCCL_"))} == (
        VARIABLES_OF_RANKS
    )
