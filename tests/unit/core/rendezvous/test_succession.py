"""One run after another under one id: who begins it, who is told of the first one's end."""

import msgspec
from table_of_nodes import KEYS, Table

from rankwise.base.failure import OutcomeStatus
from rankwise.base.keys import Put, Revision, Transaction
from rankwise.base.units import SECOND, Duration
from rankwise.core.rendezvous.configuration import RendezvousConfig
from rankwise.core.rendezvous.records import (
    Charter,
    Round,
    RoundPhase,
    decode_charter,
    decode_round,
    encode,
)
from rankwise.core.rendezvous.vocabulary import (
    AnnounceWaiting,
    Closed,
    Commit,
    GangEnded,
    GrantLease,
    KeysChanged,
    LeaveSettled,
    Left,
    RefusalKind,
    Refused,
    RenewLease,
    Settled,
    WatchLost,
)

HOUR = 3600 * SECOND
ONE = RendezvousConfig(nodes_min=1, nodes_max=1, replaces_ended=True)
TWO = RendezvousConfig(nodes_min=2, nodes_max=2, replaces_ended=True)


def finish(table: Table, *nodes: str) -> None:
    """Let the run of these nodes succeed, and let all of them leave."""
    number = table.nodes[nodes[0]].round.number
    for node in nodes:
        table.tell(node, GangEnded(round=number, is_done=True))
    table.pass_time(SECOND)
    for node in nodes:
        table.tell(node, Left())
        assert table.told[node][-1] == LeaveSettled(), table.told[node]
        del table.nodes[node]


def play(table: Table, config: RendezvousConfig, *nodes: str) -> None:
    """A run of these nodes, from its beginning to its end."""
    for node in nodes:
        table.add(node, config)
        table.ready(node)
    table.pass_time(4 * SECOND)
    finish(table, *nodes)


def verdicts(table: Table, node: str) -> list[OutcomeStatus]:
    return [each.verdict.status for each in table.told[node] if isinstance(each, Closed)]


def refusals(table: Table, node: str) -> list[RefusalKind]:
    return [each.kind for each in table.told[node] if isinstance(each, Refused)]


def worlds(table: Table, node: str) -> list[tuple[int, int, tuple[str, ...]]]:
    return [
        (each.world.round, each.world.node_rank, each.world.members)
        for each in table.told[node]
        if isinstance(each, Settled)
    ]


def charter(table: Table) -> Charter:
    (entry,) = table.keyspace.read(KEYS.charter).entries
    return decode_charter(entry.value, entry.key)


def round_of(table: Table) -> Round:
    (entry,) = table.keyspace.read(KEYS.round).entries
    return decode_round(entry.value, entry.key)


def keys(table: Table) -> list[str]:
    return [entry.key for entry in table.keyspace.read("").entries]


def test_a_run_that_is_over_is_followed_by_another_of_the_same_id() -> None:
    table = Table()
    play(table, ONE, "a")

    play(table, ONE, "b")

    assert worlds(table, "b") == [(0, 0, ("b",))]
    assert verdicts(table, "b") == [OutcomeStatus.SUCCEEDED]
    assert charter(table).founder == "b"


def test_of_many_newcomers_one_founds_the_run_and_the_others_join_it() -> None:
    table = Table()
    play(table, TWO, "a", "b")

    table.add("c", TWO)
    table.add("d", TWO)
    table.ready("c")
    table.ready("d")
    table.pass_time(SECOND)

    assert {worlds(table, node)[0][2] for node in ("c", "d")} == {("c", "d")}
    assert [worlds(table, node)[0][1] for node in ("c", "d")] == [0, 1]


def test_a_run_that_is_over_may_be_followed_by_one_with_other_options() -> None:
    table = Table()
    play(table, TWO, "a", "b")

    play(table, ONE, "c")

    assert verdicts(table, "c") == [OutcomeStatus.SUCCEEDED]


