"""`auto`: the algorithm that it chooses is the best of all, on a small grid."""

from typing import Any

import pytest

from rankwise.base.errors import ConfigError
from rankwise.sim import GraphEngine, RuntimeContext
from rankwise.sim.benches.session import BenchSession, BenchSettings, topology_with
from rankwise.sim.ccl.configuration import load_configuration

ALL_REDUCES = [
    "ring_allreduce", "tree_allreduce", "recursive_doubling_allreduce",
    "halving_doubling_allreduce", "direct_allreduce", "hierarchical_allreduce", "torus_allreduce",
]  # fmt: skip
ALL_TO_ALLS = [
    "ring_all_to_all", "direct_all_to_all", "pairwise_all_to_all", "hierarchical_all_to_all",
]  # fmt: skip


def run(
    machine: str, ranks: int, size: int, algorithm: str, collective: str = "all_reduce"
) -> tuple[int, dict[str, str]]:
    """Picoseconds of a collective, and the algorithm that it took, with its level."""
    change = {} if machine == "torus16" else {"system.sips.count": str(ranks)}
    engine = GraphEngine(topology_with(machine, change), enable_data=False)

    def worker(_rank: int, torch: Any) -> None:
        tensor = torch.empty(size // 4, dtype="f32")
        if collective == "all_reduce":
            torch.distributed.all_reduce(tensor, algorithm=algorithm)
        else:
            torch.distributed.all_to_all_single(torch.empty(size // 4, dtype="f32"), tensor)

    with RuntimeContext(engine=engine, ccl={"collectives": {collective: algorithm}}) as torch:
        torch.multiprocessing.spawn(worker, args=(torch,), nprocs=ranks)
        return int(torch.now), dict(engine.machine.fidelities)


@pytest.mark.parametrize(
    ("machine", "ranks", "size"),
    [
        ("default", 4, 4 << 10), ("default", 4, 64 << 10), ("switch8", 8, 4 << 10),
        ("switch8", 8, 64 << 10), ("switch8", 6, 16 << 10), ("torus16", 16, 4 << 10),
    ],
)  # fmt: skip
def test_auto_takes_the_best_of_all_algorithms(machine: str, ranks: int, size: int) -> None:
    best = min(run(machine, ranks, size, algorithm)[0] for algorithm in ALL_REDUCES)

    time, taken = run(machine, ranks, size, "auto")

    assert time == best
    assert len(taken) == 1
    assert "auto" not in taken


@pytest.mark.parametrize(("machine", "ranks"), [("default", 4), ("switch8", 4)])
def test_auto_takes_the_best_of_all_all_to_alls(machine: str, ranks: int) -> None:
    best = min(
        run(machine, ranks, 16 << 10, algorithm, "all_to_all")[0] for algorithm in ALL_TO_ALLS
    )

    assert run(machine, ranks, 16 << 10, "auto", "all_to_all")[0] == best


@pytest.mark.parametrize("ccl", [
    {"defaults": {"algorithm": "auto"}}, {"collectives": {"all_reduce": "auto"}},
])  # fmt: skip
def test_a_configuration_leaves_the_choice_to_auto(ccl: dict[str, Any]) -> None:
    configuration = load_configuration(ccl)

    assert configuration.algorithm("all_reduce").name == "auto"
    others = configuration.algorithm("all_gather").name
    assert others == ("auto" if "defaults" in ccl else "ring_allgather")


def test_an_algorithm_of_ones_own_cannot_be_called_auto() -> None:
    with pytest.raises(ConfigError, match="auto is the choice of the fastest one"):
        load_configuration({"algorithms": {"auto": {"module": "some.module"}}})


def test_a_bench_names_the_algorithm_that_auto_has_chosen() -> None:
    fields = {"algorithm": "auto", "elements": "1024"}
    settings = BenchSettings(
        program="ccl_allreduce", topology="switch8", fields=fields, has_data=False
    )

    (result,) = BenchSession(settings).run().results

    assert result.case == "direct_allreduce, 8 ranks x 1024 f16"
    assert result.fidelity == "queue"
