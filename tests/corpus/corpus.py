"""Programs of which it is known who is to blame, and healthy ones, and what they say of it.

A program is one as users write them; a block of TOML comments at its top says what is wrong with
it. A line is named by a comment at its end, `# line: call`, and then meant by `{call}`.

    kind          departure, disagreement, circle, absence, failure or lateness
    blamed        the ranks that are to blame
    says          how the root cause begins; {others} stands for those who wait, or some of them
    tells         instead, for a run that succeeds: what its last words have; of a healthy one, may
    stands        a line that the blamed ranks' stacks must have
    ranks         how many ranks, 3 by default
    patience      seconds of the collectives' time-out, which the program finds in PATIENCE
    hang_timeout  seconds; none by default
    simulated     why simulated ranks cannot show it; else they must come to the same verdict
    there         what they say instead, where they know more
    two_nodes     whether two ranks on two nodes come to it, too, in a test
    of_two        what two ranks say instead, where only a majority knows who is wrong

It prints "now" where the fault begins: from then on, or when patience is over, it can be known.
"""

import re
import tomllib
from pathlib import Path

import msgspec

FOLDER = Path(__file__).parent
COLLECTIVE_TIMEOUT_S = 600.0
PRELOADED = (
    "numpy", "torch.distributed", "torch._dynamo", "torch.distributed.fsdp", "torch.utils.data",
)  # fmt: skip
"""What programs import, once for all their ranks; DDP imports the second when it is made."""
_BLOCK = re.compile(r"^# /// \w+\n((?:#.*\n)*?)# ///$", re.MULTILINE)
_MARK = re.compile(r"# line: (\w+)$")
_SOME_RANKS = r"ranks? [0-9, -]+(?: waits?)?"


class Program(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program of the corpus, as its header has it."""

    path: Path
    kind: str = "healthy"
    blamed: tuple[int, ...] = ()
    says: str = ""
    tells: str = ""
    stands: str = ""
    ranks: int = 3
    patience: float = COLLECTIVE_TIMEOUT_S
    hang_timeout: float | None = None
    simulated: str = ""
    there: str = ""
    two_nodes: bool = False
    of_two: str = ""

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def is_of_torch(self) -> bool:
        return "import torch\n" in self.path.read_text()

    @property
    def environment(self) -> dict[str, str]:
        patience = str(self.patience)
        return {
            "PATIENCE": patience, "RANKWISE_COLLECTIVE_TIMEOUT": patience, "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def line(self, mark: str) -> int:
        """The number of the line that is so marked."""
        for number, line in enumerate(self.path.read_text().splitlines(), 1):
            if (found := _MARK.search(line)) and found[1] == mark:
                return number
        raise LookupError(f"{self.path} has no line that ends in '# line: {mark}'")

    def names_the_culprit(
        self, root_cause: str, *, is_simulated: bool = False, is_of_two: bool = False
    ) -> bool:
        """Whether a report's root cause is the one that the program says."""
        says = (self.there if is_simulated else self.of_two if is_of_two else "") or self.says

        def place(found: re.Match[str]) -> str:
            if found[1] == "others":
                return _SOME_RANKS
            return re.escape(f"{self.path.name}:{self.line(found[1])}")

        return re.match(re.sub(r"\\\{(\w+)\\\}", place, re.escape(says)), root_cause) is not None


def read(path: Path) -> Program:
    """A program with what its header says."""
    block = _BLOCK.search(path.read_text())
    lines = [] if block is None else [line[2:] for line in block[1].splitlines()]
    return msgspec.convert({**tomllib.loads("\n".join(lines)), "path": path}, Program)


def programs(folder: str) -> list[Program]:
    """Those of `culprits` or `healthy`, by name."""
    return [read(path) for path in sorted((FOLDER / folder).glob("*.py"))]
