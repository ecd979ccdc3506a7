"""Agents: torch's and ours through the same scenarios, on torch's stores."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any
from unittest.mock import Mock, patch

import pytest
from elastic_sides import Load

pytestmark = pytest.mark.torch


@pytest.fixture
def api(load: Load) -> ModuleType:
    pytest.importorskip("torch")
    return load("agent.server.api")


@pytest.fixture
def rendezvous(load: Load) -> ModuleType:
    return load("rendezvous")


def make_handler(rendezvous: ModuleType, rank: int = 0, waiting: list[int] | None = None) -> Any:
    """A rendezvous of one node in a store in memory."""
    dist = pytest.importorskip("torch.distributed")

    class Handler(rendezvous.RendezvousHandler):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            self.meetings = 0
            self.shutdowns = 0

        def get_backend(self) -> str:
            return "meadow"

        def next_rendezvous(self) -> Any:
            self.meetings += 1
            listens = rendezvous.RendezvousStoreInfo("10.0.0.9", 4711)
            return rendezvous.RendezvousInfo(dist.HashStore(), rank, 1, listens)

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            pass

        def num_nodes_waiting(self) -> int:
            return waiting.pop() if waiting else 0

        def get_run_id(self) -> str:
            return "run"

        def shutdown(self) -> bool:
            self.shutdowns += 1
            return True

    return Handler()


def make_spec(api: ModuleType, rendezvous: ModuleType, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "role": "trainer",
        "local_world_size": 2,
        "entrypoint": print,
        "rdzv_handler": make_handler(rendezvous),
        "max_restarts": 2,
        "monitor_interval": 0.001,
    }
    return api.WorkerSpec(**fields | changes)


def make_agent(api: ModuleType, spec: Any, states: list[str]) -> Any:
    """An agent whose workers are in these states, one after the other, when they are looked at."""

    class Agent(api.SimpleElasticAgent):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__(spec)
            self.calls: list[str] = []
            self.barriers = 0

        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            self.calls.append("start")
            return {worker.local_rank: 100 + worker.local_rank for worker in worker_group.workers}

        def _stop_workers(self, worker_group: Any) -> None:  # noqa: ARG002
            self.calls.append("stop")

        def _monitor_workers(self, worker_group: Any) -> Any:
            self.calls.append("monitor")
            state = api.WorkerState[states.pop(0)]
            values = {w.global_rank: None for w in worker_group.workers}
            return api.RunResult(state, values if state == api.WorkerState.SUCCEEDED else {})

        def _shutdown(self, death_sig: Any = 15, timeout: int = 30) -> None:  # noqa: ARG002
            self.calls.append("shutdown")

        def _exit_barrier(self) -> None:
            self.barriers += 1

    return Agent()


def test_workers_that_succeed_are_started_once(api: ModuleType, rendezvous: ModuleType) -> None:
    agent = make_agent(api, make_spec(api, rendezvous), ["HEALTHY", "HEALTHY", "SUCCEEDED"])

    result = agent.run()

    assert agent.calls == ["start", "monitor", "monitor", "monitor", "shutdown"]
    assert result.state == api.WorkerState.SUCCEEDED
    assert not result.is_failed()
    group = agent.get_worker_group()
    assert (group.group_rank, group.group_world_size) == (0, 1)
    assert (group.master_addr, group.master_port) == ("10.0.0.9", 4711)
    assert [str(worker) for worker in group.workers] == [
        f"local_rank={rank},global_rank={rank},role_rank={rank},world_size=2,role_world_size=2"
        for rank in range(2)
    ]
    assert agent.barriers == 1


def test_failures_spend_restarts(api: ModuleType, rendezvous: ModuleType) -> None:
    spec = make_spec(api, rendezvous)
    agent = make_agent(api, spec, ["FAILED", "UNHEALTHY", "FAILED"])

    result = agent.run()

    assert result.is_failed()
    assert agent.calls.count("monitor") == 3
    assert agent.calls.count("start") == 3
    assert spec.rdzv_handler.meetings == 3
    assert agent._remaining_restarts == 0


def test_newcomers_spend_no_restart(api: ModuleType, rendezvous: ModuleType) -> None:
    handler = make_handler(rendezvous, waiting=[0, 1])
    spec = make_spec(api, rendezvous, rdzv_handler=handler, max_restarts=1)
    agent = make_agent(api, spec, ["HEALTHY", "HEALTHY", "SUCCEEDED"])

    agent.run()

    assert handler.meetings == 2
    assert agent._remaining_restarts == 1


def test_an_agent_that_has_lost_its_workers_raises(api: ModuleType, rendezvous: ModuleType) -> None:
    agent = make_agent(api, make_spec(api, rendezvous), ["UNKNOWN"])

    with pytest.raises(Exception, match=r"^\[trainer\] Worker group in UNKNOWN state$"):
        agent.run()

    assert agent.calls[-1] == "shutdown"
    assert agent._remaining_restarts == 2


def test_a_spare_that_is_not_needed_returns_nothing(
    api: ModuleType, rendezvous: ModuleType
) -> None:
    agent = make_agent(api, make_spec(api, rendezvous), [])
    leaves = rendezvous.RendezvousGracefulExitError("others are done")

    with patch.object(agent, "_rendezvous", side_effect=leaves):
        result = agent.run()

    assert result is None
    assert agent.calls == ["shutdown"]


def test_events_of_a_start(api: ModuleType, rendezvous: ModuleType) -> None:
    agent = make_agent(api, make_spec(api, rendezvous, local_world_size=8), [])

    with patch.object(api, "record") as record:
        agent._initialize_workers(agent.get_worker_group())

    told = [(call.args[0].name.rpartition(".")[2], call.args[1]) for call in record.call_args_list]
    assert [name for name, _ in told] == ["RENDEZVOUS", "ASSIGN_WORKER_RANKS"] + ["START"] * 8
    assert {handler for _, handler in told} == {"null"}
    metadata = record.call_args_list[2].args[0].metadata
    assert json.loads(metadata["metadata"])["local_rank"] == [0]
    assert metadata["worker_id"] == "100"
    assert record.call_args_list[0].args[0].source == "AGENT"


@pytest.mark.parametrize("roles", [["a", "b", "a", "b", "a"], ["a"] * 5])
def test_nodes_count_their_ranks_through_the_store(
    api: ModuleType, rendezvous: ModuleType, roles: list[str]
) -> None:
    dist = pytest.importorskip("torch.distributed")

    store = dist.HashStore()
    sizes = [1, 2, 3, 1, 4]

    def count(node: int) -> Any:
        spec = make_spec(api, rendezvous, role=roles[node], local_world_size=sizes[node])
        agent = make_agent(api, spec, [])
        return agent._assign_worker_ranks(store, node, len(sizes), spec)

    with ThreadPoolExecutor(5) as pool:
        nodes = list(pool.map(count, range(5)))

    assert [w.global_rank for workers in nodes for w in workers] == list(range(11))
    assert {w.world_size for workers in nodes for w in workers} == {11}
    of_role_a = [w for node, workers in enumerate(nodes) if roles[node] == "a" for w in workers]
    assert [w.role_rank for w in of_role_a] == list(range(len(of_role_a)))
    assert {w.role_world_size for w in of_role_a} == {len(of_role_a)}


def test_boundaries_of_roles(api: ModuleType) -> None:
    info = api._RoleInstanceInfo
    infos = [info("a", 1, 1), info("a", 2, 1), info("b", 0, 2)]

    assert info.find_role_boundaries(infos, "a") == (0, 1)
    assert info.find_role_boundaries(infos, "b") == (2, 2)
    assert info.find_role_boundaries(infos, "c") == (-1, -1)
    assert info.compare(infos[0], infos[1]) < 0 < info.compare(infos[2], infos[0])
    assert vars_of(info.deserialize(infos[2].serialize())) == vars_of(infos[2])


def vars_of(info: Any) -> tuple[Any, ...]:
    return info.role, info.rank, info.local_world_size


def test_a_specification_needs_something_to_run(api: ModuleType, rendezvous: ModuleType) -> None:
    with pytest.raises(AssertionError):
        make_spec(api, rendezvous, entrypoint=None)
    with pytest.raises(AssertionError):
        make_spec(api, rendezvous, local_world_size=0)
    with pytest.warns(DeprecationWarning, match="WorkerSpec.fn will be deprecated"):
        spec = make_spec(api, rendezvous, entrypoint=None, fn=print)
    assert spec.entrypoint is print
    assert make_spec(api, rendezvous, entrypoint="/bin/echo").get_entrypoint_name() == "echo"


@pytest.fixture
def local(load: Load) -> ModuleType:
    pytest.importorskip("torch")
    return load("agent.server.local_elastic_agent")


def local_agent(
    local: ModuleType, api: ModuleType, rendezvous: ModuleType, load: Load, **fields: Any
) -> Any:
    logs_specs = load("multiprocessing").DefaultLogsSpecs(log_dir=os.devnull)
    return local.LocalElasticAgent(make_spec(api, rendezvous), logs_specs, **fields)


def test_a_local_agent_closes_its_workers_once(
    local: ModuleType, api: ModuleType, rendezvous: ModuleType, load: Load
) -> None:
    context = Mock()
    context.pids.return_value = {0: 17, 1: 18}
    context.wait.return_value = Mock(
        is_failed=lambda: False, return_values={0: "a", 1: "b"}, failures={}
    )
    agent = local_agent(local, api, rendezvous, load)

    with (
        patch.object(local, "start_processes", return_value=context),
        patch.object(load("utils.store"), "barrier", side_effect=RuntimeError("nobody")) as barrier,
    ):
        result = agent.run()

    assert result.return_values == {0: "a", 1: "b"}
    barrier.assert_called_once()
    context.close.assert_called_once()


def test_a_shutdown_hands_signal_and_patience_on(
    local: ModuleType, api: ModuleType, rendezvous: ModuleType, load: Load
) -> None:
    agent = local_agent(local, api, rendezvous, load)
    agent._pcontext = context = Mock()

    agent._shutdown(signal.SIGINT, 150)

    context.close.assert_called_once_with(signal.SIGINT, 150)


def test_a_worker_that_no_signal_reaches_makes_the_node_unhealthy(
    local: ModuleType, api: ModuleType, rendezvous: ModuleType, load: Load
) -> None:
    agent = local_agent(local, api, rendezvous, load, uninterruptible_state_timeout=5)
    group = agent.get_worker_group()
    states = {17: "D", 18: "S"}

    def look() -> Any:
        with patch.object(local, "read_proc_state", side_effect=states.get):
            return agent._check_uninterruptible_state_timeout(group, 5)

    assert look() is None  # there are no workers yet
    agent._pcontext = Mock()
    agent._pcontext.pids.return_value = {0: 17, 1: 18}
    with patch.object(local, "time") as clock:
        clock.monotonic.return_value = 100.0
        assert look() is None
        assert set(agent._uninterruptible_state_first_seen) == {17}
        clock.monotonic.return_value = 104.0
        states[17] = "R"
        assert look() is None
        assert agent._uninterruptible_state_first_seen == {}
        states[17] = "D"
        assert look() is None
        clock.monotonic.return_value = 109.0
        result = look()

    assert result.state == api.WorkerState.UNHEALTHY
    assert agent._remaining_restarts == 0


@pytest.mark.parametrize(
    ("argument", "variable", "seconds"),
    [(None, None, 0), (7, "3", 7), (None, "3.5", 3.5), (None, "soon", 0), (-1, None, 0)],
)
def test_how_long_a_worker_may_be_out_of_reach(
    local: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    argument: float | None,
    variable: str | None,
    seconds: float,
) -> None:
    monkeypatch.delenv("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", raising=False)
    if variable is not None:
        monkeypatch.setenv("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", variable)

    assert local._resolve_uninterruptible_state_timeout(argument) == seconds


@pytest.mark.parametrize("is_early", [True, False])
def test_whose_sign_of_life_the_health_check_asks_for(
    local: ModuleType,
    api: ModuleType,
    rendezvous: ModuleType,
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_early: bool,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", "4711")
    agent = local_agent(local, api, rendezvous, load)

    with (
        patch.object(local, "justknobs_check", return_value=is_early),
        patch.object(local, "create_healthcheck_server") as create,
    ):
        agent._setup_healthcheck()
        agent._setup_healthcheck()

    assert create.call_count == (1 if is_early else 2)
    assert create.call_args.kwargs["port"] == 4711
    callback = create.call_args.kwargs["alive_callback"]
    expected = agent._get_alive_time if is_early else local.LocalElasticAgent._get_current_time_secs
    assert callback == expected
    assert create.return_value.start.call_count == create.call_count
