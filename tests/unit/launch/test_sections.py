"""Sections that learn how long they take, and end when they are stuck."""

import subprocess
import sys
import textwrap
import threading

import pytest

from rankwise.base.errors import ConfigError
from rankwise.drivers.real.segments import SEGMENT_VARIABLE, Segment
from rankwise.launch.inside import sections
from rankwise.launch.inside.sections import forget_segment, section


def run_program(text: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_section_that_is_left_in_time_changes_nothing() -> None:
    with section("quick", timeout=60), section("inner"):
        pass


def test_timeout_of_a_section_may_be_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[float] = []
    monkeypatch.setattr(sections, "_arm", began.append)

    with section("slow", timeout="5m"):
        (_, stuck_at), *_ = sections._open

    assert stuck_at - began[0] == pytest.approx(300)


@pytest.mark.parametrize("timeout", ["", "soon", "0s", "-3s", 0, -1, float("nan"), True, [5]])
def test_timeout_that_is_no_time_is_refused_with_what_is_expected(timeout: object) -> None:
    with (
        pytest.raises(ConfigError, match=r"expected more than 0 s: a number of seconds, or a text"),
        section("x", timeout=timeout),  # type: ignore[arg-type]
    ):
        pass


@pytest.mark.parametrize("name", [3, None, b"step"])
def test_name_of_a_section_that_is_no_text_is_refused(name: object) -> None:
    with (
        pytest.raises(ConfigError, match=r"expected a text such as 'step'"),
        section(name),  # type: ignore[arg-type]
    ):
        pass


def test_outermost_sections_are_counted_with_the_time_that_they_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Segment.create(2) as segment:
        monkeypatch.setenv(SEGMENT_VARIABLE, str(segment.fd))
        monkeypatch.setenv("RANKWISE_LOCAL_RANK", "1")
        forget_segment()
        for _ in range(3):
            with section("step", timeout=60), section("inner", timeout=60):
                pass
        pace, others = segment.pace(1), segment.pace(0)
        forget_segment()

    assert pace.steps == 3
    assert pace.time > 0
    assert others.steps == 0


def test_a_rank_stays_stuck_in_a_section_when_it_leaves_an_inner_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sections, "_arm", lambda _now: None)
    with Segment.create(1) as segment:
        monkeypatch.setenv(SEGMENT_VARIABLE, str(segment.fd))
        monkeypatch.setenv("RANKWISE_LOCAL_RANK", "0")
        forget_segment()
        with section("epoch", timeout=1e-9):
            with section("step", timeout=60):
                pass
            within = segment.stuck_section(0)
        after = segment.stuck_section(0)
        forget_segment()

    assert (within, after) == (0, None)


def test_the_thread_that_watches_ends_when_there_is_nothing_to_watch() -> None:
    with section("quick", timeout=60):
        (watching,) = [t for t in threading.enumerate() if t.name == "rankwise-section"]
    watching.join(60)

    assert not watching.is_alive()
    with section("quick", timeout=60):
        assert "rankwise-section" in [thread.name for thread in threading.enumerate()]


def test_a_limit_must_be_positive() -> None:
    with (
        pytest.raises(ConfigError, match="section 'x' is 0, expected more than 0 s"),
        section("x", timeout=0),
    ):
        pass


def test_a_section_that_is_stuck_ends_the_process_with_its_stacks() -> None:
    done = run_program("""
        import threading, rankwise

        def wait_for_ever():
            threading.Event().wait()

        with rankwise.section("step", timeout=0.2):
            wait_for_ever()
    """)

    assert done.returncode == 1
    assert done.stderr.startswith("rankwise: section 'step' is stuck; here are its stacks\n")
    assert "Timeout" in done.stderr
    assert "wait_for_ever" in done.stderr


def test_a_limit_is_learned_from_earlier_runs() -> None:
    done = run_program("""
        import threading
        from rankwise.launch.inside import sections

        sections.LEAST_S = 0.2
        for _ in range(4):
            with sections.section("step"):
                pass
        print("learned", flush=True)
        with sections.section("step"):
            threading.Event().wait()
    """)

    assert done.returncode == 1
    assert "section 'step' is stuck, its longest run took" in done.stderr
    assert done.stdout == "learned\n"
    assert "Timeout" in done.stderr


def test_an_outer_limit_holds_while_inner_sections_come_and_go() -> None:
    done = run_program("""
        import threading, rankwise

        with rankwise.section("epoch", timeout=0.3):
            while True:
                with rankwise.section("step", timeout=30):
                    threading.Event().wait(0.01)
    """)

    assert done.returncode == 1
    assert "section 'epoch' is stuck" in done.stderr
    assert "Timeout" in done.stderr


def test_limit_beyond_what_clocks_count_harms_no_later_section() -> None:
    done = run_program("""
        import rankwise

        with rankwise.section("epoch", timeout=1e10):
            pass
        with rankwise.section("step", timeout=30):
            print("went on")
    """)

    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