def test_a_newcomer_is_told_the_end_where_an_id_serves_once() -> None:
    table = Table()
    once = msgspec.structs.replace(ONE, replaces_ended=False)
    play(table, once, "a")

    table.add("b", once)
    table.ready("b")

    assert verdicts(table, "b") == [OutcomeStatus.SUCCEEDED]
    assert worlds(table, "b") == []
    assert charter(table).founder == "a"


def test_who_took_part_learns_the_end_though_another_run_has_begun_meanwhile() -> None:
    table = Table()
    config = msgspec.structs.replace(ONE, nodes_max=2)
    table.add("a", config)
    table.ready("a")
    table.pass_time(4 * SECOND)
    table.add("slow", config)  # is told of all changes at once, later
    watch = next(each for each in table.watches if each[0] == "slow")
    prefix, revision = table.watches.pop(watch)
    finish(table, "a")
    table.add("b", config)
    table.pass_time(SECOND)
    assert charter(table).founder == "b"

    changes = table.keyspace.changes_after(Revision(revision), prefix)
    table.tell("slow", KeysChanged(watch[1], changes))

    assert verdicts(table, "slow") == [OutcomeStatus.SUCCEEDED]
    assert refusals(table, "slow") == []


def test_who_took_part_and_has_to_read_anew_is_told_that_the_run_is_over() -> None:
    table = Table()
    config = msgspec.structs.replace(ONE, nodes_max=2)
    table.add("a", config)
    table.ready("a")
    table.pass_time(4 * SECOND)
    suspended = table.add("late", config)
    (watch,) = [token for node, token in table.watches if node == "late"]
    table.kill("late")
    finish(table, "a")
    table.add("b", config)
    table.ready("b")
    table.pass_time(10 * SECOND)

    table.nodes["late"] = suspended
    table.tell("late", WatchLost(watch, "the store has forgotten what it would have told"))
    table.pass_time(10 * SECOND)

    (told,) = [each for each in table.told["late"] if isinstance(each, Closed | Refused)]
    assert isinstance(told, Refused)
    assert told.why.endswith("is over, and another run has started under that id")
    assert worlds(table, "late") == []
    assert worlds(table, "b") == [(0, 0, ("b",))]


def test_two_nodes_that_replace_a_run_at_once_do_not_begin_two() -> None:
    table = Table()
    play(table, TWO, "a", "b")
    held: list[Commit] = []

    def hold_the_founding(order: object) -> bool:
        if isinstance(order, Commit) and any(
            put.key == KEYS.charter for put in order.transaction.puts
        ):
            held.append(order)
            return len(held) > 1  # the first one never comes through
        return True

    table.is_reached = hold_the_founding
    table.add("c", TWO)
    table.add("d", TWO)
    table.ready("c")
    table.ready("d")
    table.pass_time(5 * SECOND)

    assert len({worlds(table, node)[0][2] for node in ("c", "d")}) == 1
    assert charter(table).founder == "d"


def test_a_run_whose_nodes_are_all_dead_is_gone_on_with_by_who_wants_the_same() -> None:
    table = Table()
    table.add("a", ONE)
    table.ready("a")
    table.pass_time(4 * SECOND)
    table.kill("a")

    table.add("b", ONE)
    table.ready("b")
    table.pass_time(10 * SECOND)

    assert worlds(table, "b") == [(1, 0, ("b",))]
    assert charter(table).founder == "a"


def test_a_run_whose_nodes_are_all_dead_gives_way_to_who_wants_something_else() -> None:
    table = Table()
    table.add("a", TWO)
    table.ready("a")
    table.kill("a")
    table.pass_time(6 * SECOND)  # its lease has ended

    table.add("b", ONE)
    table.ready("b")
    table.pass_time(5 * SECOND)
    early = worlds(table, "b")
    table.pass_time(5 * SECOND)

    assert early == []
    assert worlds(table, "b") == [(0, 0, ("b",))]
    assert refusals(table, "b") == []
    assert charter(table).founder == "b"


def test_a_run_that_somebody_leads_refuses_who_wants_something_else() -> None:
    table = Table()
    table.add("a", TWO)
    table.ready("a")

    table.add("b", ONE)

    assert refusals(table, "b") == [RefusalKind.CHARTER]


