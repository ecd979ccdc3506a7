"""What a step achieves: tokens, and the matrix products that the model asks for (MFU).

**Model flops** are those of the matrix products and of attention, forward and backward, without
what is computed a second time: products under activation checkpointing, and the scores that the
backward of attention computes again. A causal mask halves nothing, as in the formula of PaLM
(arXiv:2204.02311, appendix B), 6 N + 12 L H Q T per token, to which a plain transformer comes
exactly; N is without the embeddings, which are looked up.

**MFU** is the time of these products at the peak of the device, each at the peak of its type,
divided by the time of the step. **HFU** counts all products that are carried out.

**Tokens** are the elements of the indices that a rank looks up in one embedding, forward and with
gradients enabled; of several embeddings the one with the most counts. Of distributed indices a rank
counts its share. The tokens of a step are the sum over the ranks.
"""

from collections import Counter
from fractions import Fraction
from typing import Any, NamedTuple

from rankwise.simranks.prediction.costs import DeviceOperation


class Achieved(NamedTuple):
    """What a rank has achieved until some instant.

    Attributes:
        tokens: that it has looked up.
        model_flops, all_flops: of matrix products, without and with what is computed again.
        model_peak, all_peak: how long they take at the peak, in picoseconds.
    """

    tokens: int = 0
    model_flops: int = 0
    all_flops: int = 0
    model_peak: int = 0
    all_peak: int = 0

    def since(self, before: "Achieved") -> "Achieved":
        """What came after another one of the same rank."""
        return Achieved(*(now - then for now, then in zip(self, before, strict=True)))


class UsefulWork:
    """Counts what one rank achieves.

    Attributes:
        is_repeated: whether the operation under way was carried out before (checkpointing).
    """

    def __init__(self) -> None:
        self.is_repeated = False
        self._tokens = 0
        self._model_flops = self._all_flops = self._model_peak = self._all_peak = 0
        self._looked_up: Counter[Any] = Counter()

    def count_products(self, work: DeviceOperation, at_peak: int) -> None:
        """Count an operation of the matrix engine, which takes so long at the peak."""
        self._all_flops += work.flops
        self._all_peak += at_peak
        if self.is_repeated:
            return
        if "attention" in work.name:
            share = model_share(work)
            self._model_flops += int(work.flops * share)
            self._model_peak += int(at_peak * share)
        else:  # most are, and arithmetic of fractions is slow
            self._model_flops += work.flops
            self._model_peak += at_peak

    def count_lookups(self, embedding: Any, count: int) -> None:
        """Count indices that are looked up in an embedding."""
        if not self.is_repeated:
            self._looked_up[embedding] += count

    def end_step(self) -> None:
        """A step is over: of its embeddings, the one with the most indices tells its tokens."""
        self._tokens += max(self._looked_up.values(), default=0)
        self._looked_up.clear()

    @property
    def achieved(self) -> Achieved:
        """What there is so far."""
        tokens = self._tokens + max(self._looked_up.values(), default=0)
        return Achieved(
            tokens, self._model_flops, self._all_flops, self._model_peak, self._all_peak
        )


def model_share(work: DeviceOperation) -> Fraction:
    """The share of an operation's flops that the model asks for.

    The backward of attention has four products, one for each gradient, and computes the scores
    again: `torch.utils.flop_counter` counts all five.
    """
    if "attention" not in work.name or "backward" not in work.name:
        return Fraction(1)
    tensors = [shape for shape in work.shapes[1:4] if len(shape) > 1]
    if len(tensors) < 3:
        return Fraction(4, 5)
    keys, values = tensors[0][-1], tensors[2][-1]  # widths of a head
    return Fraction(2 * keys + 2 * values, 3 * keys + 2 * values)
