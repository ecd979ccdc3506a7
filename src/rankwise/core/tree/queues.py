"""The queues of children: free places, when words are sent, and which are recalled.

An idle child gets a word at once, a busy one gets words in batches. If a child is idle while
another has queued work, a recall moves a part of that work to it.
"""

from collections import deque

from rankwise.base.errors import LocalProtocolError, RemoteProtocolError
from rankwise.base.units import Instant
from rankwise.core.tree.state import Child, GraphTask, TaskPhase
from rankwise.core.tree.vocabulary import ChildPool, Dispatch, Effect, GraphSpec, Recall


class Team:
    """The children of one pool, and what waits for room at any of them."""

    __slots__ = ("children", "favourite", "idle", "pinned_count", "ready", "turn")

    def __init__(self, children: list[Child], favourite: int | None = None) -> None:
        self.children = children
        self.favourite = favourite
        """The number of the child that is chosen first when it is idle."""
        self.ready: deque[GraphTask] = deque()
        self.idle: list[Child] = []
        """Those that became idle, the latest last, but for the favourite; some may have found work
        meanwhile."""
        self.turn = 0
        self.pinned_count = 0
        """How many tasks wait for room at one particular child."""

    @property
    def has_hope(self) -> bool:
        """Whether a child lives, or will."""
        return any(child.is_alive or child.is_awaited for child in self.children)

    def note_idle(self, child: Child) -> None:
        """Remember a child that has nothing to do."""
        if not child.is_listed_idle:
            child.is_listed_idle = True
            if self.idle and self.idle[-1].index == self.favourite:
                self.idle.insert(-1, child)
            else:
                self.idle.append(child)


