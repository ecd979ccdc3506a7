"""What runs inside a worker before, around and after the user's program."""

TYPE_CHECKING = False  # workers import this package, and `typing` would cost them milliseconds


def boot_program(python: str = "") -> str:
    """The file that a worker's interpreter is given: `boot.py`, which fetches all the rest.

    To compile even that takes a worker 0.2 ms. So `python`, if it is this process's interpreter, is
    given the rest itself where that is compiled, in the place that Python has for it.
    """
    import os  # noqa: PLC0415 - for launchers, not for workers
    import sys  # noqa: PLC0415 - the same
    from _frozen_importlib_external import MAGIC_NUMBER  # noqa: PLC0415 - the same

    here = __file__.rpartition("/")[0]
    if python == sys.executable:
        compiled = f"{here}/__pycache__/bootstrap.{sys.implementation.cache_tag}.pyc"
        try:
            source = os.stat(f"{here}/bootstrap.py")
            with open(compiled, "rb") as file:
                header = file.read(16)
        except OSError:
            header = b""
        stamp = (0, int(source.st_mtime), source.st_size) if header else ()
        words = (number & 0xFFFF_FFFF for number in stamp)
        if header == MAGIC_NUMBER + b"".join(word.to_bytes(4, "little") for word in words):
            return compiled
    return f"{here}/boot.py"
