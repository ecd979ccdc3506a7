"""How users write against the public interface; mypy reads it, nobody runs it.

`assert_type` fails the check when an interface becomes vaguer or stricter than it was.
"""

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import rankwise
from rankwise import collectives, workers
from rankwise.compat.torch.launcher import LaunchConfig


def square(offset: int) -> int:
    return rankwise.rank() ** 2 + offset


def greet(index: int, greeting: str) -> None:
    print(index, greeting)


def run_functions() -> None:
    rankwise.run(square, args=(1,), nprocs=4)
    rankwise.run(lambda: rankwise.world_size() + 1)
    rankwise.run(square, [1], 2, start_method="spawn", max_restarts=3, grace=5.0, tee="0:3")
    with rankwise.ForkServer(preload=["numpy"]) as server:
        rankwise.run(square, args=(1,), server=server)


def configure_as_torchrun_does() -> None:
    config = LaunchConfig(1, 2, nproc_per_node=8, rdzv_configs={"timeout": 60})
    assert_type(config.max_nodes, int)
    assert_type(config.rdzv_configs, dict[str, Any])
    assert_type(config.duplicate_stdout_filters, list[str] | None)


def spawn_like_torch() -> None:
    rankwise.spawn(greet, ("hello",), 2)
    context = rankwise.spawn(greet, ("hello",), nprocs=2, join=False)
    assert_type(context, rankwise.SpawnContext)
    assert_type(context.join(timeout=1.0), bool)
    assert_type(context.pids(), list[int])


def know_the_place() -> None:
    assert_type(rankwise.rank(), int)
    assert_type(rankwise.local_rank(), int)
    assert_type(rankwise.world_size(), int)
    assert_type(rankwise.restart_count(), int)
    assert_type(rankwise.run_id(), str)


def handle_failures() -> None:
    try:
        rankwise.run(square, args=(1,))
    except rankwise.WorkersFailed as failed:
        root: rankwise.Failure = failed.failures[0]
        assert_type(failed.failures, tuple[rankwise.Failure, ...])
        assert_type(failed.exceptions, dict[int, BaseException])
        assert_type(root.exit, rankwise.ExitStatus | None)
        assert_type(root.cause, rankwise.FailureCause)
    except rankwise.ConfigError as error:
        assert_type(error.hint, str | None)


def combine_arrays() -> None:
    array: NDArray[np.float64] = np.zeros(3)
    assert_type(collectives.all_reduce(array), NDArray[Any])
    collectives.all_reduce(array, op="max", out=array)
    collectives.broadcast(array, root=1)
    collectives.all_gather([1.0, 2.0])
    assert_type(collectives.all_to_all(np.zeros((collectives.size(), 3))), NDArray[Any])
    collectives.reduce_scatter(np.zeros((collectives.size(), 3)))
    collectives.barrier(timeout=5.0)


def use_one_chip() -> None:
    args = workers.TaskArgs()
    args.add_tensor(np.zeros(4, np.float32), workers.TensorArgType.INOUT)
    args.add_scalar(4)
    callable_ = workers.ChipCallable.build(
        [workers.ArgDirection.INOUT, workers.Parameter.of(workers.ArgDirection.SCALAR, "n")],
        "scale",
        np.multiply,
    )
    chip = workers.ChipWorker()
    chip.init(platform="sim")
    chip.set_device(0)
    assert_type(chip.run(callable_, args, workers.ChipCallConfig(block_dim=4)), int)
    assert_type(chip.run(callable_, args, enable_profiling=True), int)
    assert_type(chip.malloc(64), int)
    assert_type(chip.last_report, workers.TaskReport | None)
    assert_type(chip.leaks, tuple[workers.Leak, ...])
    assert_type(args.tensor(0), workers.ContinuousTensor)
    assert_type(workers.get_element_size(workers.DataType.BFLOAT16), int)


def check_calls_of_functions() -> None:
    assert_type(rankwise.run(square, args=(1,)), list[int])
    assert_type(rankwise.run(square, [1], 2), list[int])
    assert_type(rankwise.run(rankwise.rank), list[int])
    assert_type(rankwise.run(scale, args=(2,)), list[float])
    assert_type(rankwise.run(scale, args=(2, 0.5), nprocs=2), list[float])
    assert_type(rankwise.run(scale, kwargs={"number": 2, "factor": 3.0}), list[float])
    assert_type(rankwise.run(scale, args=(2,), kwargs={"factor": 3.0}), list[float])
    assert_type(rankwise.spawn(greet, ("hello",), 2), None)


def scale(number: int, factor: float = 1.0) -> float:
    return number * factor


def refuse_what_cannot_be_called() -> None:
    # mypy complains here of an ignore that hides nothing, so each of these is an error.
    rankwise.run(square)  # type: ignore[arg-type]
    rankwise.run(square, args=("one",))  # type: ignore[arg-type]
    rankwise.run(square, args=(1, 2))  # type: ignore[arg-type]
    rankwise.run(square, args=(1,), start_method="thread")  # type: ignore[call-overload]
    rankwise.run(square, args=(1,), gracious=3)  # type: ignore[call-overload]
    rankwise.spawn(greet, (3,))  # type: ignore[arg-type]
    rankwise.spawn(greet, ("hello",), start_method="thread")  # type: ignore[call-overload]
    collectives.all_reduce([1.0], op="summ")  # type: ignore[arg-type]
    collectives.reduce_scatter([1.0], op="average")  # type: ignore[arg-type]
