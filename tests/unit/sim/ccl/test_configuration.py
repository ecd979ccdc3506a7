"""`ccl.yaml`: what it may say, and what it is told when it is wrong, before anything runs."""

from pathlib import Path

import pytest

from rankwise.base.errors import ConfigError
from rankwise.sim import GraphEngine, RuntimeContext
from rankwise.sim.ccl.configuration import QueueLayout, check_against, load_configuration

CONTRACT = """
defaults:
  algorithm: ring_allreduce_tcm
  buffer_kind: tcm            # tcm | hbm
  backpressure: sleep         # sleep | spin
  n_slots: 4
  slot_size: 4096             # bytes
  vc_chunk_size: 256          # bytes
  ipcq_credit_size_bytes: 16
algorithms:
  ring_allreduce_tcm:
    module: rankwise.sim.ccl.algorithms.ring_allreduce
    topology: ring_1d
    buffer_kind: tcm
    n_elem: 8                 # elements per PE
"""


def test_the_file_of_the_working_directory_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ccl.yaml").write_text(CONTRACT)
    monkeypatch.chdir(tmp_path)

    algorithm = load_configuration().algorithm("all_reduce")

    assert algorithm.name == "ring_allreduce_tcm"
    assert algorithm.queues == QueueLayout(n_slots=4, vc_chunk_size=256, n_elem=8)


def test_without_a_file_everything_has_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    configuration = load_configuration()

    assert configuration.algorithm("all_to_all").name == "direct_all_to_all"
    assert configuration.algorithm("all_reduce", "tree_allreduce").queues == QueueLayout()


def test_an_algorithm_of_the_users_own_is_taken_from_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_star.py").write_text(
        "COLLECTIVE = 'broadcast'\n"
        "from rankwise.sim.ccl.program import Receive, Send, Span\n"
        "def program(task):\n"
        "    everything = Span(0, task.elements)\n"
        "    if task.rank == task.root:\n"
        "        for peer in range(task.size):\n"
        "            if peer != task.rank:\n"
        "                yield Send(peer, everything)\n"
        "    else:\n"
        "        yield Receive(task.root, everything)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    configuration = load_configuration(
        {"algorithms": {"star": {"module": "my_star"}}, "collectives": {"broadcast": "star"}}
    )

    assert configuration.algorithm("broadcast").module == "my_star"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "defaults: {slot_sise: 1}",
            r"defaults.slot_sise: there is no such field; did you mean slot_size\?",
        ),
        ("defaults: {algorithm: ringg}", r"defaults.algorithm: no algorithm is called 'ringg'"),
        ("defaults: {slot_size: 1000}", r"slot_size 1000 is not a multiple of vc_chunk_size 256"),
        ("defaults: {slot_size: 12, vc_chunk_size: 4}", r"is not a multiple of 8 bytes"),
        (
            "defaults: {slot_size: -4096}",
            r"defaults.slot_size: expected a whole number >= 1, found -4096",
        ),
        ("defaults: {n_slots: 0}", r"defaults.n_slots: expected a whole number >= 1, found 0"),
        (
            "defaults: {buffer_kind: sram}",
            r"defaults.buffer_kind: there is no 'sram'; expected one of tcm, hbm",
        ),
        ("algorithms: {x: {module: no.such.module}}", r"algorithms.x.module: .*cannot be imported"),
        ("algorithms: {x: {module: json}}", r"no function program"),
        ("algorithms: {x: {}}", r"algorithms.x: object missing required field `module`"),
        ("collectives: {gather_all: ring_allgather}", r"there is no collective 'gather_all'"),
        ("collectives: {all_gather: tree_reduce}", r"algorithm tree_reduce is for reduce"),
        ("collectives: {all_gather: nought}", r"collectives.all_gather: no algorithm is called"),
        ("collectives: {on: x}", r"collectives: a name in it is not text: put quotes around it"),
        ("1: {}", r"a name in it is not text: put quotes around it"),
        ("default: {}", r"default: there is no such field; did you mean defaults\?"),
        ("{", r"is not YAML"),
        ("algorithms: {x: 5}", r"algorithms.x: expected fields with values, found 5"),
        ("algorithms: {x: {module: .x}}", r"relative import for '\.x'$"),
        ("[" * 5_000, r"is not YAML: it is nested too deeply"),
    ],
)
def test_mistakes_are_named_with_file_and_field(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=message) as caught:
        load_configuration(path)

    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no collective configuration 'nowhere\.yaml'"):
        load_configuration("nowhere.yaml")


def test_an_algorithm_for_another_collective_is_refused() -> None:
    with pytest.raises(ConfigError, match="tree_broadcast is for broadcast, not for all_reduce"):
        load_configuration().algorithm("all_reduce", "tree_broadcast")


def test_queues_that_do_not_fit_into_scratch_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match="buffer is too small: 2 queues of 4 slots of 4096 bytes"):
        check_against(QueueLayout(), 16_384, 2, "ring")

    check_against(QueueLayout(buffer_kind="hbm"), 16_384, 2, "ring")


def test_sizes_of_which_not_one_queue_fits_are_refused_before_anything_runs() -> None:
    engine = GraphEngine("default")

    with pytest.raises(
        ConfigError, match=r"configuration: .* the buffer is too small: 1 queues of 512 slots"
    ):
        RuntimeContext(engine, ccl={"defaults": {"n_slots": 512}})

    RuntimeContext(engine, ccl={"defaults": {"n_slots": 512, "buffer_kind": "hbm"}})
    assert len(engine.op_log) == 0
