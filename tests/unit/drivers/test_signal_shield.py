"""A program keeps to what it was told to ignore, whatever it does about it itself."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

import pytest

from rankwise.drivers.real.hosting import signal_shield
from rankwise.drivers.real.hosting.signal_shield import ignore_for_good

HANDLES = """
import signal
heard = []
for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(each, lambda signum, frame: heard.append(signum))
    signal.raise_signal(each)
print(heard == [signal.SIGUSR1])
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.raise_signal(signal.SIGTERM)
print("alive")
"""


def run_with(signals: Sequence[signal.Signals]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", "-c", HANDLES],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=partial(ignore_for_good, signals),
        check=False,
    )


def test_handlers_for_signals_that_are_ignored_for_good_are_never_called() -> None:
    done = run_with((signal.SIGHUP, signal.SIGINT, signal.SIGTERM))

    assert done.returncode == 0
    assert done.stdout.split() == ["True", "alive"]


def test_others_are_heard() -> None:
    assert run_with((signal.SIGHUP, signal.SIGINT)).returncode == -signal.SIGTERM


def test_a_kind_of_machine_that_is_not_known_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal_shield, "_ARCHITECTURES", {})

    with pytest.raises(OSError, match="no filter of system calls is known for "):
        ignore_for_good(())
