"""`worker_main`: a worker that answers questions over HTTP, on a Unix socket, while it works.

The socket is where TORCH_WORKER_SERVER_SOCKET says; without the variable there is no listener, and
nothing is loaded. Programs under `rankwise run` need none of this: `rankwise stacks` asks them all.

    GET  /                   where to look further
    GET  /handler/           the names of the handlers, as JSON
    POST /handler/<name>     ping: "pong"; dump_traceback: the Python stacks of all threads
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rankwise.compat.torch.elastic.multiprocessing.errors import record

if TYPE_CHECKING:
    from rankwise.launch.quiet_http import QuietHandler

__all__ = ["worker_main"]

TORCH_WORKER_SERVER_SOCKET = "TORCH_WORKER_SERVER_SOCKET"
HANDLERS_PATH = "/handler/"
WELCOME = f'<h1>torch.distributed.WorkerServer</h1>\n<a href="{HANDLERS_PATH}">Handler names</a>\n'


@record
@contextmanager
def worker_main() -> Iterator[None]:
    """Answer while the block, or the decorated main function, runs; record what it dies of.

    Raises:
        OSError: the socket cannot be made.
    """
    path = os.environ.get(TORCH_WORKER_SERVER_SOCKET)
    if path is None:
        yield
        return
    with _worker_server(path):
        yield


@contextmanager
def _worker_server(socket_path: str) -> Iterator[None]:
    from socketserver import ThreadingUnixStreamServer  # noqa: PLC0415  # only for who listens

    with suppress(FileNotFoundError):
        os.unlink(socket_path)  # an earlier life's
    server = ThreadingUnixStreamServer(socket_path, _request_handler())
    server.daemon_threads = True
    os.chmod(socket_path, 0o600)
    thread = threading.Thread(target=server.serve_forever, name="rankwise-worker-server")
    thread.daemon = True
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        with suppress(FileNotFoundError):
            os.unlink(socket_path)


def _ping() -> str:
    return "pong"


def _dump_traceback() -> str:
    """The stacks of all threads, innermost call last."""
    import traceback  # noqa: PLC0415  # rarely asked

    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = []
    for ident, frame in sys._current_frames().items():  # noqa: SLF001  # all that Python offers
        calls = "".join(traceback.format_stack(frame))
        stacks.append(f"Thread {ident} ({names.get(ident, 'unknown')}):\n{calls}")
    return "\n".join(stacks)


_HANDLERS: dict[str, Callable[[], str]] = {"dump_traceback": _dump_traceback, "ping": _ping}


def _request_handler() -> "type[QuietHandler]":
    import json  # noqa: PLC0415  # only for who listens

    from rankwise.launch.quiet_http import QuietHandler  # noqa: PLC0415  # the same

    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802  # the library's name
            if self.path == "/":
                self.answer(200, "text/html", WELCOME)
            elif self.path == HANDLERS_PATH:
                self.answer(200, "application/json", json.dumps(sorted(_HANDLERS)))
            else:
                self.answer(
                    404, "text/plain", f"there is nothing at {self.path}; see {HANDLERS_PATH}\n"
                )

        def do_POST(self) -> None:  # noqa: N802  # the library's name
            name = self.path.partition("?")[0].removeprefix(HANDLERS_PATH)
            answer = _HANDLERS.get(name) if self.path.startswith(HANDLERS_PATH) else None
            if answer is None:
                told = f"Handler {name} not found: there are {', '.join(_HANDLERS)}\n"
                self.answer(404, "text/plain", told)
            else:
                self.answer(200, "text/plain", answer())

    return Handler
