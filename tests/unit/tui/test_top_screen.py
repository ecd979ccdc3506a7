"""The screen of `rankwise top`, by textual's own pilot, on looks of 4 and of 4,096 ranks."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from samples_of_runs import NIGHTLY, four_ranks, look_of, many_ranks, rank_status

from rankwise.launch.control.client import RunSummary
from rankwise.tui.samples import RunSample

pytest.importorskip("textual")

from textual.widgets import DataTable

from rankwise.tui.app import NO_LAST_WORDS, Help, Top, end_in_words

if TYPE_CHECKING:
    from textual.pilot import Pilot

PATIENCE_S = 60.0
SIZE = (80, 24)
Look = Callable[[Sequence[RunSummary]], list[RunSample]]


class Shown:
    """A screen, and what a test may do to it."""

    def __init__(self, app: Top, pilot: "Pilot[None]") -> None:
        self.app = app
        self.pilot = pilot

    @property
    def lines(self) -> list[str]:
        """What stands on the screen."""
        strips = self.app.screen._compositor.render_strips()
        return ["".join(segment.text for segment in strip).rstrip() for strip in strips]

    async def wait_for(self, text: str) -> list[str]:
        async with asyncio.timeout(PATIENCE_S):
            while not any(text in line for line in self.lines):
                await self.pilot.pause()
        return self.lines

    async def wait_without(self, text: str) -> list[str]:
        async with asyncio.timeout(PATIENCE_S):
            while any(text in line for line in self.lines):
                await self.pilot.pause()
        return self.lines


def on_screen(
    sample: Look,
    test: Callable[[Shown], Awaitable[None]],
    *,
    runs: Sequence[RunSummary] = (NIGHTLY,),
    wait_for_end: Callable[[RunSummary], str | None] | None = None,
) -> None:
    never = threading.Event()

    def wait(_run: RunSummary) -> str | None:
        never.wait(PATIENCE_S)
        return None

    async def go() -> None:
        app = Top(lambda: list(runs), 0.01, sample=sample, wait_for_end=wait_for_end or wait)
        async with app.run_test(size=SIZE) as pilot:
            await test(Shown(app, pilot))
        never.set()

    asyncio.run(go())


def test_four_ranks_fit_on_a_terminal_with_the_odd_one_first() -> None:
    async def test(shown: Shown) -> None:
        await shown.wait_for("awaited 41 s")
        lines = await shown.wait_for("q Quit")  # the foot may come after the rows

        assert lines[0] == "nightly  pid 4711  running  4 ranks  restarts 0  age 2m05s  train.py"
        assert lines[1] == "ranks 0, 2-3 wait for rank 1, for 41 s (see rankwise why)"
        assert lines[2].split() == [
            "RANKS", "STATE", "STEPS/S", "COLLECTIVE", "LATE", "CPU", "MEMORY"
        ]  # fmt: skip
        assert [line.split()[0] for line in lines[3:7]] == ["1", "0", "2", "3"]
        assert lines[3].endswith("1.5 GiB")
        assert "q Quit" in lines[-1]
        assert "? Help" in lines[-1]

    on_screen(lambda _: [look_of(four_ranks())], test)


def test_four_thousand_ranks_are_folded_and_a_state_is_unfolded_by_enter() -> None:
    async def test(shown: Shown) -> None:
        lines = await shown.wait_for("+ 4084 ranks")
        assert [line.split()[0] for line in lines[2:6]] == ["77", "1031", "+", "+"]

        await shown.pilot.press("down", "down", "down", "enter")
        lines = await shown.wait_for("- 4000-4009")
        assert [line.split()[0] for line in lines[6:16]] == [str(n) for n in range(4000, 4010)]

        await shown.pilot.press("enter")
        await shown.wait_for("+ 4000-4009")

        await shown.pilot.press("f")
        lines = await shown.wait_without("+ 4084 ranks")
        assert [line.split()[:2] for line in lines[2:5]] == [
            ["77", "failed"], ["1031", "awaited"], ["0", "running"]
        ]  # fmt: skip
        assert any("… 3796 more" in line for line in lines)

    on_screen(lambda _: [look_of(many_ranks())], test)


def test_ranks_are_sorted_by_a_key_and_the_cursor_stays_with_its_rank() -> None:
    ranks = [rank_status(0, steps=30), rank_status(1, steps=10), rank_status(2, steps=20)]

    async def test(shown: Shown) -> None:
        await shown.wait_for("1.5 GiB")
        await shown.pilot.press("down", "down", "s")
        await shown.pilot.pause()

        table = shown.app.query_one(DataTable)
        assert [line.split()[0] for line in shown.lines[2:5]] == ["1", "2", "0"]
        assert table.cursor_row == 1

    on_screen(lambda _: [look_of(ranks)], test)


def test_the_last_picture_stays_when_the_run_ends_and_the_agent_is_not_asked_again() -> None:
    told, looked = threading.Event(), threading.Event()
    asked: list[Sequence[RunSummary]] = []

    def sample(runs: Sequence[RunSummary]) -> list[RunSample]:
        asked.append(runs)
        looked.set()
        return [look_of(four_ranks())] if runs else []

    def wait_for_end(_run: RunSummary) -> str:
        assert told.wait(PATIENCE_S)
        return "failed: rank 1 failed (ValueError: bad shape)"

    async def test(shown: Shown) -> None:
        await shown.wait_for("awaited 41 s")
        told.set()
        lines = await shown.wait_for("failed: rank 1 failed (ValueError: bad shape)")
        assert any("ended" in line for line in lines)

        for _ in range(2):  # one look may have been on its way
            looked.clear()
            await asyncio.to_thread(looked.wait, PATIENCE_S)
        assert asked[-1] == []
        assert any("ended" in line for line in shown.lines)

    on_screen(sample, test, wait_for_end=wait_for_end)


def test_an_agent_that_only_broke_off_is_asked_again_and_one_that_is_gone_is_told() -> None:
    runs = [NIGHTLY]
    asked: list[RunSummary] = []

    def break_off(run: RunSummary) -> None:
        asked.append(run)

    async def test(shown: Shown) -> None:
        await shown.wait_for("awaited 41 s")
        async with asyncio.timeout(PATIENCE_S):
            while len(asked) < 3:
                await shown.pilot.pause()
        assert not any(NO_LAST_WORDS[:20] in line for line in shown.lines)

        runs.clear()
        lines = await shown.wait_for(NO_LAST_WORDS[:20])
        assert any("ended" in line for line in lines)

    on_screen(
        lambda chosen: [look_of(four_ranks()) for _ in chosen],
        test,
        runs=runs,
        wait_for_end=break_off,
    )


def test_a_run_that_begins_while_the_help_is_open_appears_behind_it() -> None:
    runs: list[RunSummary] = []

    async def test(shown: Shown) -> None:
        await shown.wait_for("no runs yet")
        await shown.pilot.press("question_mark")
        await shown.wait_for("unfold or fold the ranks of a state")
        runs.append(NIGHTLY)
        async with asyncio.timeout(PATIENCE_S):
            while not shown.app._panels:
                await shown.pilot.pause()
        await shown.pilot.press("x")
        await shown.wait_for("awaited 41 s")
        await shown.pilot.press("ctrl+c")
        assert not shown.app.is_running or shown.app._exit

    on_screen(lambda chosen: [look_of(four_ranks()) for _ in chosen], test, runs=runs)


def test_runs_that_begin_later_appear() -> None:
    runs: list[RunSummary] = []

    async def test(shown: Shown) -> None:
        await shown.wait_for("no runs yet")
        runs.append(NIGHTLY)
        await shown.wait_for("nightly")
        runs.append(RunSummary("daily", 12, 1000))
        lines = await shown.wait_for("daily")
        assert not any("no runs yet" in line for line in lines)

    on_screen(lambda chosen: [look_of(four_ranks(), run=run) for run in chosen], test, runs=runs)


def test_help_opens_and_any_key_closes_it() -> None:
    async def test(shown: Shown) -> None:
        await shown.wait_for("1.5 GiB")
        await shown.pilot.press("question_mark")
        await shown.wait_for("unfold or fold the ranks of a state")
        assert isinstance(shown.app.screen, Help)
        await shown.pilot.press("x")
        await shown.wait_without("unfold or fold the ranks of a state")

        await shown.pilot.press("q")
        assert not shown.app.is_running or shown.app._exit

    on_screen(lambda _: [look_of(four_ranks())], test)


def test_an_end_is_told_with_its_attempts_and_its_cause() -> None:
    assert end_in_words({"state": "succeeded", "starts": 1, "why": ""}) == "succeeded"
    of_earlier_release = {"state": "succeeded", "attempts": 2, "why": ""}
    assert end_in_words(of_earlier_release) == "succeeded after 2 attempts"
    assert (
        end_in_words({"state": "failed", "starts": 3, "why": "rank 0 failed\x1b"})
        == "failed after 3 attempts: rank 0 failed\\x1b"
    )


def test_the_picture_can_be_drawn(tmp_path: Path) -> None:
    async def test(shown: Shown) -> None:
        await shown.wait_for("+ 4084 ranks")
        shown.app.save_screenshot("top.svg", path=str(tmp_path))

    on_screen(lambda _: [look_of(many_ranks())], test)

    assert "<svg" in (tmp_path / "top.svg").read_text()
