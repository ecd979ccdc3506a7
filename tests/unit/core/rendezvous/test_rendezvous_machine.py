"""One node's machine, with a keyspace that answers at once, or does not."""

import pytest
from table_of_nodes import KEYS, Table

from rankwise.base.errors import LocalProtocolError
from rankwise.base.failure import ExitStatus, Failure, FailureCause, OutcomeStatus
from rankwise.base.keys import Put, Revision, Transaction
from rankwise.base.units import SECOND, Duration, Instant
from rankwise.core.keyspace.machine import Keyspace
from rankwise.core.rendezvous.configuration import NodeOffer, RendezvousConfig, RestartPolicy
from rankwise.core.rendezvous.machine import Rendezvous
from rankwise.core.rendezvous.records import Departure, RoundPhase, encode
from rankwise.core.rendezvous.requests import Purpose
from rankwise.core.rendezvous.vocabulary import (
    AnnounceWaiting,
    Closed,
    Commit,
    DepartureRequested,
    Dissolved,
    GangEnded,
    GrantLease,
    Joined,
    LeaveSettled,
    Left,
    Order,
    ReadKeys,
    RefusalKind,
    Refused,
    RenewLease,
    Settled,
    StoreDenied,
    TransactionConflicted,
    WatchLost,
)


def test_who_waits_is_told_which_node_is_not_fit_yet() -> None:
    table = Table()
    table.add("a", two())
    table.ready("a")
    table.add("b", two())

    table.pass_time(11 * SECOND)

    told = {
        node: [each.text for each in table.told[node] if isinstance(each, AnnounceWaiting)]
        for node in ("a", "b")
    }
    present = "1 of at least 2 nodes are ready (a on host-a)"
    assert told == {
        "a": [f"for more nodes: {present}; not fit yet: b on host-b"],
        "b": ["until this node is fit for a round: its checks have not ended"],
    }


def two() -> RendezvousConfig:
    return RendezvousConfig(nodes_min=2, nodes_max=2)


def verdict_of(table: Table, node: str) -> OutcomeStatus | None:
    told = table.told[node][-1]
    return told.verdict.status if isinstance(told, Closed) else None


