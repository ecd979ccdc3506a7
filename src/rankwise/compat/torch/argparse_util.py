"""Actions of `argparse` with defaults from the environment: `--max-restarts`, or PET_MAX_RESTARTS.

The command line wins.
"""

import os
from argparse import Action, ArgumentParser, Namespace
from typing import Any

__all__ = ["check_env", "env"]


class env(Action):  # noqa: N801  # torch's name
    """Stores a value; without one, that of the variable `PET_<DEST>`, or the default.

    A variable that is set makes a required option optional. `argparse` converts it with the
    option's `type`, as it does with every default that is a text.
    """

    def __init__(
        self, dest: str, default: Any = None, required: bool = False, **kwargs: Any
    ) -> None:
        default = os.environ.get(_variable(dest), default)
        super().__init__(dest=dest, default=default, required=required and not default, **kwargs)

    def __call__(
        self,
        parser: ArgumentParser,  # noqa: ARG002  # the library's interface
        namespace: Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002  # the same
    ) -> None:
        """Take the value."""
        setattr(namespace, self.dest, values)


class check_env(Action):  # noqa: N801  # torch's name
    """A flag that is also set by the variable `PET_<DEST>`, which is a whole number other than 0.

    Raises:
        ValueError: the variable is no whole number.
    """

    def __init__(self, dest: str, default: bool = False, **kwargs: Any) -> None:
        variable = _variable(dest)
        text = os.environ.get(variable, str(int(default)))
        try:
            is_set = bool(int(text))
        except ValueError:
            raise ValueError(f"{variable} is {text!r}, expected 0 or 1") from None
        super().__init__(dest=dest, const=True, default=is_set, nargs=0, **kwargs)

    def __call__(
        self,
        parser: ArgumentParser,  # noqa: ARG002  # the library's interface
        namespace: Namespace,
        values: Any,  # noqa: ARG002  # the same
        option_string: str | None = None,  # noqa: ARG002  # the same
    ) -> None:
        """Set the flag."""
        setattr(namespace, self.dest, self.const)


def _variable(dest: str) -> str:
    return f"PET_{dest.upper()}"
