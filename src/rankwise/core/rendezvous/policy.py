"""Whether a job goes on after a failed round: what its policy says to plain facts.

Pure, and the same for a node that is alone and for many.
"""

from rankwise.base.failure import Failure, FailureCause
from rankwise.base.units import Duration
from rankwise.core.rendezvous.configuration import RestartPolicy


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
    fruitless: int,
    restarts: int,
) -> str | None:
    """Say why the policy allows no further round; None if it does.

    Args:
        policy: which failures the job survives.
        root: the failure that explains the others, if that is what ended the round.
        is_failure: whether the round costs a restart.
        fruitless: how many rounds in a row have now ended without progress.
        restarts: how many restarts the job has spent.
    """
    if is_failure and policy.restarts_max == 0:
        return ""
    if root is not None:
        final = _why_final(root, policy)
        if final is not None:
            return final
    if policy.fruitless_max is not None and fruitless >= policy.fruitless_max:
        times = "attempt" if fruitless == 1 else "attempts in a row"
        return f"not restarted: {fruitless} {times} without progress (--max-no-progress)"
    if is_failure and restarts >= policy.restarts_max:
        return (
            "the only restart is spent" if restarts == 1 else f"all {restarts} restarts are spent"
        )
    return None


def _why_final(failure: Failure, policy: RestartPolicy) -> str | None:
    if failure.cause is FailureCause.NOT_STARTED and not policy.retries_startup_errors:
        return "not restarted: what cannot be started does not start the next time either"
    if failure.error is not None and failure.error.type in policy.final_exceptions:
        return f"not restarted: after {failure.error.type} no restart helps, as --no-retry says"
    if (
        failure.error is None
        and failure.exit is not None
        and failure.exit.code in policy.final_exit_codes
    ):
        return f"not restarted: after {failure.exit} no restart helps, as --no-retry says"
    return None