def test_a_run_that_is_led_again_refuses_who_has_waited_for_its_end() -> None:
    table = Table()
    table.add("a", TWO)
    table.ready("a")
    table.kill("a")
    table.pass_time(6 * SECOND)
    table.add("other", ONE)
    assert refusals(table, "other") == []

    table.add("b", TWO)
    table.pass_time(SECOND)

    assert refusals(table, "other") == [RefusalKind.CHARTER]
    assert charter(table).founder == "a"


def test_on_whom_a_newcomer_waits_is_told() -> None:
    table = Table()
    config = msgspec.structs.replace(ONE, lease_ttl=Duration(60 * SECOND))
    table.add("a", msgspec.structs.replace(TWO, lease_ttl=Duration(60 * SECOND)))
    table.ready("a")
    table.tell("a", Left())
    del table.nodes["a"]

    table.add("b", config)
    table.pass_time(11 * SECOND)

    (told,) = [each for each in table.told["b"] if isinstance(each, AnnounceWaiting)]
    assert told.text.startswith(
        "to see whether a leader exists, since the run run was started by other nodes"
    )
    assert "nodes_min 2 (here: 1)" in told.text


def test_what_is_left_of_a_run_vanishes_when_nobody_leads_it() -> None:
    table = Table()
    config = msgspec.structs.replace(ONE, run_ttl=Duration(2 * HOUR))
    play(table, config, "a")
    assert keys(table) == [KEYS.charter, KEYS.round]
    assert round_of(table).phase is RoundPhase.CLOSED

    table.pass_time(2 * HOUR + SECOND)

    assert keys(table) == []


def test_a_run_that_goes_on_is_not_forgotten() -> None:
    table = Table()
    config = msgspec.structs.replace(ONE, run_ttl=Duration(2 * HOUR))
    table.add("a", config)
    table.ready("a")

    table.pass_time(9 * HOUR)

    assert KEYS.charter in keys(table)
    finish(table, "a")
    assert verdicts(table, "a") == [OutcomeStatus.SUCCEEDED]


def test_another_leader_goes_on_remembering_the_run() -> None:
    table = Table()
    config = msgspec.structs.replace(TWO, nodes_min=1, run_ttl=Duration(2 * HOUR))
    table.add("a", config)
    table.add("b", config)
    table.ready("a")
    table.ready("b")
    table.pass_time(HOUR)
    table.kill("a")
    table.pass_time(HOUR)
    table.ready("b", 1)

    table.pass_time(9 * HOUR)

    assert table.nodes["b"].is_leading
    assert worlds(table, "b")[-1] == (1, 0, ("b",))


def test_a_run_that_follows_another_long_after_is_not_forgotten_with_it() -> None:
    table = Table()
    config = msgspec.structs.replace(ONE, run_ttl=Duration(2 * HOUR))
    play(table, config, "a")
    table.pass_time(2 * HOUR - 60 * SECOND)  # so much is left of the lease that "b" takes over

    table.add("b", config)
    table.ready("b")
    table.pass_time(9 * HOUR)

    assert charter(table).founder == "b"
    assert round_of(table).phase is RoundPhase.RUNNING


