"""`--rdzv-conf`: which of its settings concern the rendezvous, and what is left for the store.

torch's names are taken with torch's units (seconds). `timeout` is its older name for how long a
node waits for others.
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from rankwise.base.errors import ConfigError
from rankwise.base.suggestions import nearest
from rankwise.base.units import SECOND, Duration, duration_from_seconds, parse_duration
from rankwise.core.rendezvous.configuration import RendezvousConfig

RUN_TTL = Duration(2 * 3600 * SECOND)
"""How long a store remembers a run without a leader; keys of torch's live as long."""


class TimingSetting(NamedTuple):
    """A time in `--rdzv-conf`: its field in `RendezvousConfig`, and what users read about it."""

    field: str
    meaning: str
    torch_spelling: str = ""


TIMING_SETTINGS = {
    "join_timeout": TimingSetting(
        "join_timeout", "time limit for the minimum number of nodes to join a round", "`timeout`"
    ),
    "last_call_timeout": TimingSetting(
        "last_call", "how long to wait for more nodes once the minimum is ready"
    ),
    "settle_delay": TimingSetting(
        "settle_delay",
        "how long a node that joins a running job waits for others before the next round; "
        "also how long a spare leaves its place to a returning member",
    ),
    "lease_ttl": TimingSetting(
        "lease_ttl",
        "a node without a heartbeat for this time is lost",
        "`keep_alive_interval` times `keep_alive_max_attempt`",
    ),
    "run_ttl": TimingSetting(
        "run_ttl", "how long the store keeps the state of a run that has no leader"
    ),
    "close_timeout": TimingSetting(
        "close_timeout", "how long a finished node waits for the outcome of the whole job"
    ),
}
"""By the names in `--rdzv-conf`; docs/settings.md is generated from them."""
_DURATIONS = {
    **{name: setting.field for name, setting in TIMING_SETTINGS.items()},
    "timeout": "join_timeout",
}
_KEEP_ALIVE = ("keep_alive_interval", "keep_alive_max_attempt")
"""torch's words for a lease: dead after so many intervals without a sign of life."""
_MEANINGLESS = ("heartbeat_timeout", "rank")
"""torch's; nothing here waits for a heartbeat, and a rank is `--node-rank`."""


TYPO_LIKENESS = 0.85
"""From here on a name is taken for a misspelling: more alike than any two that stores have."""


class Settings(NamedTuple):
    """What a text or a dictionary of settings means.

    Attributes:
        timing: fields of `RendezvousConfig`.
        store: what is left, for the store.
    """

    timing: dict[str, Duration]
    store: dict[str, str]


def split_settings(given: Mapping[str, object], *, label: str = "--rdzv-conf") -> Settings:
    """Read settings.

    Raises:
        ConfigError: a time is not a positive number of seconds.
    """
    timing: dict[str, Duration] = {}
    store: dict[str, str] = {}
    keep_alive = dict.fromkeys(_KEEP_ALIVE, 0.0)
    for key, value in given.items():
        if key in _DURATIONS:
            field = _DURATIONS[key]
            if key != "timeout" or field not in timing:
                timing[field] = duration_from_seconds(_positive(value, key, label))
        elif key in _KEEP_ALIVE:
            keep_alive[key] = _positive(value, key, label)
        elif key not in _MEANINGLESS:
            _refuse_typo(key, label)
            store[key] = str(value)
    if any(keep_alive.values()) and "lease_ttl" not in timing:
        interval = keep_alive["keep_alive_interval"] or 5.0
        attempts = keep_alive["keep_alive_max_attempt"] or 3.0
        timing["lease_ttl"] = duration_from_seconds(interval * attempts)
    return Settings(timing, store)


def _refuse_typo(key: str, label: str) -> None:
    """Name the setting of ours that was probably meant; the store knows only its own."""
    if meant := nearest(key, [*_DURATIONS, *_KEEP_ALIVE], TYPO_LIKENESS):
        raise ConfigError(f"{label}: there is no {key}", hint=f"did you mean {meant}?")


def with_timing(config: RendezvousConfig, settings: Settings, label: str) -> RendezvousConfig:
    """The same configuration with the times that the settings name.

    A lease must outlive one lost renewal, so requests get no longer than half of it.

    Raises:
        ConfigError: the times do not go together.
    """
    timing = dict(settings.timing)
    lease_ttl = timing.get("lease_ttl", config.lease_ttl)
    timing["request_timeout"] = Duration(min(config.request_timeout, lease_ttl // 2))
    try:
        return msgspec.structs.replace(config, **timing)
    except ValueError as error:
        raise ConfigError(f"{label}: {error}") from error


def _positive(value: object, key: str, label: str) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = (parse_duration(str(value)) or 0) / SECOND
    if not 0 < number < 1e9:
        raise ConfigError(
            f"{label}: {key} is {str(value)!r}, expected more than 0 and less than 1e9 seconds, "
            "or a time such as 30s, 1h30m"
        )
    return number
