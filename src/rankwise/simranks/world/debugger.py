"""`breakpoint()` in a simulated rank: the world stops, and pdb opens in that rank.

No other rank runs meanwhile, since the rank keeps the run token. The command `ranks` lists where
the others stand. A rank that is stepped into a wait lets them run until it is its turn again.
"""

import pdb  # noqa: T100  # the very thing
import sys
import traceback
from types import FrameType

from rankwise.simranks.world.places import owner_of
from rankwise.simranks.world.ranks import Rank


class RankDebugger(pdb.Pdb):
    """pdb with a prompt that names the rank, on the terminal of the run."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(stdin=sys.__stdin__, stdout=sys.__stdout__, nosigint=True)
        self.prompt = f"(rank {rank.number}) (Pdb) "
        self._rank = rank

    def do_ranks(self, arg: str) -> None:
        """Tell where all ranks stand (`ranks`), or the whole stack of one (`ranks N`)."""
        ranks = self._rank.scheduler.ranks
        if not arg:
            for rank in ranks.values():
                self.message(f"rank {rank.number} {self._state(rank)}")
                self._show_stack(rank, is_whole=False)
        elif arg.isdecimal() and int(arg) in ranks:
            self.message(f"rank {arg} {self._state(ranks[int(arg)])}")
            self._show_stack(ranks[int(arg)], is_whole=True)
        else:
            self.error(f"there is no rank {arg}, expected 0 to {len(ranks) - 1}")

    def _cmdloop(self) -> None:
        scheduler = self._rank.scheduler
        scheduler.is_paused = True  # a rank at the prompt does not hang
        try:
            super()._cmdloop()
        finally:
            scheduler.is_paused = False

    def _state(self, rank: Rank) -> str:
        if rank is self._rank:
            return "is here"
        if rank.exit_code is not None:
            return f"has ended with {rank.exit_code}"
        if not rank.has_begun:
            return "has not started"
        return "can go on" if rank.waits_for is None else f"waits for {rank.waits_for.describe()}"

    def _show_stack(self, rank: Rank, *, is_whole: bool) -> None:
        """Show the lines of a rank's stack that are not ours; only the innermost of the user's."""
        frame = self.curframe if rank is self._rank else rank.stack()
        lines = [
            (owner, each)
            for each in traceback.walk_stack(frame)
            if frame is not None and (owner := owner_of(each[0].f_code.co_filename)) != "rankwise"
        ]
        users = [index for index, (owner, _) in enumerate(lines) if owner == "user"]
        if users:  # what lies below them is how Python starts a thread
            lines = lines[: users[-1] + 1] if is_whole else [lines[users[0]]]
        shown = traceback.StackSummary.extract(each for _, each in reversed(lines))
        self.message("".join(shown.format()).rstrip())


def stop_in(rank: Rank, frame: FrameType | None) -> None:
    """Open the debugger in the rank that runs, at this frame."""
    RankDebugger(rank).set_trace(frame)
