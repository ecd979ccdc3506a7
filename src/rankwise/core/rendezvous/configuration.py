"""What a rendezvous is told once, before it begins: who may join, how long, what a node offers.

Whether a job goes on after a failed round is what its policy says to plain facts. That is pure, and
the same for a node that is alone and for many.
"""

import msgspec

from rankwise.base.backoff import Backoff
from rankwise.base.failure import Failure, FailureCause
from rankwise.base.units import MILLISECOND, SECOND, Duration
from rankwise.core.rendezvous.records import Charter


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which failures a job survives. Changes of membership are no failures and cost nothing.

    Attributes:
        restarts_max: how many failures of the whole job are followed by another round.
        backoff: the pauses before restarts.
        final_exceptions: exceptions after which no restart helps, by qualified name as Python
            writes it (`ValueError`, `mypackage.ConfigError`).
        final_exit_codes: the same by exit code; minus the number for a signal.
        retries_startup_errors: whether workers that could not even be started are tried again.
        rounds_without_progress_max: after so many failed rounds in a row without progress the job
            is over; None for never. Progress is a step farther than any before; where no worker
            tells its steps, a round that ran for `progress_after` counts as progress.
        progress_after: see there.
        strikes_max: a host on which so many root causes happened is left out, provided that enough
            nodes remain without it; None for never.
    """

    restarts_max: int = 0
    backoff: Backoff = Backoff()
    final_exceptions: tuple[str, ...] = ()
    final_exit_codes: tuple[int, ...] = ()
    retries_startup_errors: bool = False
    rounds_without_progress_max: int | None = msgspec.field(default=None, name="fruitless_max")
    progress_after: Duration = Duration(300 * SECOND)
    strikes_max: int | None = None

    def __post_init__(self) -> None:
        if self.restarts_max < 0:
            raise ValueError(f"restarts_max is {self.restarts_max}, expected 0 or more")
        for name in ("rounds_without_progress_max", "strikes_max"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, expected 1 or more")
        if self.progress_after < 0:
            raise ValueError(f"progress_after is {self.progress_after} ns, expected 0 or more")


class RendezvousConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which nodes may join a round, and for how long they wait.

    Attributes:
        nodes_min, nodes_max: how few nodes may run, and how many at most.
        spares: how many nodes to keep in reserve rather than run, when more than `nodes_min` come.
        is_static: each node has a fixed rank; the round begins when all `nodes_max` are present.
        policy: which failures the job survives.
        settings: what else must be equal on all nodes, by name, such as the program that is run.
        last_call: how long the leader waits for more nodes once `nodes_min` are ready.
        last_call_min: the first round begins earlier if no newcomer has come for so long and all
            who are here are ready; later rounds do not wait for newcomers, who may come any time.
        rejoin_timeout: how long the next round waits for members of the last one that are here and
            are getting ready again.
        settle_delay: how long a newcomer to a running job waits for others, before all begin
            again in a larger round; and how long a spare leaves its place to a member of the last
            round that is here and is getting ready again.
        join_timeout: how long a round may take to gather `nodes_min` nodes.
        close_timeout: how long a node that is done waits for a verdict that does not come.
        lease_ttl: how long a silent node is believed to live.
        fence: how long after a node was lost its workers may still be alive. It kills them when its
            lease must have ended by its own clock; no other node gets its ranks before.
        request_timeout: after which a request to the store has failed.
        retry_pause: before it is repeated.
        announce_every: how often people are told on whom is being waited, while that changes.
        replaces_ended: whether this node, if it comes when the run of that id is over, begins
            another instead of being told how it ended (`founding.py`).
        ends_with_store: whether the store lives in an agent of the run, so that a node which has
            taken part and gets nothing from it for a lease can only end.
        run_ttl: how long the store remembers a run without a leader; None for ever.
    """

    nodes_min: int
    nodes_max: int
    spares: int = 0
    is_static: bool = False
    policy: RestartPolicy = RestartPolicy()
    settings: dict[str, str] = {}
    last_call: Duration = Duration(30 * SECOND)
    last_call_min: Duration = Duration(3 * SECOND)
    rejoin_timeout: Duration = Duration(60 * SECOND)
    settle_delay: Duration = Duration(3 * SECOND)
    join_timeout: Duration = Duration(600 * SECOND)
    close_timeout: Duration = Duration(30 * SECOND)
    lease_ttl: Duration = Duration(5 * SECOND)
    fence: Duration = Duration(1 * SECOND)
    request_timeout: Duration = Duration(2 * SECOND)
    retry_pause: Duration = Duration(500 * MILLISECOND)
    announce_every: Duration = Duration(10 * SECOND)
    replaces_ended: bool = False
    ends_with_store: bool = False
    run_ttl: Duration | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.nodes_min <= self.nodes_max:
            raise ValueError(
                f"nodes are {self.nodes_min}:{self.nodes_max}, expected 1 <= min <= max"
            )
        if self.spares < 0:
            raise ValueError(f"spares is {self.spares}, expected 0 or more")
        if self.is_static and (self.spares or self.nodes_min != self.nodes_max):
            raise ValueError("a static rendezvous has a fixed number of nodes and no spares")
        for name in (
            "last_call", "last_call_min", "rejoin_timeout", "settle_delay", "fence", "retry_pause",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)} ns, expected 0 or more")
        for name in (
            "join_timeout", "close_timeout", "lease_ttl", "request_timeout", "announce_every",
        ):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)} ns, expected more than 0")

        if 2 * self.request_timeout > self.lease_ttl:
            raise ValueError(
                f"request_timeout is {self.request_timeout} ns and lease_ttl {self.lease_ttl} ns, "
                "expected a lease of two timeouts at least, so that one lost renewal costs nothing"
            )
        if self.run_ttl is not None and self.run_ttl <= 0:
            raise ValueError(f"run_ttl is {self.run_ttl} ns, expected more than 0")

    @property
    def charter(self) -> Charter:
        """What this node wants, and all others must want too."""
        return Charter(
            nodes_min=self.nodes_min,
            nodes_max=self.nodes_max,
            spares=self.spares,
            restarts_max=self.policy.restarts_max,
            is_static=self.is_static,
            settings=self.settings,
        )


class NodeOffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a node brings along.

    Attributes:
        node_id: names this life of the agent; short, since the round lists all of them, and made
            anew by every agent. Letters, digits and `-_.`, at most 16.
        host, address, slots, topology, static_rank: see `NodeRecord`.
    """

    node_id: str
    host: str
    address: str
    slots: int
    topology: str = ""
    static_rank: int | None = msgspec.field(default=None, name="seat")

    def __post_init__(self) -> None:
        plain = self.node_id.replace("-", "").replace("_", "").replace(".", "")
        if not 1 <= len(self.node_id) <= 16 or not (plain.isalnum() and plain.isascii()):
            raise ValueError(
                f"node_id is {self.node_id!r}, expected 1 to 16 letters, digits and -_."
            )
        if self.slots < 1:
            raise ValueError(f"slots is {self.slots}, expected at least one worker")
        if self.static_rank is not None and self.static_rank < 0:
            raise ValueError(f"static_rank is {self.static_rank}, expected 0 or more")


def has_progressed(
    policy: RestartPolicy, steps: list[int], best_step: int | None, ran: Duration
) -> bool:
    """Whether a round got farther than all before it.

    Args:
        policy: says how long a round must run, where no worker tells its steps.
        steps: the last step of each node that told one.
        best_step: the farthest step of the rounds before.
        ran: how long the round lasted.
    """
    if steps or best_step is not None:
        return bool(steps) and (best_step is None or max(steps) > best_step)
    return ran >= policy.progress_after


def obstacle_to_another(
    policy: RestartPolicy,
    *,
    root: Failure | None,
    is_failure: bool,
    rounds_without_progress: int,
    restarts: int,
) -> str | None:
    """Say why the policy allows no further round; None if it does.

    Args:
        policy: which failures the job survives.
        root: the failure that explains the others, if that is what ended the round.
        is_failure: whether the round costs a restart.
        rounds_without_progress: how many rounds in a row have now ended without progress.
        restarts: how many restarts the job has spent.
    """
    if is_failure and policy.restarts_max == 0:
        return ""
    if root is not None:
        final = _why_final(root, policy)
        if final is not None:
            return final
    rounds_max = policy.rounds_without_progress_max
    if rounds_max is not None and rounds_without_progress >= rounds_max:
        times = "attempt" if rounds_without_progress == 1 else "attempts in a row"
        return (
            f"not restarted: {rounds_without_progress} {times} without progress (--max-no-progress)"
        )
    if is_failure and restarts >= policy.restarts_max:
        return "the only restart is used" if restarts == 1 else f"all {restarts} restarts are used"
    return None


def _why_final(failure: Failure, policy: RestartPolicy) -> str | None:
    if failure.cause is FailureCause.NOT_STARTED and not policy.retries_startup_errors:
        return "not restarted: a worker could not be started (--retry-startup-errors)"
    if failure.error is not None and failure.error.type in policy.final_exceptions:
        return f"not restarted: --no-retry names {failure.error.type}"
    if (
        failure.error is None
        and failure.exit is not None
        and failure.exit.code in policy.final_exit_codes
    ):
        return f"not restarted: --no-retry names {failure.exit}"
    return None
