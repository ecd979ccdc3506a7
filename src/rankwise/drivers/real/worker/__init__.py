"""What runs inside a worker before, around and after the user's program."""

TYPE_CHECKING = False  # workers import this package, and `typing` would cost them milliseconds


def boot_program() -> str:
    """The file that a worker's interpreter is given."""
    return f"{__file__.rpartition('/')[0]}/boot.py"
