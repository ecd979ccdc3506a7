"""The screen of `rankwise top`: a panel for each run, drawn anew after every look.

The app's own thread draws; a thread that comes and goes looks, and the next look is due when this
one has been shown, later where looks are slow: nine tenths of the time nothing is asked. One more
thread for each run waits for its agent's last words. A panel keeps what it shows when they have
come.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.coordinate import Coordinate
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static

from rankwise.base.errors import RankwiseError
from rankwise.base.units import Instant
from rankwise.launch.control.client import RunSummary, RunUnreachable, listen
from rankwise.launch.control.server import ControlRequest
from rankwise.launch.telling.failure_report.text import printable
from rankwise.tui.picture import Row, RunPicture, SortOrder, State, Watcher, arranged
from rankwise.tui.samples import PATIENCE, RunSample, look_at
from rankwise.tui.text import cells, columns_for, head, heading

REST = 9
"""So many times as long as a look takes nothing is asked."""
NO_LAST_WORDS = "its agent has ended, without a report of how the run ended"
ROWS_MAX = 300
"""To draw a line for the first time takes a millisecond."""
MARGIN = 3
"""For the scroll bars of a run and of all of them, and the gap behind the last column."""
_STYLES: Mapping[State, str] = {
    State.FAILED: "bold red",
    State.HUNG: "bold red",
    State.AWAITED: "bold yellow",
    State.LATE: "yellow",
    State.STILL: "yellow",
    State.WAITING: "cyan",
    State.SUSPENDED: "yellow",
    State.RUNNING: "green",
}
HELP = """\
Each line is a rank, or all ranks in a state (+ folded, - unfolded).

failed    failed by itself, or is the root cause of other failures
hung      no progress for --hang-timeout
awaited   other ranks wait for it in a collective
late      cost the other ranks a notable part of the run
still     no progress for 10 s, outside of a collective
waiting   in the same collective for a second

STEPS/S   steps (rankwise.should_stop) or outermost sections, in 10 s
LATE      share of the time since the first call in which others waited for it
A folded line has the slowest rate, the average CPU, and other maxima.

o r s l c m   order by: problems, rank, steps, lateness, CPU, memory
enter         unfold or fold the ranks of a state
f             fold all ranks by state, or none
tab           go to the next run
q             quit: the runs continue

