"""How long an unmodified program would take on a modelled machine.

`Prediction` keeps each simulated rank's time, `DeviceCosts` says what an operation takes on the
device, `Network` what ranks take together, and `prediction.summary` tells it.
"""

from rankwise.simranks.prediction.clocks import Passage, Prediction, RankClock

__all__ = ["Passage", "Prediction", "RankClock"]
