"""Launching from Python: torch's and ours through the same scenarios."""

import dataclasses
import importlib
import inspect
import io
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
from elastic_sides import RANKWISE, load_from

pytestmark = pytest.mark.torch


@pytest.fixture
def launcher(side: str) -> ModuleType:
    pytest.importorskip("torch")
    load_from(side, "multiprocessing")
    return importlib.import_module(f"{side}.launcher.api")


def make_config(launcher: ModuleType, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": 2,
        "run_id": str(uuid.uuid4()),
        "rdzv_backend": "static",
        "rdzv_endpoint": "localhost:0",
        "rdzv_configs": {"rank": 0},
        "monitor_interval": 0.01,
        "max_restarts": 0,
    }
    return launcher.LaunchConfig(**fields | changes)


class Launch:
    """A launch whose agent and rendezvous are replaced, as tests of programs do it."""

    def __init__(self, side: str, launcher: ModuleType, stack: ExitStack) -> None:
        self.handler = MagicMock()
        stack.enter_context(
            patch(
                f"{side}.elastic.rendezvous.registry.get_rendezvous_handler",
                return_value=self.handler,
            )
        )
        self.run = stack.enter_context(patch(f"{side}.launcher.api.LocalElasticAgent.run"))
        self.record = stack.enter_context(patch(f"{side}.launcher.api.events.record"))
        self.launcher = launcher

    def __call__(self, **changes: Any) -> Any:
        return self.launcher.launch_agent(make_config(self.launcher, **changes), print, ["hello"])


@pytest.fixture
def launch(side: str, launcher: ModuleType) -> Iterator[Launch]:
    with ExitStack() as stack:
        yield Launch(side, launcher, stack)


def test_a_launch_returns_values_by_global_rank(side: str, launch: Launch) -> None:
    api = load_from(side, "agent.server.api")
    launch.run.return_value = api.RunResult(api.WorkerState.SUCCEEDED, {4: "four"})

    assert launch() == {4: "four"}

    launch.handler.shutdown.assert_called_once()
    launch.record.assert_called_once()
    assert launch.record.call_args.args[0].name == "torchelastic.worker.status.SUCCEEDED"


def test_failed_workers_are_an_exception_and_one_event(side: str, launch: Launch) -> None:
    api = load_from(side, "agent.server.api")
    errors = load_from(side, "multiprocessing.errors")
    failure = errors.ProcessFailure(local_rank=0, pid=17, exitcode=3, error_file="none")
    launch.run.return_value = api.RunResult(api.WorkerState.FAILED, {}, {0: failure})

    with pytest.raises(errors.ChildFailedError, match="print FAILED"):
        launch()

    launch.handler.shutdown.assert_called_once()
    launch.record.assert_called_once()


def test_an_exception_of_the_agent_comes_out_as_it_is(launch: Launch) -> None:
    error = KeyError("of the agent")
    launch.run.side_effect = error

    with pytest.raises(KeyError) as raised:
        launch()

    assert raised.value is error
    launch.handler.shutdown.assert_called_once()
    launch.record.assert_called_once()
    assert launch.record.call_args.args[0].name == "torchelastic.worker.status.FAILED"


def test_after_a_signal_the_rendezvous_stays_open(side: str, launch: Launch) -> None:
    signal_exception = load_from(side, "multiprocessing").SignalException
    launch.run.side_effect = signal_exception("told to stop", 15)

    with pytest.raises(signal_exception):
        launch()

    launch.handler.shutdown.assert_not_called()
    launch.record.assert_called_once()


def test_the_signals_to_handle_are_in_the_environment_from_then_on(
    side: str, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_SIGNALS_TO_HANDLE", raising=False)
    api = load_from(side, "agent.server.api")
    launch.run.return_value = api.RunResult(api.WorkerState.SUCCEEDED)

    launch(signals_to_handle="SIGTERM,SIGUSR1")

    assert os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGUSR1"


def test_what_runs_has_a_name(launcher: ModuleType) -> None:
    name = launcher._get_entrypoint_name

    assert name(print, []) == "print"
    assert name(sys.executable, ["-u", "-m", "train.py", "-x"]) == "train.py"
    assert name(sys.executable, []) == ""
    assert name("bash", ["run.sh"]) == "bash"
    assert name(None, []) == ""


def test_defaults_of_a_launch(launcher: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "45")

    plain = make_config(launcher)
    patient = make_config(launcher, rdzv_timeout=7, shutdown_timeout=0)

    assert plain.rdzv_configs["timeout"] == 900
    assert plain.shutdown_timeout == 45
    assert patient.rdzv_configs["timeout"] == 7
    assert patient.shutdown_timeout == 0
    with pytest.raises(ValueError, match=r"^shutdown_timeout must be non-negative, got -1$"):
        make_config(launcher, shutdown_timeout=-1)


@pytest.mark.parametrize(
    ("endpoint", "place"), [("host:77", ("host", 77)), ("", None), ("host", None)]
)
def test_where_rank_0_listens(
    side: str, launcher: ModuleType, endpoint: str, place: tuple[str, int] | None
) -> None:
    parameters = load_from(side, "rendezvous.api").RendezvousParameters
    static = parameters("static", endpoint, "run", 1, 1)

    if place is None:
        with pytest.raises(ValueError, match="missing"):
            launcher._get_addr_and_port(static)
    else:
        assert launcher._get_addr_and_port(static) == place
    assert launcher._get_addr_and_port(parameters("c10d", endpoint, "run", 1, 1)) == (None, None)


def sum_of_ranks() -> int:
    """What ranks reduce over gloo."""
    import torch  # noqa: PLC0415  # in the worker
    import torch.distributed as dist  # noqa: PLC0415  # the same

    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total.item())