Any key closes this."""

Listen = Callable[[RunSummary], str | None]


def show(choose: Callable[[], list[RunSummary]], interval_s: float) -> None:
    """Show the runs that `choose` finds until the user quits; it raises where there are none."""
    choose()  # a name that is none is told before the screen is taken
    Top(choose, interval_s).run()


def wait_for_end(run: RunSummary) -> str | None:
    """How a run has ended, once it has; None if its agent leaves without a word."""
    try:
        for told in listen(run, ControlRequest("end"), Instant(time.monotonic_ns() + PATIENCE)):
            if told["state"] != "going on":
                return end_in_words(told)
    except RunUnreachable:
        pass  # the next look tells what there is to see
    return None


def end_in_words(told: Mapping[str, Any]) -> str:
    """`failed after 3 attempts: rank 2 failed (ValueError: bad shape)`."""
    starts = told.get("starts", told.get("attempts", 1))  # what an earlier release calls it
    after = f" after {starts} attempts" if starts > 1 else ""
    why = f": {printable(told['why'])}" if told["why"] else ""
    return f"{told['state']}{after}{why}"


class Help(ModalScreen[None]):
    """What the states and the keys mean."""

    CSS = """
    Help { align: center middle; }
    Help > Static { width: auto; padding: 1 2; border: round $primary; background: $surface; }
    """

    def compose(self) -> ComposeResult:
        """One text."""
        yield Static(HELP, markup=False)

    def on_key(self) -> None:
        """Any key closes it."""
        self.dismiss()


class RunPanel(Vertical):
    """A run: its head, and its ranks."""

    DEFAULT_CSS = """
    RunPanel { height: auto; margin-bottom: 1; }
    RunPanel > DataTable {
        height: auto; max-height: 75vh; overflow-x: hidden; scrollbar-size-vertical: 1;
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Row] = []
        self._head = Static(markup=False)
        self._rest = Static(markup=False)
        self._table: DataTable[Text] = DataTable(cursor_type="row", cell_padding=0)
        self._drawn: list[list[str]] = []
        self._keys: list[str] = []

    def compose(self) -> ComposeResult:
        """The head above the table."""
        yield self._head
        yield self._table
        yield self._rest

    def on_mount(self) -> None:
        """Take the keys, if no widget has them."""
        if self.screen.focused is None:
            self._table.focus()

    def draw(self, picture: RunPicture, rows: list[Row], width: int) -> None:
        """Show a picture; rows that are still there keep the cursor."""
        unshown = len(rows) - ROWS_MAX
        rows = rows[:ROWS_MAX]
        self._rest.update(f"… {unshown} more: order them, or fold" if unshown > 0 else "")
        self._rest.display = unshown > 0
        lines = head(picture, width)
        self._head.update(Text("\n").join([Text(lines[0], "bold"), *map(Text, lines[1:])]))
        columns = columns_for(picture.rows, width)
        names = heading(columns, is_pool=picture.run.is_pool)
        keys = [*names, *(row.key for row in rows)]
        drawn = [cells(row, columns) for row in rows]
        if keys == self._keys:
            self._redraw(drawn, rows)
        else:
            at = self._cursor_key()
            self._table.clear(columns=True)
            for name, column in zip(names, columns, strict=True):
                self._table.add_column(name, width=column.width + 1)
            for row, texts in zip(rows, drawn, strict=True):
                self._table.add_row(*(_styled(row, text) for text in texts), key=row.key)
            found = [number for number, row in enumerate(rows) if row.key == at]
            if found:
                self._table.move_cursor(row=found[0], animate=False)
        self.rows, self._drawn, self._keys = rows, drawn, keys
        self._table.display = bool(rows)

    def _redraw(self, drawn: Sequence[Sequence[str]], rows: Sequence[Row]) -> None:
        """Write the cells that have changed."""
        for number, (texts, before) in enumerate(zip(drawn, self._drawn, strict=True)):
            for place, (text, earlier) in enumerate(zip(texts, before, strict=True)):
                if text != earlier or rows[number].state != self.rows[number].state:
                    at = Coordinate(number, place)
                    self._table.update_cell_at(at, _styled(rows[number], text))

    def _cursor_key(self) -> str | None:
        at = self._table.cursor_row
        return self.rows[at].key if 0 <= at < len(self.rows) else None


def _styled(row: Row, text: str) -> Text:
    return Text(text, _STYLES.get(row.state, "dim"), no_wrap=True)


