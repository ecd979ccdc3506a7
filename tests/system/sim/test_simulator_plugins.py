"""What an installed package offers under a name: a small one is built, installed, and used."""

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

PATIENCE_S = 100

MODULE = '''
from pathlib import Path

import yaml

loaded = Path(__file__).parent / "loaded"
loaded.write_text("")


def lab():
    spec = yaml.safe_load((Path(__file__).parent / "lab.yaml").read_text())
    spec["system"]["sips"]["count"] = 3
    return spec


FILE = Path(__file__).parent / "lab.yaml"
MISTAKEN = {"system": {}}
NUMBER = 7


def failing():
    raise RuntimeError("the lab is closed")


class Flat:
    """Every piece of work takes a nanosecond."""

    def __init__(self, spec):
        self.spec = spec

    def gemm(self, m, n, k, dtype):
        return 1_000

    def math(self, elements, operation, dtype):
        return 1_000


class Broken(Flat):
    def gemm(self, m, n, k, dtype):
        return 0.5


class Raising(Flat):
    def gemm(self, m, n, k, dtype):
        raise KeyError(dtype)
'''

ENTRY_POINTS = """
[rankwise.topologies]
lab = rankwise_lab:lab
lab-file = rankwise_lab:FILE
mistaken = rankwise_lab:MISTAKEN
number = rankwise_lab:NUMBER
failing = rankwise_lab:failing
missing = rankwise_lab:nothing_of_the_kind

[rankwise.cost_models]
flat = rankwise_lab:Flat
broken = rankwise_lab:Broken
raising = rankwise_lab:Raising
none = rankwise_lab:print
"""


def build_wheel(folder: Path, name: str, files: dict[str, str], entry_points: str) -> Path:
    """A wheel, as a build tool would make it."""
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": entry_points,
    }
    record = ""
    for member, text in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record += f"{member},sha256={digest.decode()},{len(text.encode())}\n"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in (*content.items(), (f"{info}/RECORD", f"{record}{info}/RECORD,,\n")):
            archive.writestr(member, text)
    return path


def install(wheel: Path, target: Path) -> None:
    words = ["install", "--no-index", "--no-deps", "--quiet", "--target", str(target), str(wheel)]
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *words],
        check=True,
        timeout=PATIENCE_S,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package in it, as pip has installed it."""
    folder = tmp_path_factory.mktemp("lab")
    preset = Path(__file__).parents[3] / "src/rankwise/sim/hardware/presets/default.yaml"
    files = {"rankwise_lab/__init__.py": MODULE, "rankwise_lab/lab.yaml": preset.read_text()}
    install(build_wheel(folder, "rankwise_lab", files, ENTRY_POINTS), folder / "site")
    return folder / "site"


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def rankwise(site: Path, tmp_path: Path) -> Run:
    def run(*words: str, also: str = "") -> "subprocess.CompletedProcess[str]":
        paths = [str(site), also, os.environ.get("PYTHONPATH", "")]
        return subprocess.run(
            [sys.executable, "-m", "rankwise", "sim", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    return run


def test_a_topology_of_an_installed_package_is_used_by_its_name(rankwise: Run) -> None:
    drawn = rankwise("topology", "lab")
    of_file = rankwise("topology", "lab-file")

    assert drawn.returncode == of_file.returncode == 0, drawn.stderr + of_file.stderr
    assert "3 SIPs, ring_1d" in drawn.stdout
    assert "4 SIPs, ring_1d" in of_file.stdout


def test_fields_can_be_set_and_swept_on_top_of_a_packages_topology(rankwise: Run) -> None:
    swept = rankwise(
        "bench", "ccl_allreduce", "--topology", "lab", "--set", "elements=64",
        "--sweep", "system.sips.count=2,3", "--format", "csv",
    )  # fmt: skip

    assert swept.returncode == 0, swept.stderr
    assert [line.partition(",")[0] for line in swept.stdout.splitlines()[1:]] == ["2", "3"]


def test_a_cost_model_of_an_installed_package_decides_how_long_work_takes(rankwise: Run) -> None:
    words = ("bench", "gemm", "--set", "m=64", "--set", "n=64", "--format", "csv")

    flat = rankwise(*words, "--set", "pe.cost_model=flat")
    table = rankwise(*words)
    named = rankwise(*words, "--set", "pe.cost_model=table")

    assert flat.returncode == 0, flat.stderr
    assert table.stdout == named.stdout
    assert flat.stdout != table.stdout


def test_what_is_not_asked_for_is_not_loaded(rankwise: Run, site: Path) -> None:
    (site / "rankwise_lab" / "loaded").unlink(missing_ok=True)

    done = rankwise("topology", "default")

    assert done.returncode == 0
    assert not (site / "rankwise_lab" / "loaded").exists()


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["topology", "lap"], 2, "(did you mean lab?)"),
        (["topology", "xy"], 2, "installed packages offer failing, lab, lab-file"),
        (["topology", "missing"], 2, "'missing' of rankwise.topologies cannot be loaded"),
        (["topology", "failing"], 2, "failed: RuntimeError: the lab is closed, at "),
        (["topology", "mistaken"], 2, "mistaken: system: object missing required field"),
        (["topology", "number"], 2, "'number' of rankwise.topologies is 7, expected a mapping"),
        (["bench", "gemm", "--set", "pe.cost_model=xy"], 2, "there are table, broken, flat"),
        (["bench", "gemm", "--set", "pe.cost_model=none"], 2, "cannot be loaded: AttributeError"),
        (["bench", "gemm", "--set", "pe.cost_model=broken"], 2, "is 0.5, expected picoseconds"),
        (
            ["bench", "gemm", "--set", "tile=64", "--set", "pe.cost_model=raising"],
            2,
            "failed in gemm(64, 64, 64, 'f16'",
        ),
    ],
)
def test_a_package_that_cannot_be_used_is_named_in_one_line(
    words: list[str], status: int, message: str, rankwise: Run
) -> None:
    done = rankwise(*words)

    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.returncode == status


def test_two_packages_with_one_name_are_both_named(rankwise: Run, tmp_path: Path) -> None:
    files = {"other_lab.py": "def lab():\n    return {}\n"}
    entry_points = "[rankwise.topologies]\nlab = other_lab:lab\n"
    install(build_wheel(tmp_path, "other_lab", files, entry_points), tmp_path / "site")

    done = rankwise("topology", "lab", also=str(tmp_path / "site"))

    assert done.returncode == 2
    assert "rankwise_lab:lab of rankwise_lab" in done.stderr
    assert "other_lab:lab of other_lab" in done.stderr
