"""The options of a run that are for simulated ranks alone, as one value."""

import msgspec


class SimulationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What they ask for: each has its name, type and default from the table of options."""

    # Written by `python tools/run_arguments.py` from launch/options.py.
    virtual_clock: bool = False
    timing_only: bool = False
    every_rank: bool = False
    values: str = ""
    synthetic_data: bool = False
    tokens_per_step: int | None = None
    record_values: str | None = None
    prediction: str | None = None
    sweep: tuple[str, ...] = ()
    results: str | None = None
    format: str = "table"
    schedule: str = "queue"
    seed: int = 0
    explore: int | None = None
    replay: str | None = None
    device: str = "cpu"
    import_per_rank: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    # The end of what is written.