def running_pair() -> Table:
    table = Table()
    for node in ("a", "b"):
        table.add(node, two())
        table.ready(node)
    table.pass_time(SECOND // 10)
    assert isinstance(table.told["a"][-1], Settled)
    assert isinstance(table.told["b"][-1], Settled)
    return table


def test_two_nodes_meet_and_have_ranks_one_after_the_other() -> None:
    table = running_pair()

    worlds = [table.told[node][-1].world for node in ("a", "b")]
    assert [(world.node_rank, world.first_rank, world.size) for world in worlds] == [
        (0, 0, 4),
        (1, 2, 4),
    ]
    assert worlds[0].members == worlds[1].members == ("a", "b")
    assert {world.master_address for world in worlds} == {"a"}


def pair_of_which_one_hears_late(config: RendezvousConfig) -> Table:
    """Both are members of a round, and b has not heard of it."""
    table = Table()
    for node in ("a", "b"):
        table.add(node, config)
        table.ready(node)
        table.deaf = {"b"}
    table.pass_time(SECOND // 10)
    assert isinstance(table.told["a"][-1], Settled)
    assert table.told["b"] == []
    return table


def hears(table: Table, node: str) -> None:
    table.deaf.remove(node)
    table.publish()


def test_a_round_that_is_stopped_before_a_member_hears_of_it_waits_for_no_workers_there() -> None:
    table = pair_of_which_one_hears_late(two())
    table.tell("a", DepartureRequested(Departure.PREEMPTED, 15))

    hears(table, "b")
    table.tell("a", GangEnded(round=0, is_done=False, was_stopped=True))
    table.pass_time(SECOND // 10)

    assert [verdict_of(table, node) for node in ("a", "b")] == [OutcomeStatus.STOPPED] * 2
    assert [type(told) for told in table.told["b"]] == [Closed]


def test_a_round_that_fails_before_a_member_hears_of_it_is_followed_by_one_with_that_member() -> (
    None
):
    config = RendezvousConfig(nodes_min=2, nodes_max=2, policy=RestartPolicy(restarts_max=1))
    table = pair_of_which_one_hears_late(config)
    table.tell("a", GangEnded(round=0, is_done=False, failures=(failure(),)))

    hears(table, "b")
    table.ready("a", 1)
    table.pass_time(5 * SECOND)

    (settled,) = table.told["b"]
    assert isinstance(settled, Settled)
    assert settled.world.round == 1
    assert settled.world.restarts == 1
    assert table.told["a"][-1].world.members == settled.world.members


def failure() -> Failure:
    return Failure(
        local_rank=0, attempt=0, cause=FailureCause.EXITED, at=Instant(5), exit=ExitStatus(code=1)
    )


def test_only_one_node_leads() -> None:
    table = running_pair()

    assert [node.is_leading for node in table.nodes.values()] == [True, False]


def test_an_answer_that_comes_twice_changes_nothing() -> None:
    table = Table()
    machine = Rendezvous("run", two(), NodeOffer(node_id="a", host="h", address="a", slots=1))
    grant, *_ = machine.handle(Joined(), table.now)
    assert isinstance(grant, GrantLease)
    granted = table.answer(grant)

    machine.handle(granted, table.now)

    assert machine.handle(granted, table.now) == []


def test_a_node_joins_once() -> None:
    table = Table()
    table.add("a", two())

    with pytest.raises(LocalProtocolError, match="joined twice"):
        table.tell("a", Joined())


def test_a_write_that_is_lost_is_read_before_it_is_written_again() -> None:
    table = running_pair()
    lost: list[Order] = []

    def loses_one(order: Order) -> bool:
        is_lost = isinstance(order, Commit) and not lost
        lost.extend([order] if is_lost else [])
        return not is_lost

    table.is_reached = loses_one
    table.tell("b", GangEnded(round=0, is_done=True))
    table.orders.clear()
    table.pass_time(SECOND)

    assert kinds_asked(table) == [ReadKeys, Commit]
    assert table.record("b").is_done


def test_a_write_that_took_place_is_not_repeated_though_its_answer_was_lost() -> None:
    table = running_pair()
    loses_answers_to_writes_of(table, "b")

    table.tell("b", GangEnded(round=0, is_done=True))
    table.orders.clear()
    table.pass_time(2 * SECOND)

    assert kinds_asked(table) == [ReadKeys]
    assert table.record("b").is_done


def test_a_node_that_hears_no_answer_to_what_it_writes_takes_part_all_the_same() -> None:
    table = Table()
    loses_answers_to_writes_of(table, "b")
    for node in ("a", "b"):
        table.add(node, two())
        table.ready(node)

    table.pass_time(5 * SECOND)

    assert isinstance(table.told["a"][-1], Settled)
    assert isinstance(table.told["b"][-1], Settled)


def test_what_is_found_is_no_late_write_as_long_as_that_may_still_take_place() -> None:
    table = running_pair()
    own = table.nodes["b"]._node.own
    late: list[Order] = []
    for step in (5, None):  # the second writes what lies there
        own.rewrite(arrived_at=step)
        own.revision = table.keyspace.read(KEYS.node("b")).entries[0].revision
        assert own.lease is not None
        late += own.write(own.lease, None, table.now)
        own._requests.forget(Purpose.OWN)

    own.learn(table.keyspace.read(KEYS.node("b")), lambda _lease: True)
    table.answer(late[0])

    assert not own.is_written
    assert table.record("b").arrived_at == 5


def kinds_asked(table: Table) -> list[type[Order]]:
    return [type(order) for order in table.orders if not isinstance(order, RenewLease)]


def loses_answers_to_writes_of(table: Table, node: str) -> None:
    """What the node writes to its record takes place, and it never hears of that."""

    def is_answered(order: Order) -> bool:
        puts = order.transaction.puts if isinstance(order, Commit) else ()
        if not any(put.key == KEYS.node(node) for put in puts):
            return True
        table.answer(order)
        table.publish()
        return False

    table.is_reached = is_answered


def test_a_node_that_is_cut_off_gives_up_by_its_own_clock_before_the_store_does() -> None:
    table = running_pair()
    table.is_reached = lambda _order: False

    table.pass_time(5 * SECOND)

    dissolved = [told for told in table.told["b"] if isinstance(told, Dissolved)]
    assert [(each.at_once, each.round) for each in dissolved] == [(True, 0)]
    assert "cut off from the store" in dissolved[0].why


def test_a_node_that_was_cut_off_says_so_and_takes_part_again() -> None:
    table = running_pair()
    table.is_reached = lambda _order: False
    table.pass_time(6 * SECOND)
    table.is_reached = lambda _order: True
    for node in ("a", "b"):
        table.tell(node, GangEnded(round=0, is_done=False))
        table.ready(node, 1)

    table.pass_time(10 * SECOND)

    assert table.record("b").cut_off == 0
    assert isinstance(table.told["b"][-1], Settled)
    assert table.told["b"][-1].world.round == 1


def test_renewing_is_tried_again_without_waiting_for_an_answer() -> None:
    table = Table()
    machine = table.add("a", RendezvousConfig(nodes_min=1, nodes_max=1))
    at = [Instant(0)]
    while (deadline := machine.next_deadline) is not None and deadline < 4 * SECOND:
        effects = machine.tick(deadline)
        at += [deadline for effect in effects if isinstance(effect, RenewLease)]

    assert len(at) > 4


def test_a_node_that_is_done_says_on_whom_it_waits_and_says_so_less_and_less_often() -> None:
    table = running_pair()
    leader, other = sorted(table.nodes, key=lambda node: not table.nodes[node].is_leading)
    table.tell(leader, GangEnded(round=0, is_done=True))

    table.pass_time(100 * SECOND)

    told = [each for each in table.told[leader] if isinstance(each, AnnounceWaiting)]
    assert {each.text for each in told} == {
        f"until the workers of {other} on host-{other} have ended"
    }
    assert [each.waited // SECOND for each in told] == [10, 20, 40, 80]
    assert not any(isinstance(each, AnnounceWaiting) for each in table.told[other])


def test_a_leader_whose_round_is_not_taken_says_so_while_its_workers_run() -> None:
    table = running_pair()
    leader, other = sorted(table.nodes, key=lambda node: not table.nodes[node].is_leading)
    table.is_reached = lambda order: (
        not (isinstance(order, Commit) and order.transaction.puts[0].key == KEYS.round)
    )

    table.tell(other, DepartureRequested(Departure.LEAVES))
    table.pass_time(25 * SECOND)

    told = [each for each in table.told[leader] if isinstance(each, AnnounceWaiting)]
    assert {each.text for each in told} == {
        "for the store, which does not take the next round: nobody answers"
    }


def test_a_watch_that_the_store_refuses_ends_the_nodes_part() -> None:
    table = running_pair()
    (token,) = [token for node, token in table.watches if node == "b"][:1]

    table.tell("b", StoreDenied(token, "the user may not watch", "grant it"))

    refused = table.told["b"][-1]
    assert isinstance(refused, Refused)
    assert (refused.kind, refused.why) == (RefusalKind.STORE, "the user may not watch")


def test_a_lead_that_nobody_keeps_alive_is_taken() -> None:
    table = running_pair()

    table.keyspace.commit(Transaction(puts=(Put(KEYS.leader, b"somebody"),)))
    table.publish()
    table.pass_time(SECOND)

    assert [node for node in ("a", "b") if table.nodes[node].is_leading]


def test_a_node_tells_until_when_it_is_believed_to_live() -> None:
    table = running_pair()
    machine = table.nodes["b"]
    registered = machine.alive_until
    table.pass_time(3 * SECOND)
    renewed = machine.alive_until

    table.is_reached = lambda _order: False
    table.pass_time(6 * SECOND)

    assert registered is not None
    assert renewed is not None
    assert registered < renewed <= 8 * SECOND
    assert machine.alive_until is None


def test_a_watch_that_is_lost_while_the_shared_keys_are_read_is_begun_anew() -> None:
    table = Table()
    machine = Rendezvous("run", two(), NodeOffer(node_id="a", host="h", address="a", slots=1))
    grant, read = machine.handle(Joined(), table.now)
    assert isinstance(grant, GrantLease)
    assert isinstance(read, ReadKeys)
    assert read.watch is not None
    machine.handle(table.answer(grant), table.now)
    (found,) = machine.handle(table.answer(read), table.now)
    assert isinstance(found, Commit)
    conflict = TransactionConflicted(found.token, Revision(1))
    (again,) = machine.handle(conflict, table.now)
    assert isinstance(again, ReadKeys)
    assert again.watch is None

    machine.handle(WatchLost(read.watch, "compacted"), table.now)
    effects = machine.handle(table.answer(again), table.now)

    assert any(isinstance(each, ReadKeys) and each.watch is not None for each in effects)


def test_other_options_are_refused_and_named() -> None:
    table = running_pair()

    table.add(
        "c",
        RendezvousConfig(nodes_min=1, nodes_max=3, settings={"backend": "x", "program": "a ''"}),
    )

    refused = table.told["c"][-1]
    assert isinstance(refused, Refused)
    assert refused.kind is RefusalKind.CHARTER
    assert refused.why.endswith(
        "nodes_min 2 (here: 1), nodes_max 2 (here: 3), backend none (here: 'x'), "
        """program none (here: "a ''")"""
    )


def test_an_id_that_another_node_has_is_refused() -> None:
    table = running_pair()
    table.keyspace.commit(Transaction(puts=(Put(KEYS.node("c"), encode(table.record("a"))),)))

    table.add("c", two())
    table.ready("c")

    refused = table.told["c"][-1]
    assert isinstance(refused, Refused)
    assert refused.kind is RefusalKind.IDENTITY


def test_a_store_that_has_forgotten_the_run_ends_it() -> None:
    table = running_pair()
    table.keyspace = Keyspace()
    lost = [(node, token) for node, token in table.watches]
    table.watches.clear()

    for node, token in lost:
        table.tell(node, WatchLost(token, "started anew"))

    for node in ("a", "b"):
        refused = table.told[node][-1]
        assert isinstance(refused, Refused)
        assert refused.kind is RefusalKind.FORGOTTEN


def test_a_corrupt_round_is_told_with_its_key() -> None:
    table = running_pair()

    table.keyspace.commit(Transaction(puts=(Put(KEYS.round, b"{"),)))
    table.publish()

    refused = table.told["b"][-1]
    assert isinstance(refused, Refused)
    assert KEYS.round in refused.why


def test_who_leaves_is_gone_at_once() -> None:
    table = running_pair()
    table.tell("b", GangEnded(round=0, is_done=False))

    table.tell("b", Left())

    assert isinstance(table.told["b"][-1], LeaveSettled)
    assert table.keyspace.read(KEYS.node("b")).entries == ()
    assert any(isinstance(told, Dissolved) for told in table.told["a"])


def test_a_leader_that_is_done_may_leave_while_the_others_work_on() -> None:
    table = running_pair()
    table.tell("a", GangEnded(round=0, is_done=True))
    table.tell("a", Left())
    table.pass_time(3600 * SECOND)

    table.tell("b", GangEnded(round=0, is_done=True))
    table.pass_time(SECOND)

    assert verdict_of(table, "b") is OutcomeStatus.SUCCEEDED
    assert not any(isinstance(told, Dissolved) for told in table.told["b"])


def test_a_leader_may_say_in_one_breath_that_it_is_done_and_goes() -> None:
    table = running_pair()
    table.is_reached = lambda order: not isinstance(order, Commit)
    table.tell("a", GangEnded(round=0, is_done=True))
    table.is_reached = lambda _order: True
    table.tell("a", Left())
    table.tell("b", GangEnded(round=0, is_done=True))

    table.pass_time(SECOND)

    assert verdict_of(table, "b") is OutcomeStatus.SUCCEEDED


def test_a_leader_that_is_done_may_die_while_the_others_work_on() -> None:
    table = running_pair()
    table.tell("a", GangEnded(round=0, is_done=True))
    table.kill("a")
    table.pass_time(3600 * SECOND)

    table.tell("b", GangEnded(round=0, is_done=True))
    table.pass_time(SECOND)

    assert verdict_of(table, "b") is OutcomeStatus.SUCCEEDED
    assert not any(isinstance(told, Dissolved) for told in table.told["b"])


def test_who_was_done_in_an_earlier_round_is_lost_in_a_later_one() -> None:
    table = running_pair()
    table.tell("a", GangEnded(round=0, is_done=True))
    table.tell("b", GangEnded(round=0, is_done=False))
    for node in ("a", "b"):
        table.ready(node, 1)
    table.pass_time(SECOND)
    assert table.nodes["b"].round is not None
    assert (table.nodes["b"].round.number, table.nodes["b"].round.phase) == (1, RoundPhase.RUNNING)

    table.kill("a")
    table.pass_time(20 * SECOND)

    dissolved = [told for told in table.told["b"] if isinstance(told, Dissolved)]
    assert [each.round for each in dissolved] == [1]


def test_a_run_that_is_over_leaves_no_notes_of_who_was_done() -> None:
    table = running_pair()
    for node in ("a", "b"):
        table.tell(node, GangEnded(round=0, is_done=True))
    table.pass_time(SECOND)
    noted = [entry.key for entry in table.keyspace.read(KEYS.nodes).entries]

    for node in ("a", "b"):
        table.tell(node, Left())

    assert sorted(noted) == sorted(
        key for node in ("a", "b") for key in (KEYS.node(node), KEYS.done_note(node))
    )
    assert table.keyspace.read(KEYS.nodes).entries == ()


def test_a_node_that_reaches_no_store_gives_up_in_time() -> None:
    table = Table()
    table.is_reached = lambda _order: False
    table.add("a", RendezvousConfig(nodes_min=1, nodes_max=1, join_timeout=Duration(9 * SECOND)))

    table.pass_time(9 * SECOND)

    refused = table.told["a"][-1]
    assert isinstance(refused, Refused)
    assert refused.kind is RefusalKind.TIMEOUT
    assert "nobody answers" in refused.why
