"""What state a process is in, as the kernel tells."""

__all__ = ["is_uninterruptible_state", "read_proc_state"]


def read_proc_state(pid: int) -> str | None:
    """The one-letter state in `/proc/<pid>/stat`, such as R or D; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            text = stat.read()
    except OSError:
        return None
    # The second field is the command in parentheses, which may hold blanks and parentheses.
    fields = text[text.rfind(")") + 1 :].split()
    return fields[0] if ")" in text and fields else None


def is_uninterruptible_state(state: str | None) -> bool:
    """Whether a process waits in the kernel where not even SIGKILL reaches it."""
    return state == "D"
