"""Writes the exception that a process dies of to its error file.

The file is named by TORCHELASTIC_ERROR_FILE, and its JSON is a format that other programs read:

    {"message": {"message": "ValueError: bad shape",
                 "extraInfo": {"py_callstack": "Traceback …", "timestamp": "1790000000"}}}

A launcher that is itself a worker of another launcher copies its first worker's error file to its
own, so that the outermost one learns of the root cause; `errorCode` then tells the exit code.
"""

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

__all__ = ["ErrorHandler"]

logger = logging.getLogger(__name__)


class ErrorHandler:
    """Writes and copies error files. Subclasses may override any of its methods."""

    def initialize(self) -> None:
        """Make sure that a fatal signal leaves the Python stacks of all threads behind."""
        import faulthandler  # noqa: PLC0415  # rarely needed at import

        if faulthandler.is_enabled() and "RANKWISE_RUN_ID" in os.environ:
            return  # a worker of rankwise: the stacks go to its agent, which reports them
        try:
            faulthandler.enable(all_threads=True)
        except Exception as error:  # noqa: BLE001  # stderr may be anything; the program is to run
            logger.warning("no stacks at fatal signals: faulthandler says %r", error)

    def record_exception(self, e: BaseException) -> None:
        """Write `e` to the error file; do nothing when the environment names none.

        Raises:
            OSError: the file cannot be written.
        """
        file = self._get_error_file_path()
        if not file:
            logger.debug("TORCHELASTIC_ERROR_FILE is not set: %r is not recorded", e)
            return
        self._write_error_file(file, json.dumps(_describe(e)))

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: dict[str, Any], error_code: int = 0
    ) -> None:
        """Put the exit code into the content of an error file, where its format has a place."""
        match rootcause_error.get("message"):
            case None:
                logger.warning(
                    "%s has no `message`, so exit code %s cannot be added to it",
                    rootcause_error_file,
                    error_code,
                )
            case dict() as message:
                message["errorCode"] = error_code
            case _:
                logger.warning(
                    "%s has the old format, which has no place for exit code %s",
                    rootcause_error_file,
                    error_code,
                )

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Copy a worker's error file to this process's own, with the exit code if it is not 0.

        Raises:
            OSError: the worker's file cannot be read, or the own one not written.
            ValueError: the worker's file is no JSON in UTF-8.
        """
        content = Path(rootcause_error_file).read_bytes().decode("utf-8")
        rootcause_error = json.loads(content)
        if error_code:
            self.override_error_code_in_rootcause_data(
                rootcause_error_file, rootcause_error, error_code
            )
            content = json.dumps(rootcause_error)
        own_file = self._get_error_file_path()
        if not own_file:
            logger.error(
                "TORCHELASTIC_ERROR_FILE is not set: the error in %s goes no further: %s",
                rootcause_error_file,
                content,
            )
            return
        self._rm(own_file)
        self._write_error_file(own_file, content)

    def _get_error_file_path(self) -> str | None:
        return os.environ.get("TORCHELASTIC_ERROR_FILE")

    def _write_error_file(self, file_path: str, error_msg: str) -> None:
        Path(file_path).write_text(error_msg, encoding="utf-8", newline="")

    def _rm(self, my_error_file: str) -> None:
        own = Path(my_error_file)
        if own.is_file():
            earlier = own.read_text(encoding="utf-8", errors="replace")
            logger.warning("%s is replaced; it said: %s", my_error_file, earlier)
            own.unlink()


def _describe(error: BaseException) -> dict[str, Any]:
    import traceback  # noqa: PLC0415  # only where a program failed

    callstack = "".join(traceback.format_exception(error))
    return {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {"py_callstack": callstack, "timestamp": str(int(time.time()))},
        }
    }