def test_a_run_that_nobody_leads_for_long_is_not_forgotten_while_it_goes_on() -> None:
    table = Table()
    config = msgspec.structs.replace(ONE, run_ttl=Duration(2 * HOUR))

    for number in range(12):
        table.add(f"n{number}", config)
        table.ready(f"n{number}")
        table.pass_time(HOUR // 4)
        table.kill(f"n{number}")

    assert charter(table).founder == "n0"
    assert round_of(table).number == 11


def test_a_renewal_that_failed_is_made_again_soon() -> None:
    table = Table()
    config = msgspec.structs.replace(ONE, run_ttl=Duration(2 * HOUR))
    table.add("a", config)
    table.ready("a")
    table.pass_time(SECOND)
    (entry,) = table.keyspace.read(KEYS.charter).entries
    renewals: list[int] = []

    def lose_the_first(order: object) -> bool:
        if isinstance(order, RenewLease) and order.lease == entry.lease:
            renewals.append(table.now)
            return len(renewals) > 1
        return True

    table.is_reached = lose_the_first
    table.pass_time(HOUR)

    assert len(renewals) == 3
    assert renewals[1] - renewals[0] == config.retry_pause


def test_a_round_that_was_written_before_the_store_gave_a_lease_is_bound_to_it_later() -> None:
    table = Table()
    config = msgspec.structs.replace(ONE, run_ttl=Duration(2 * HOUR))
    lost: list[GrantLease] = []

    def lose_the_first(order: object) -> bool:
        if isinstance(order, GrantLease) and order.ttl == config.run_ttl:
            lost.append(order)
            return len(lost) > 1
        return True

    table.is_reached = lose_the_first
    table.add("a", config)
    table.ready("a")
    table.pass_time(SECOND // 10)
    written = round_of(table)
    unbound = [entry.lease for entry in table.keyspace.read(KEYS.round).entries]
    table.pass_time(8 * SECOND)
    bound = {entry.lease for entry in table.keyspace.read(KEYS.shared).entries[::2]}
    table.kill("a")
    table.pass_time(2 * HOUR + 10 * SECOND)

    assert written.phase is RoundPhase.RUNNING
    assert unbound == [None]
    assert len(bound) == 1
    assert None not in bound
    assert worlds(table, "a") == [(0, 0, ("a",))]
    assert keys(table) == []


def test_a_note_that_was_left_before_the_store_gave_a_lease_is_bound_to_it_later() -> None:
    table = Table()
    config = msgspec.structs.replace(TWO, run_ttl=Duration(2 * HOUR))
    table.is_reached = lambda order: (
        not (isinstance(order, GrantLease) and order.ttl == config.run_ttl)
    )
    for node in ("a", "b"):
        table.add(node, config)
        table.ready(node)
    table.pass_time(SECOND)
    table.tell("a", GangEnded(round=0, is_done=True))
    table.pass_time(SECOND)
    (unbound,) = table.keyspace.read(KEYS.done_note("a")).entries

    table.is_reached = lambda _order: True
    table.pass_time(8 * SECOND)
    (bound,) = table.keyspace.read(KEYS.done_note("a")).entries
    for node in ("a", "b"):
        table.kill(node)
    table.pass_time(2 * HOUR + 10 * SECOND)

    assert unbound.lease is None
    assert bound.lease is not None
    assert keys(table) == []


def test_who_works_in_a_run_that_gave_way_to_another_is_told_so() -> None:
    table = Table()
    table.add("a", ONE)
    table.ready("a")
    theirs = msgspec.structs.replace(charter(table), founder="z")

    table.keyspace.commit(Transaction(puts=(Put(KEYS.charter, encode(theirs)),)))
    table.publish()

    (told,) = [each for each in table.told["a"] if isinstance(each, Refused)]
    assert told.why.endswith("is over, and another run has started under that id")
    assert not table.nodes["a"].is_leading


def test_who_works_in_a_run_that_the_store_has_forgotten_does_not_found_it_anew() -> None:
    table = Table()
    table.add("a", ONE)
    table.ready("a")

    table.keyspace.commit(Transaction(deletes=(KEYS.charter, KEYS.round)))
    table.publish()
    table.pass_time(SECOND)

    assert refusals(table, "a") == [RefusalKind.FORGOTTEN]
    assert KEYS.charter not in keys(table)


def test_a_run_for_which_nobody_came_is_forgotten_too() -> None:
    table = Table()
    config = msgspec.structs.replace(TWO, run_ttl=Duration(2 * HOUR))
    table.add("a", config)
    table.ready("a")
    table.pass_time(8 * SECOND)
    table.kill("a")

    table.pass_time(2 * HOUR + 10 * SECOND)

    assert keys(table) == []


def test_many_runs_of_one_id_leave_no_more_than_one() -> None:
    table = Table()
    config = msgspec.structs.replace(ONE, run_ttl=Duration(2 * HOUR))

    for number in range(20):
        play(table, config, f"n{number}")

    assert keys(table) == [KEYS.charter, KEYS.round]
    assert charter(table).founder == "n19"
