"""Waits until files that may not exist yet are written to, with inotify.

A file is watched through its directory, so it may appear, be replaced and grow. While not even the
directory exists, the nearest one above it is watched. A watch for a directory is added before it
is looked at, so nothing that happens in between is missed.

inotify tells of this machine's writers only: what another host writes to a network file system is
seen late. Where inotify is not to be had (its instances per user are limited), `wait` returns
after `interval` seconds instead, and its caller looks at the files.
"""

import ctypes
import logging
import os
from select import POLLIN, poll

__all__ = ["FileWatch"]

logger = logging.getLogger(__name__)

_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE = 0x2, 0x80, 0x100
_EVENTS = _IN_MODIFY | _IN_MOVED_TO | _IN_CREATE


class FileWatch:
    """Wakes one thread when files change. Close it to give its descriptors back.

    Args:
        interval: seconds between looks where inotify is not to be had.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._stirred = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._inotify: int = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll = poll()
        self._poll.register(self._stirred, POLLIN)
        if self._inotify >= 0:
            self._poll.register(self._inotify, POLLIN)
        else:
            self._give_up_inotify("inotify_init1")

    def watch(self, path: str) -> None:
        """Watch `path`; call it again while the file does not exist, after every `wait`."""
        directory = os.path.dirname(os.path.abspath(path))
        nearest = ""
        while self._inotify >= 0 and nearest != (now_nearest := _nearest_existing(directory)):
            # If the next directory below appears before we listen, the loop sees it.
            nearest = now_nearest
            self._add(nearest)

    def wait(self) -> None:
        """Wait until a watched file may have changed, or `stir` was called."""
        self._poll.poll(None if self._inotify >= 0 else self._interval * 1000)
        for descriptor in (self._inotify, self._stirred):
            if descriptor >= 0:
                _empty(descriptor)

    def stir(self) -> None:
        """End the present or the next `wait`; any thread may call it."""
        os.eventfd_write(self._stirred, 1)

    def close(self) -> None:
        """Give the descriptors back."""
        os.close(self._stirred)
        if self._inotify >= 0:
            os.close(self._inotify)

    def _add(self, directory: str) -> None:
        if self._libc.inotify_add_watch(self._inotify, os.fsencode(directory), _EVENTS) < 0:
            self._poll.unregister(self._inotify)
            os.close(self._inotify)
            self._inotify = -1
            self._give_up_inotify(f"inotify_add_watch of {directory}")

    def _give_up_inotify(self, call: str) -> None:
        logger.warning(
            "%s failed: %s; log files are looked at every %s s instead",
            call,
            os.strerror(ctypes.get_errno()),
            self._interval,
        )


def _nearest_existing(directory: str) -> str:
    while not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    return directory


def _empty(descriptor: int) -> None:
    """Read what is there; which files have changed is found by looking at them."""
    try:
        while os.read(descriptor, 1 << 16):
            pass
    except BlockingIOError:
        pass
