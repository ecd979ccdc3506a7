"""What the allocator of torch does with the requests of a program that computes nothing."""

import json
import pickle
from pathlib import Path

import pytest
from preloaded import Preloaded
from running import Finished, write_program

pytestmark = [pytest.mark.torch, pytest.mark.system]

GIB = 1 << 30
USED_BY_ANOTHER_STREAM = """
import torch

x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    square = torch.empty(20000, 20000, device="cuda")
    square @ square
if RECORDS:
    x.record_stream(stream)
del x
y = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
"""
IN_PIECES = """
import torch

large = torch.empty(70 << 30, dtype=torch.uint8, device="cuda")
del large
small = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")  # at the begin of that segment
larger = torch.empty(76 << 30, dtype=torch.uint8, device="cuda")
"""
PRODUCT_OF_BATCH = """
import torch

rows = torch.empty(4, 4096, 8192, device="cuda")
weight = torch.empty(8192, 8192, device="cuda")
made = rows @ weight  # a product of 16,384 rows, seen as a batch of four
print(made.shape)
"""
RECORDED = """
import torch

torch.cuda.memory._record_memory_history()
kept = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
passing = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
del passing
torch.cuda.memory._dump_snapshot("memory.pickle")
"""


def predicted(
    preloaded: Preloaded, directory: Path, source: str, settings: str = ""
) -> tuple[Finished, int]:
    """How a program ended, and how many bytes it reserves at most."""
    file = directory / "p.json"
    finished = preloaded.run(
        "run", "--on=sim:h100-sxm", "--timing-only", f"--prediction={file}", "--no-prefix",
        write_program(directory, source), cwd=directory,
        environment={"PYTORCH_ALLOC_CONF": settings},
    )  # fmt: skip
    document = json.loads(file.read_text()) if file.exists() else {}
    return finished, document.get("peak_reserved_bytes", 0)


@pytest.mark.parametrize(("records", "gibibytes"), [(False, 1), (True, 2)])
def test_memory_is_used_again_when_the_streams_that_use_it_have_passed(
    records: bool, gibibytes: int, preloaded: Preloaded, tmp_path: Path
) -> None:
    program = USED_BY_ANOTHER_STREAM.replace("RECORDS", str(records))
    square = 4 * 20000**2

    finished, reserved = predicted(preloaded, tmp_path, program)

    assert finished.code == 0, finished.stderr
    # The matrix and its product lie in segments of the other stream.
    assert gibibytes * GIB + 2 * square <= reserved < gibibytes * GIB + 2 * square + (4 << 20)


def test_device_whose_free_memory_is_in_pieces_is_full_unless_segments_expand(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    finished, _ = predicted(preloaded, tmp_path, IN_PIECES)
    expanded, reserved = predicted(preloaded, tmp_path, IN_PIECES, "expandable_segments:True")

    assert finished.code == 77, finished.stderr
    assert (
        "out of memory on rank 0: 76.0 of 78.5 GiB, in the program (program.py:" in finished.stderr
    )
    assert "  70.0 GiB are free in pieces that are too small; PYTORCH_ALLOC_CONF" in finished.stderr
    assert expanded.code == 0, expanded.stderr
    assert 76 * GIB < reserved < 76.1 * GIB


def test_product_of_a_batch_takes_its_memory_once(preloaded: Preloaded, tmp_path: Path) -> None:
    finished, reserved = predicted(preloaded, tmp_path, PRODUCT_OF_BATCH)

    assert finished.lines == ["torch.Size([4, 4096, 8192])"]
    assert reserved == 2 * (GIB // 2) + GIB // 4


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("expandable_segments:yes", "has expandable_segments:yes, expected True or False"),
        ("max_split_size_mb:big", "has max_split_size_mb:big, expected a number"),
        (
            "roundup_power2_divisions:[256:1]",
            "has roundup_power2_divisions:[256:1], and only one number for",
        ),
    ],
)
def test_settings_that_cannot_be_used_are_told(
    settings: str, told: str, preloaded: Preloaded, tmp_path: Path
) -> None:
    finished, _ = predicted(preloaded, tmp_path, RECORDED, settings)

    assert finished.code == 2
    (cause,) = [line for line in finished.stderr.splitlines() if line.startswith("root cause: ")]
    assert f"PYTORCH_ALLOC_CONF {told}" in cause


def test_snapshot_of_a_prediction_has_the_line_of_each_request(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    finished, _ = predicted(preloaded, tmp_path, RECORDED)
    snapshot = pickle.loads((tmp_path / "memory.pickle").read_bytes())
    (trace,) = snapshot["device_traces"]

    assert finished.code == 0, finished.stderr
    assert [entry["action"] for entry in trace] == [
        "segment_alloc", "alloc", "segment_alloc", "alloc", "free_requested", "free_completed",
    ]  # fmt: skip
    (frame,) = trace[1]["frames"]
    assert (Path(frame["filename"]).name, frame["line"]) == ("program.py", 5)
    assert sum(segment["total_size"] for segment in snapshot["segments"]) == 2 << 26
