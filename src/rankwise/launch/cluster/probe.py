"""Asks an agent, from any thread, how it is.

The answer is made in the reactor's thread, for which the asker waits: an agent that is stuck does
not answer as if it were well. CPU time and memory, which any process may look up, are looked up in
the asker's thread.
"""

import threading
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import msgspec

from rankwise.drivers.real.proc import may_have_gpus
from rankwise.drivers.real.process_work import usage_by_session
from rankwise.launch.cluster.metrics import AgentSnapshot

if TYPE_CHECKING:
    from rankwise.drivers.real.gpus import Gpus, GpuUse

PATIENCE_S = 5.0


class Probe:
    """Asks one agent.

    Args:
        ask: has a callback called in the agent's thread.
        look: describes the agent; called in the agent's thread.
        patience_s: how long an answer may take.
    """

    def __init__(
        self,
        ask: Callable[[Callable[[], None]], None],
        look: Callable[[], AgentSnapshot],
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._ask = ask
        self._look = look
        self._patience_s = patience_s
        self._last: AgentSnapshot | None = None
        self._gpus: Gpus | None = None
        self._answer_came = threading.Condition()

    def snapshot(self, *, measures: bool) -> AgentSnapshot | None:
        """How the agent says that it is, and what its ranks use; None if it does not answer."""
        snapshot = self._last or self._asked()
        if snapshot is None or not measures:
            return snapshot
        pids = {rank.pid for rank in snapshot.ranks if rank.pid is not None}
        return msgspec.structs.replace(
            snapshot, usage=usage_by_session(), gpus=self._gpus_of(pids) if pids else {}
        )

    def _gpus_of(self, pids: Collection[int]) -> Mapping[int, "GpuUse"]:
        if not may_have_gpus():
            return {}
        from rankwise.drivers.real.gpus import open_gpus, uses_of  # noqa: PLC0415  # few have them

        self._gpus = self._gpus or open_gpus()
        return {} if self._gpus is None else uses_of(self._gpus.read(), pids)

    def conclude(self) -> None:
        """In the agent's thread, at its end: what it is now is what it will be."""
        with self._answer_came:
            self._last = self._look()
            self._answer_came.notify_all()  # a late question would wait for an agent that is gone

    def _asked(self) -> AgentSnapshot | None:
        answers: list[AgentSnapshot] = []

        def answer() -> None:
            with self._answer_came:
                answers.append(self._look())
                self._answer_came.notify_all()

        self._ask(answer)
        with self._answer_came:
            self._answer_came.wait_for(lambda: answers or self._last, self._patience_s)
        return answers[0] if answers else self._last