class Top(App[None]):
    """The whole screen.

    Args:
        choose: finds the runs to show.
        interval_s: how long to wait between two looks, at least.
        look: looks at runs.
        wait_for_end: waits, in a thread, for how a run ends.
    """

    TITLE = "rankwise top"
    CSS = "#runs { scrollbar-size-vertical: 1; }"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar = [
        ("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        ("question_mark", "help", "Help"),
        ("f", "fold", "Fold"),
        ("o", "order('STATE')", "Odd"),
        ("r", "order('RANK')", "Rank"),
        ("s", "order('STEPS')", "Steps"),
        ("l", "order('LATE')", "Late"),
        ("c", "order('CPU')", "CPU"),
        ("m", "order('MEMORY')", "Memory"),
    ]

    def __init__(
        self,
        choose: Callable[[], list[RunSummary]],
        interval_s: float,
        *,
        sample: Callable[[Sequence[RunSummary]], list[RunSample]] = lambda runs: look_at(
            runs, watches=True
        ),
        wait_for_end: Listen = wait_for_end,
    ) -> None:
        super().__init__()
        self._choose = choose
        self._interval_s = interval_s
        self._sample = sample
        self._wait_for_end = wait_for_end
        self._watchers: dict[RunSummary, Watcher] = {}
        self._pictures: dict[RunSummary, RunPicture] = {}
        self._panels: dict[RunSummary, RunPanel] = {}
        self._order = SortOrder.STATE
        self._folds: bool | None = None
        self._unfolded: set[tuple[RunSummary, State]] = set()
        self._deaf: set[RunSummary] = set()
        """Runs whose end is not waited for, since the connection has broken."""
        self._nothing = Static("no runs yet: they appear here", markup=False)
        self._runs = VerticalScroll(self._nothing, id="runs", can_focus=False)

    def compose(self) -> ComposeResult:
        """The runs above the keys."""
        yield self._runs
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begin to look."""
        self._look_soon()

    def on_resize(self) -> None:
        """Draw as wide as there is room."""
        self._draw()

    def action_help(self) -> None:
        """Explain the screen."""
        self.push_screen(Help())

    def action_order(self, name: str) -> None:
        """Sort by another column."""
        self._order = SortOrder[name]
        self._draw()

    def action_fold(self) -> None:
        """Fold all ranks by state, or show each."""
        shown = [row for panel in self._panels.values() for row in panel.rows]
        self._folds = not any(len(row.ranks) > 1 for row in shown)
        self._unfolded.clear()
        self._draw()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Unfold the ranks of a state, or fold them."""
        for run, panel in self._panels.items():
            if event.data_table.parent is panel and event.cursor_row < len(panel.rows):
                row = panel.rows[event.cursor_row]
                if len(row.ranks) > 1 or row.depth:
                    self._unfolded ^= {(run, row.state)}
                    self._draw()

    def _look_soon(self) -> None:
        threading.Thread(target=self._look_once, name="rankwise-look", daemon=True).start()

    def _look_once(self) -> None:
        """In a thread: look at the runs there are, and at those that were there before."""
        began = time.monotonic()
        chosen: list[RunSummary] = []
        with suppress(RankwiseError):  # the run that was named is over
            chosen = self._choose()
        for run in chosen:
            if run not in self._watchers or run in self._deaf:
                self._watchers.setdefault(run, Watcher(run))
                self._deaf.discard(run)
                self._in_thread(self._await_end, run)
        for run in self._deaf.difference(chosen):
            self._deaf.discard(run)
            self._call(self._end, run, NO_LAST_WORDS)
        going_on = [run for run in self._watchers if not self._has_ended(run)]
        samples = self._sample(going_on)
        rest_s = max(self._interval_s, REST * (time.monotonic() - began))
        self._call(self._show, samples, rest_s)

    def _has_ended(self, run: RunSummary) -> bool:
        picture = self._pictures.get(run)
        return picture is not None and bool(picture.end)

    def _await_end(self, run: RunSummary) -> None:
        """In a thread: wait for the end of a run."""
        how = self._wait_for_end(run)
        if how is None:
            self._deaf.add(run)  # the next look tells whether its agent is gone
        else:
            self._call(self._end, run, how)

    def _end(self, run: RunSummary, how: str) -> None:
        self._pictures[run] = self._watchers[run].end(how)
        self._draw()

    def _show(self, samples: Sequence[RunSample], rest_s: float) -> None:
        for sample in samples:
            self._pictures[sample.run] = self._watchers[sample.run].see(sample)
        self._draw()
        self.set_timer(rest_s, self._look_soon)

    def _draw(self) -> None:
        if not self.is_running:
            return
        self._nothing.display = not self._pictures
        for run, picture in list(self._pictures.items()):
            panel = self._panels.get(run)
            if panel is None:
                panel = self._panels[run] = RunPanel()
                self._runs.mount(panel)
            unfolded = {state for each, state in self._unfolded if each == run}
            rows = arranged(picture.rows, self._order, folds=self._folds, unfolded=unfolded)
            panel.draw(picture, rows, self.size.width - MARGIN)

    def _call(self, then: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the user has quit meanwhile
            self.call_later(then, *arguments)

    @staticmethod
    def _in_thread(work: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, name="rankwise-end", daemon=True).start()
