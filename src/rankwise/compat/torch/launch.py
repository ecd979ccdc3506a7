"""torchrun's predecessor: scripts find their local rank in the argument `--local-rank`.

`--use-env` leaves the argument out; LOCAL_RANK is set in any case. New programs use
`rankwise run`.
"""

import argparse
import atexit
import warnings
from collections.abc import Sequence

from rankwise.compat.torch.run import get_args_parser, run
from rankwise.launch.run.standard_streams import flush_standard_streams

__all__ = ["launch", "main", "parse_args"]


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    """Parse torchrun's command line, and `--use-env`."""
    parser = get_args_parser()
    parser.add_argument(
        "--use-env",
        "--use_env",
        action="store_true",
        help="pass the local rank in LOCAL_RANK only, not as the argument --local-rank",
    )
    return parser.parse_args(args)


def launch(args: argparse.Namespace) -> None:
    """Launch what the parsed arguments ask for.

    Raises:
        ValueError: a program that is no Python script would be given `--local-rank`.
    """
    if args.no_python and not args.use_env:
        raise ValueError(
            "When using the '--no-python' flag, you must also set the '--use-env' flag."
        )
    run(args)


def main(args: Sequence[str] | None = None) -> None:
    """Be `python -m torch.distributed.launch`."""
    warnings.warn(
        "torch.distributed.launch is deprecated, and so is this module: use `rankwise run`, "
        "and read the local rank from os.environ['LOCAL_RANK'] instead of --local-rank",
        category=FutureWarning,
        stacklevel=2,
    )
    launch(parse_args(args))


if __name__ == "__main__":
    atexit.register(flush_standard_streams)
    main()
