"""Reading torch's error files, and surviving whatever else stands in their place."""

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankwise.base.units import SECOND
from rankwise.launch.inside.error_file import read_error_file


def write(path: Path, document: object) -> str:
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(path)


def test_the_form_that_torchs_record_writes_is_read(tmp_path: Path) -> None:
    now = time.time_ns()
    extra = {"py_callstack": "Traceback …\n", "timestamp": str(now // SECOND)}
    path = write(
        tmp_path / "error.json", {"message": {"message": "ValueError: a: b\nc", "extraInfo": extra}}
    )

    record = read_error_file(path)

    assert record is not None
    assert (record.type, record.message) == ("ValueError", "a: b\nc")
    assert record.traceback == "Traceback …\n"
    assert abs(record.wall_ns - now) < 60 * SECOND
    assert abs(record.raised_at - time.monotonic_ns()) < 60 * SECOND


def test_the_short_form_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "error.json", {"message": "it broke", "timestamp": 1_500_000_000})

    record = read_error_file(path)

    assert record is not None
    assert (record.type, record.message, record.traceback) == ("Exception", "it broke", "")
    assert record.wall_ns == 1_500_000_000 * SECOND


def test_the_time_of_the_file_refines_the_second_that_it_tells(tmp_path: Path) -> None:
    path = write(tmp_path / "error.json", {"message": "x", "timestamp": "1500000000"})
    os.utime(path, ns=(0, 1_500_000_000_250_000_000))

    record = read_error_file(path)

    assert record is not None
    assert record.wall_ns == 1_500_000_000_250_000_000


@pytest.mark.parametrize("timestamp", [None, "soon", "9" * 5000, "٣", 1.5, [], "-5"])
def test_a_timestamp_that_is_none_gives_way_to_the_time_of_the_file(
    tmp_path: Path, timestamp: object
) -> None:
    path = write(tmp_path / "error.json", {"message": "x", "timestamp": timestamp})
    os.utime(path, ns=(0, 77))

    record = read_error_file(path)

    assert record is not None
    assert record.wall_ns == 77


def test_an_exception_without_words_has_a_type_and_no_message(tmp_path: Path) -> None:
    record = read_error_file(write(tmp_path / "error.json", {"message": {"message": "my.Error: "}}))

    assert record is not None
    assert (record.type, record.message) == ("my.Error", "")


def test_half_surrogates_are_told_as_escapes(tmp_path: Path) -> None:
    record = read_error_file(write(tmp_path / "error.json", {"message": "OSError: caf\udce9"}))

    assert record is not None
    assert record.message == r"caf\udce9"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'{"message": 3}', b'{"message": {}}', b"\xff\xfe", b"[" * 9999],
)
def test_what_is_no_error_file_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(content)

    assert read_error_file(str(path)) is None


def test_what_is_no_file_is_none_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    assert read_error_file(str(tmp_path / "fifo")) is None
    assert read_error_file(str(tmp_path)) is None
    assert read_error_file(str(tmp_path / "missing")) is None


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.dictionaries(
            st.sampled_from(["message", "extraInfo", "timestamp", "py_callstack"]), inner
        ),
    )
)
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_document_makes_it_fail(tmp_path: Path, document: object) -> None:
    read_error_file(write(tmp_path / "error.json", document))