@pytest.mark.system
def test_a_function_sums_its_ranks_over_gloo(launcher: ModuleType) -> None:
    port = importlib.import_module(
        "rankwise.compat.torch.elastic.utils.distributed"
    ).get_free_port()
    config = make_config(launcher, rdzv_endpoint=f"localhost:{port}")

    values = launcher.elastic_launch(config, sum_of_ranks)()

    assert values == {0: 3, 1: 3}


@pytest.mark.system
def test_a_program_writes_its_rank(launcher: ModuleType, tmp_path: Path) -> None:
    port = importlib.import_module(
        "rankwise.compat.torch.elastic.utils.distributed"
    ).get_free_port()
    config = make_config(launcher, rdzv_endpoint=f"localhost:{port}", nproc_per_node=3)
    script = f"echo $RANK of $WORLD_SIZE > '{tmp_path}'/$RANK"

    launcher.elastic_launch(config, "bash")("-c", script)

    assert sorted(path.read_text() for path in tmp_path.iterdir()) == [
        "0 of 3\n",
        "1 of 3\n",
        "2 of 3\n",
    ]


@pytest.mark.system
def test_output_goes_to_what_has_replaced_the_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank${rank}]: ")
    run = importlib.import_module(f"{RANKWISE}.run")
    script = tmp_path / "say.sh"
    script.write_text("echo to stdout; echo to stderr >&2")

    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        run.main(
            ["--nproc-per-node=2", "-t3", f"--log-dir={tmp_path}", "--no-python", "sh", str(script)]
        )

    assert sorted(out.getvalue().splitlines()) == [f"[rank{rank}]: to stdout" for rank in (0, 1)]
    assert {f"[rank{rank}]: to stderr" for rank in (0, 1)} <= set(err.getvalue().splitlines())


def test_a_launch_inside_an_exceptions_handler_succeeds(side: str, launch: Launch) -> None:
    api = load_from(side, "agent.server.api")
    launch.run.return_value = api.RunResult(api.WorkerState.SUCCEEDED, {0: "fine"})

    try:
        int("no number")
    except ValueError:
        values = launch()

    assert values == {0: "fine"}
    launch.handler.set_closed.assert_not_called()
    launch.handler.shutdown.assert_called_once()


OWN_TYPES = {"logs_specs", "numa_options"}
"""Fields of which the type is a class of ours, or `Any` for one of a torch that is not imported."""


def test_the_launch_config_has_torchs_fields_and_signature() -> None:
    torchs = pytest.importorskip("torch.distributed.launcher.api").LaunchConfig
    ours = importlib.import_module(f"{RANKWISE}.launcher.api").LaunchConfig
    pairs = list(zip(dataclasses.fields(ours), dataclasses.fields(torchs), strict=True))

    for own, other in pairs:
        for attribute in ("name", "default", "default_factory", "kw_only", "init", "repr", "hash"):
            assert getattr(own, attribute) == getattr(other, attribute), own.name
        assert own.compare == other.compare
        if own.name not in OWN_TYPES:
            assert own.type == other.type, own.name
    of_logs = next(own.type for own, _ in pairs if own.name == "logs_specs")
    assert (
        of_logs == importlib.import_module(f"{RANKWISE}.elastic.multiprocessing").LogsSpecs | None
    )
    of_ours = inspect.signature(ours).parameters.values()
    of_torchs = inspect.signature(torchs).parameters.values()
    assert [(each.name, each.kind, each.default) for each in of_ours] == [
        (each.name, each.kind, each.default) for each in of_torchs
    ]
    assert ours.__match_args__ == torchs.__match_args__
    assert repr(ours.__dataclass_params__) == repr(torchs.__dataclass_params__)


def test_a_launch_config_is_shown_as_torchs_is() -> None:
    torchs = pytest.importorskip("torch.distributed.launcher.api").LaunchConfig
    ours = importlib.import_module(f"{RANKWISE}.launcher.api").LaunchConfig

    shown = [repr(each(1, 2, 3, logs_specs="given")) for each in (ours, torchs)]

    assert shown[0] == shown[1]
