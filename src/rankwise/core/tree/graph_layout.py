"""Laying a recorded graph out over children, so that a replay needs no decision.

Tasks that depend on each other, however indirectly, form a *component*. A component goes to one
child, in the order of submission, which satisfies all its dependencies; different components have
nothing to wait for. The largest component is placed first, each at the child that has least.
"""

from collections.abc import Sequence

import msgspec

from rankwise.base.errors import TreeValueError
from rankwise.core.tree.hazards import Hazards
from rankwise.core.tree.state import GraphTask
from rankwise.core.tree.vocabulary import Access, ChildPool


class RecordedTask(msgspec.Struct, frozen=True):
    """A task that was submitted while recording.

    Attributes:
        pool: the children that may take it.
        child: the one child that may take it, or None.
        accesses: the bytes it touches.
        name: what to call it.
    """

    pool: ChildPool
    child: int | None
    accesses: tuple[Access, ...]
    name: str


def lay_out(tasks: Sequence[RecordedTask], pools: Sequence[ChildPool]) -> dict[int, list[int]]:
    """For each child that gets any, the tasks (their places in `tasks`) that it runs, in order.

    Raises:
        ConfigError: tasks that depend on each other are bound to different children.
    """
    components = _components(tasks)
    layout: dict[int, list[int]] = {}
    for component in sorted(components, key=lambda places: (-len(places), places[0])):
        child = _child_for([tasks[place] for place in component], pools, layout)
        layout.setdefault(child, []).extend(component)
    return {child: sorted(places) for child, places in sorted(layout.items())}


def _components(tasks: Sequence[RecordedTask]) -> list[list[int]]:
    parents = list(range(len(tasks)))

    def root(place: int) -> int:
        while parents[place] != place:
            parents[place] = parents[parents[place]]
            place = parents[place]
        return place

    hazards = Hazards()
    for place, recorded in enumerate(tasks):
        task = GraphTask(place, recorded.pool, recorded.name, recorded.child)
        for producer in hazards.enter(task, recorded.accesses):
            parents[root(place)] = root(producer.number)
    members: dict[int, list[int]] = {}
    for place in range(len(tasks)):
        members.setdefault(root(place), []).append(place)
    return list(members.values())


def _child_for(
    component: Sequence[RecordedTask], pools: Sequence[ChildPool], layout: dict[int, list[int]]
) -> int:
    bound = sorted({task.child for task in component if task.child is not None})
    wanted = {task.pool for task in component}
    if len(bound) > 1 or len(wanted) > 1:
        names = ", ".join(dict.fromkeys(task.name for task in component))
        raise TreeValueError(
            f"a recorded graph has tasks that depend on each other and are for different "
            f"children: {names}",
            hint="record what stays at one child, and submit the rest with run()",
        )
    if bound:
        return bound[0]
    (pool,) = wanted
    candidates = [child for child, other in enumerate(pools) if other is pool]
    return min(candidates, key=lambda child: (len(layout.get(child, ())), child))
