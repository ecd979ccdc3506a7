"""Names for runs: short, readable, easy to say and to type, unlikely to meet twice."""

import os

_QUALITIES = (
    "amber", "bold", "brave", "brisk", "calm", "clear", "deft", "eager", "early", "fair", "fleet",
    "fresh", "gentle", "glad", "keen", "kind", "light", "lively", "lucid", "mellow", "mild", "neat",
    "noble", "prime", "quick", "quiet", "ready", "silver", "steady", "sunny", "swift", "warm",
)  # fmt: skip
_CREATURES = (
    "badger", "bison", "crane", "curlew", "dolphin", "eagle", "falcon", "finch", "fox", "gull",
    "hare", "heron", "ibex", "jay", "kestrel", "lark", "lynx", "marten", "moose", "orca", "osprey",
    "otter", "owl", "panda", "puffin", "raven", "robin", "salmon", "seal", "stork", "swan", "wren",
)  # fmt: skip


def random_run_name() -> str:
    """A name such as `brisk-otter-3f7a`: one of 67 million."""
    quality, creature, *number = os.urandom(4)
    return f"{_QUALITIES[quality % 32]}-{_CREATURES[creature % 32]}-{bytes(number).hex()}"
