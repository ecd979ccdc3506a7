"""Double binary tree: two trees, each with half of the data, reduce to their roots and broadcast.

A rank that is a leaf in one tree is an inner node in the other, so every rank sends and receives
all of the data about once each way, after log2(n) hops instead of a ring's n.

The ranks stand in a row, numbered from 1. The root of a stretch of it is the number in there that
is divisible by the highest power of two; left and right of it are its subtrees, and odd numbers
are leaves. The second tree numbers the ranks one further, and so turns leaves into inner nodes
(but for one rank if their number is odd).

Each tree has a channel: if a rank is a child in one and a parent in the other, what it sends down
need not wait for all that it sends up.

Order of reduction: a node adds to its own the sum of its lower subtree, then that of its upper
one: (x + lower) + upper, rounded to the dtype after each addition.
"""

from rankwise.core.collectives.program import Program, Receive, Send, Span, Task, part_of

COLLECTIVE = "all_reduce"


def highest_in(low: int, high: int) -> int:
    """The number from `low` to `high` that is divisible by the highest power of two."""
    number = high
    while low <= number & (number - 1) != 0:  # clears the lowest bit
        number &= number - 1
    return number


def family(number: int, count: int) -> tuple[int | None, list[int]]:
    """The parent and the children of `number` in the tree of the numbers 1 to `count`."""
    low, high = 1, count
    parent = None
    while (root := highest_in(low, high)) != number:
        parent = root
        low, high = (low, root - 1) if number < root else (root + 1, high)
    children = []
    if low < number:
        children.append(highest_in(low, number - 1))
    if number < high:
        children.append(highest_in(number + 1, high))
    return parent, children


def place_in_tree(rank: int, count: int, tree: int) -> tuple[int | None, list[int]]:
    """The parent and the children of a rank in the first (0) or the second (1) tree."""
    parent, children = family((rank + tree) % count + 1, count)
    ranks = [(child - 1 - tree) % count for child in children]
    return None if parent is None else (parent - 1 - tree) % count, ranks


def program(task: Task) -> Program:
    """The program of one rank, in both trees."""
    everything = Span(0, task.elements)
    roles = [
        (*place_in_tree(task.rank, task.size, tree), part_of(everything, tree, 2))
        for tree in (0, 1)
    ]
    for tree, (above, below, half) in enumerate(roles):
        for child in below:
            yield Receive(child, half, combines=True, channel=tree)
        if above is not None:
            yield Send(above, half, tree)
    for tree, (above, below, half) in enumerate(roles):
        if above is not None:
            yield Receive(above, half, channel=tree)
        for child in below:
            yield Send(child, half, tree)