class Queues:
    """All queues; orders go to `effects`."""

    def __init__(self, spec: GraphSpec, effects: list[Effect]) -> None:
        self._spec = spec
        self._effects = effects
        self.children = [Child(index, pool) for index, pool in enumerate(spec.pools)]
        self.teams = {
            pool: Team([child for child in self.children if child.pool is pool], spec.favourite)
            for pool in ChildPool
        }
        for child in self.children:
            self.teams[child.pool].note_idle(child)
        self._holding: list[Child] = []
        """Children for whom there is something unsent."""
        self._urgent: list[Child] = []
        """Those of them that have nothing else to do, or a full batch."""
        self.held_since: Instant | None = None
        self.has_followers = False
        """Whether there may be tasks that follow others into a queue."""

    def choose(self, team: Team) -> Child | None:
        """An idle child, else one that has room: the next in turn, or its neighbour with less."""
        idle = team.idle
        while idle:
            child = idle.pop()
            child.is_listed_idle = False
            if child.is_alive and not child.queue:
                return child
        children, depth, count = team.children, self._spec.depth, len(team.children)
        for _ in children:
            turn = team.turn = team.turn + 1 if team.turn + 1 < count else 0
            # Two that are looked at are nearly as good as all.
            child, other = children[turn], children[turn - 1]
            if other.is_alive and len(other.queue) < len(child.queue):
                child = other
            if child.is_alive and len(child.queue) < depth:
                return child
        return None

    def common_child(self, task: GraphTask) -> Child | None:
        """The child in whose queue all unfinished producers are, if `task` may go there too."""
        if task.members is not None or task.tainted_by is not None:
            return None
        child: Child | None = None
        for producer in task.producers:
            if producer.state >= TaskPhase.COMPLETED:
                continue
            if producer.state is not TaskPhase.RUNNING or producer.child is None:
                return None
            if child is None:
                child = producer.child
            elif producer.child is not child:
                return None
        if child is None or child.pool is not task.pool:
            return None
        return child if task.pinned is None or task.pinned == child.index else None

    def append(self, child: Child, task: GraphTask) -> None:
        """Queue a task at a child; it is sent later. Its consumers may follow it."""
        task.state = TaskPhase.RUNNING
        task.child = child
        queue, unsent = child.queue, child.unsent
        queue.append(task)
        if not unsent:
            self._holding.append(child)
        unsent.append(task)
        if task.consumers is not None:
            for consumer, _ in task.consumers:
                if consumer.state is TaskPhase.PENDING:
                    child.followers.append(consumer)
                    self.has_followers = True
        waiting = len(unsent)
        if waiting == len(queue) or waiting >= self._spec.batch:
            self._urgent.append(child)

    def follow(self, child: Child) -> None:
        """Queue ahead what has all its producers here, as far as there is room."""
        followers, depth = child.followers, self._spec.depth
        while followers and len(child.queue) < depth:
            task = followers.popleft()
            if task.state is TaskPhase.PENDING and self.common_child(task) is child:
                self.append(child, task)

    def follow_on(self) -> None:
        """Queue ahead what has room by now, half a queue at a time: words travel together."""
        for child in self.children:
            if child.followers and len(child.queue) <= self._spec.depth // 2:
                self.follow(child)

    def forget_followers(self) -> None:
        """Begin anew."""
        for child in self.children:
            child.followers.clear()
        self.has_followers = False

    def take_first(self, task: GraphTask) -> Child:
        """Take out of its queue what a child has reported, which must be its first."""
        child = task.child
        if child is None or not child.queue or child.queue[0] is not task:
            raise RemoteProtocolError(f"a child reported {task!r}, which was not its next one")
        child.queue.popleft()
        child.ended += 1
        if not child.queue:
            self.teams[child.pool].note_idle(child)
        return child

    def take_back(self, child: Child, slots: list[int]) -> list[GraphTask]:
        """Take back what was recalled, and all that stands behind it because it is unsent."""
        count = len(slots) + len(child.unsent)
        self._forget_unsent(child)
        back = [child.queue.pop() for _ in range(min(count, len(child.queue)))]
        back.reverse()
        if [task.slot for task in back[: len(slots)]] != slots:
            raise LocalProtocolError(f"what was recalled from child {child.index} was not queued")
        if not child.queue:
            self.teams[child.pool].note_idle(child)
        return back

    def take_back_unsent(self, task: GraphTask) -> bool:
        """Take one task back, if it has not been sent."""
        child = task.child
        if child is None or task not in child.unsent:
            return False
        child.unsent.remove(task)
        child.queue.remove(task)
        if not child.unsent:
            self._holding.remove(child)
        if not child.queue:
            self.teams[child.pool].note_idle(child)
        return True

    def take_back_ahead(self, child: Child) -> list[GraphTask]:
        """Take back what is unsent and relies on what stands before it."""
        back = [task for task in child.unsent if task.waiting_for > 0]
        for task in back:
            self.take_back_unsent(task)
        return back

    def empty(self, child: Child) -> tuple[list[GraphTask], int]:
        """Everything that was queued at a dead child, and how much of it had been sent."""
        queue, sent_count = list(child.queue), len(child.queue) - len(child.unsent)
        self._forget_unsent(child)
        child.queue.clear()
        child.followers.clear()
        child.ended = child.epoch = 0
        child.recalled_at = -1
        return queue, sent_count

    def _forget_unsent(self, child: Child) -> None:
        if child.unsent:
            self._holding.remove(child)
            child.unsent = []

    def send_some(self, now: Instant) -> None:
        """Send what should not wait: to idle children, full batches, and what was held enough."""
        holding = self._holding
        if not holding:
            return
        if self._urgent:
            urgent, self._urgent = self._urgent, []
            for child in urgent:
                # In a burst even an idle child gets several words at a time: waking it up costs
                # more than they do.
                is_in_burst = now - child.sent_at < self._spec.hold
                if child.unsent and not (is_in_burst and len(child.unsent) < self._spec.batch):
                    holding.remove(child)
                    child.sent_at = now
                    self._send(child)
            if not holding:
                self.held_since = None
                return
        if self.held_since is None:
            self.held_since = now
        elif now - self.held_since >= self._spec.hold:
            self.send_all()

    def send_all(self) -> None:
        """Send everything that is queued."""
        for child in self._holding:
            self._send(child)
        self._holding = []
        self._urgent = []
        self.held_since = None

    def _send(self, child: Child) -> None:
        unsent, child.unsent = child.unsent, []
        if len(unsent) == 1:  # cheaper, and a caller may be waiting for it
            (task,) = unsent
            order = Dispatch(child.index, [task.slot], [task.waiting_for > 0], child.epoch)
            self._effects.append(order)
            return
        # Members of a group wait for no task; nothing ever counts up their `waiting_for`.
        ahead = [task.waiting_for > 0 for task in unsent]
        slots = [task.slot for task in unsent]
        self._effects.append(Dispatch(child.index, slots, ahead, child.epoch))

    def balance(self, team: Team) -> None:
        """Recall work from the child that has most, when another has none."""
        if not any(child.is_alive and not child.queue for child in team.idle):
            return
        richest = max(team.children, key=lambda child: len(child.queue))
        if len(richest.queue) < 2 or richest.recalled_at == richest.ended or not richest.is_alive:
            return
        if any(_may_move(task) for task in list(richest.queue)[1:]):
            self.recall(richest)

    def recall(self, child: Child) -> None:
        """Order back what a child has not taken; must be the last order to this child."""
        child.recalled_at = child.ended
        self._effects.append(Recall(child.index))


def _may_move(task: GraphTask) -> bool:
    return task.pinned is None and task.group is None and task.waiting_for == 0
