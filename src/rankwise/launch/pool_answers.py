"""What a pool answers on its control socket: its status, as agents of runs tell theirs.

A worker stands where a run has a rank: `rankwise ps` and `rankwise top` show both alike. All other
questions are refused: a pool is part of a program, which has its output and ends it.
"""

import os
import sys
import time
from errno import EADDRINUSE
from typing import Any

from rankwise.base.units import SECOND
from rankwise.core.pool.machine import PoolPhase
from rankwise.drivers.real.pool.engine import PoolEngine, WorkerSample
from rankwise.launch.control.server import ControlRequest, ControlServer, Reply

_SAME_NAME_MAX = 100


def answer_questions(engine: PoolEngine, name: str, size: int) -> None:
    """Let other terminals ask a pool, until it ends."""
    # Another pool of this process may be called so, too.
    for each in (name, *(f"{name}-{number}" for number in range(2, _SAME_NAME_MAX + 1))):
        try:
            engine.answer_through(_Socket(each, _PoolAnswers(engine, each, size)))
        except OSError as error:  # or unix sockets are forbidden here: `rankwise top` lacks it then
            if error.errno == EADDRINUSE:
                continue
        return


class _Socket(ControlServer):
    """Tells those who wait for the pool's end that it has come."""

    def __init__(self, name: str, answers: "_PoolAnswers") -> None:
        super().__init__(name, answers.on_request, is_pool=True)
        self._answers = answers

    def close(self) -> None:
        """Leave, with the last words."""
        self._answers.tell_end()
        super().close()


class _PoolAnswers:
    def __init__(self, engine: PoolEngine, name: str, size: int) -> None:
        self._engine = engine
        self._name = name
        self._size = size
        self._began_ns = time.monotonic_ns()
        self._awaiting_end: list[Reply] = []

    def on_request(self, request: ControlRequest, reply: Reply) -> None:
        """Answer at once."""
        match request.ask:
            case "status":
                reply.send(self._status())
                reply.finish()
            case "end":
                reply.send({"state": "going on"})
                self._awaiting_end = [each for each in self._awaiting_end if each.is_wanted]
                self._awaiting_end.append(reply)
            case other:
                told = f"it is a rankwise.Pool, which cannot be asked for {other!r}"
                reply.send({"error": told, "run_id": self._name})
                reply.finish()

    def tell_end(self) -> None:
        """The pool has ended."""
        look = self._engine.look()
        for reply in self._awaiting_end:
            reply.send({"state": _state(look.phase), "starts": 1, "why": ""})
            reply.finish()

    def _status(self) -> dict[str, Any]:
        look = self._engine.look()
        return {
            "run_id": self._name,
            "nproc": self._size,
            "state": _state(look.phase),
            "age_s": (time.monotonic_ns() - self._began_ns) / SECOND,
            "program": os.path.basename(sys.argv[0]) or "python",
            "pool": {"queued": look.queued, "done": look.done, "failed": look.failed},
            "workers": [_worker(each) for each in look.workers],
        }


def _state(phase: PoolPhase) -> str:
    return "ended" if phase is PoolPhase.RELEASED else str(phase)


def _worker(look: WorkerSample) -> dict[str, Any]:
    running = "running" if look.task else "idle"
    calls = f" ({look.call_count} calls)" if look.call_count > 1 else ""
    return {
        "rank": look.worker,
        "local_rank": look.worker,
        "pid": look.pid or None,
        "state": running if look.is_ready else "starting",
        "steps": look.done_count,
        "task": f"{look.task}{calls}",
        "task_s": round(look.for_ns / SECOND, 3) if look.task else None,
    }
