"""Files that users write for the simulator."""

import os
import threading
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from rankwise.base.errors import ConfigError
from rankwise.cli.main import invoke
from rankwise.drivers.virtual.cluster.plan_file import load_plan
from rankwise.sim.benches.programs import program_from_file
from rankwise.sim.ccl.configuration import load_configuration
from rankwise.sim.files import load_yaml
from rankwise.sim.hardware.topology import load_topology

READERS = (load_topology, load_configuration, load_plan, program_from_file)


@pytest.mark.parametrize("read", READERS)
def test_a_file_without_end_is_refused(read: Callable[[str], Any]) -> None:
    with pytest.raises(ConfigError, match=r"'/dev/zero' has more than 16 MiB, or no end"):
        read("/dev/zero")


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    pipe = tmp_path / "machine"
    os.mkfifo(pipe)
    text = resources.files("rankwise.sim.hardware").joinpath("presets/torus16.yaml").read_text()
    writer = threading.Thread(target=pipe.write_text, args=(text,))
    writer.start()

    topology = load_topology(str(pipe))

    writer.join(30)
    assert topology.sip_count == 16


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e3", 1e3), ("1E-3", 1e-3), ("+1.5e+3", 1.5e3), (".5e1", 5.0), ("1.e2", 100.0),
        ("-2e3", -2e3), ("12", 12), ("1.5", 1.5), ("e3", "e3"), ("1e", "1e"), ("1e3x", "1e3x"),
        ("sip1e3", "sip1e3"), ("'1e3'", "1e3"), ("2026-11-22e1", "2026-11-22e1"),
    ],
)  # fmt: skip
def test_numbers_with_an_exponent_are_numbers(text: str, value: object) -> None:
    found = load_yaml(text)

    assert found == value
    assert type(found) is type(value)


def test_a_field_may_be_set_with_an_exponent(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    machine = tmp_path / "machine.yaml"
    preset = resources.files("rankwise.sim.hardware").joinpath("presets/default.yaml").read_text()
    machine.write_text(preset.replace("latency_ns: 500", "latency_ns: 5e2"))
    assert "5e2" in machine.read_text()

    for topology in ("default", str(machine)):
        for setting in ("system.host.command_ns=1e3", "pe.dma.setup_ns=2.5E+1"):
            command = ["sim", "bench", "ccl_allreduce", "--timing-only", "--topology", topology]
            assert invoke([*command, "--set", setting]) == 0, capsys.readouterr().err


def test_a_cluster_that_can_never_meet_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["sim", "cluster", "--nodes", "2", "--nnodes", "5"]) == 2

    assert capsys.readouterr().err == (
        "rankwise sim cluster: error: the options: there are 2 nodes, and none runs before 5 "
        "are there (give more --nodes, or a smaller --nnodes)\n"
    )
