"""Where the `rankwise` command begins: imports next to nothing before it can be interrupted."""

import sys

from rankwise.drivers.real.early_signals import catch_early, end_on_interrupt

TYPE_CHECKING = False  # an interrupt while `typing` is imported would show a traceback
if TYPE_CHECKING:
    from typing import NoReturn


def start() -> "NoReturn":
    """The console script. A signal while it still imports ends it with one line."""
    if sys.argv[1:2] == ["run"]:
        catch_early()
    else:
        end_on_interrupt()
    from rankwise.cli.main import main  # noqa: PLC0415  # an interrupt may come before this

    main()
