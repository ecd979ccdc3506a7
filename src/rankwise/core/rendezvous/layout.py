"""Where in the store a run's records lie.

What everybody reads and watches (`shared/`) lies apart from what the leader alone reads (`nodes/`),
since a store reads and watches by prefix: otherwise each node that joins would read all others.
"""

from typing import NamedTuple


class RunKeys(NamedTuple):
    """The keys of one run. No key is the beginning of another, but for node ids that are."""

    run_id: str

    @property
    def shared(self) -> str:
        """The prefix of what every node reads and watches."""
        return f"rankwise/{self.run_id}/shared/"

    @property
    def charter(self) -> str:
        """What all nodes must want alike."""
        return f"{self.shared}charter"

    @property
    def leader(self) -> str:
        """The node that leads, as `<id> on <host>`."""
        return f"{self.shared}leader"

    @property
    def round(self) -> str:
        """The present round."""
        return f"{self.shared}round"

    @property
    def inquiry(self) -> str:
        """What the leader asks all nodes about their ranks' calls."""
        return f"{self.shared}inquiry"

    @property
    def nodes(self) -> str:
        """The prefix of all node records."""
        return f"rankwise/{self.run_id}/nodes/"

    def node(self, node_id: str) -> str:
        """The record of one node."""
        return f"{self.nodes}{node_id}"

    @property
    def done_notes(self) -> str:
        """The prefix of what remains of nodes that were done."""
        return f"{self.nodes}done/"

    def done_note(self, node_id: str) -> str:
        """The record of one node as it was when it was done; it outlives the node's lease."""
        return f"{self.done_notes}{node_id}"

    @property
    def books_notes(self) -> str:
        """The prefix of what nodes tell of their ranks' calls."""
        return f"{self.nodes}books/"

    def books_note(self, node_id: str) -> str:
        """What one node tells of its ranks' calls."""
        return f"{self.books_notes}{node_id}"

    def node_id(self, key: str) -> str:
        """The node whose record, or note, lies at `key`."""
        return key.rpartition("/")[2]
