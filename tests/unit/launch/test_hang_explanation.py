"""What explains a hang is compared by its values, and told by its sentence."""

from rankwise.base.failure import BlameIdentity
from rankwise.launch.looking.hang_explanation import HangExplanation, NodesAnswer, best_of

OF_RANK_1 = HangExplanation("rank 1 is late", BlameIdentity((1,)))


def test_one_sentence_about_two_ranks_is_no_agreement() -> None:
    assert not OF_RANK_1.agrees_with(HangExplanation("rank 1 is late", BlameIdentity((2,))))


def test_two_sentences_about_one_blame_agree() -> None:
    assert OF_RANK_1.agrees_with(HangExplanation("rank 1 has not come", BlameIdentity((1,))))


def test_ranks_that_poll_or_are_stopped_make_another_explanation() -> None:
    for other in (
        HangExplanation(polling=(1,)), HangExplanation(asleep=(1,)), HangExplanation(stopped=(1,)),
    ):  # fmt: skip
        assert not HangExplanation().agrees_with(other)


def test_nodes_that_explain_nothing_leave_it_to_this_one() -> None:
    assert best_of(OF_RANK_1, None) is OF_RANK_1
    assert best_of(OF_RANK_1, NodesAnswer(HangExplanation(), ("b",))) is OF_RANK_1
    assert best_of(HangExplanation(), NodesAnswer(OF_RANK_1, ("b",))) is OF_RANK_1
