"""Where one node's workers stand in the whole job: what a round of the nodes has agreed upon."""

import msgspec


class NodeRanks(msgspec.Struct, frozen=True, kw_only=True):
    """One node's place among all workers, for one attempt.

    Attributes:
        node_rank, node_count: this node among the nodes; GROUP_RANK and GROUP_WORLD_SIZE.
        first_rank: the global rank of this node's local rank 0; the others follow.
        size: the number of workers on all nodes; WORLD_SIZE.
        master_addr, master_port: where rank 0 listens.
        restarts: how many failures of the job have been followed by a new start;
            TORCHELASTIC_RESTART_COUNT. None means: as many as the attempt's number.
        collectives_key: what only the ranks of this round know, in hexadecimal digits; empty on
            one node, whose ranks share memory.
    """

    node_rank: int = 0
    node_count: int = 1
    first_rank: int = 0
    size: int
    master_addr: str
    master_port: int
    restarts: int | None = None
    collectives_key: str = ""

    def rank(self, local_rank: int) -> int:
        """The global rank of one of this node's workers."""
        return self.first_rank + local_rank

    def local_rank(self, rank: int) -> int:
        """Which of this node's workers a global rank is."""
        return rank - self.first_rank
