"""NUMA binding as torch's options ask for it, done by rankwise: neither CUDA nor numactl needed."""

from typing import Any

from rankwise.base.errors import ConfigError


def cpus_for(numa_options: Any, size: int) -> dict[int, frozenset[int]] | None:
    """The CPUs of each of `size` local ranks; None where workers are left unbound.

    Args:
        numa_options: torch's `NumaOptions`, or anything with the same two attributes; or None.
        size: number of local ranks.

    Raises:
        ConfigError: the options cannot be understood, or not be fulfilled on this machine.
    """
    if numa_options is None:
        return None
    from rankwise.launch.run.affinity import Binding, cpus_by_rank  # noqa: PLC0415  # rarely needed

    try:
        mode = numa_options.affinity_mode
        binding = Binding(getattr(mode, "value", mode))
    except (AttributeError, ValueError):
        modes = ", ".join(Binding)
        raise ConfigError(
            f"numa_options is {numa_options!r}, expected options whose affinity_mode is one of "
            f"{modes}"
        ) from None
    try:
        return cpus_by_rank(binding, size)
    except ConfigError:
        if getattr(numa_options, "should_fall_back_if_binding_fails", False):
            return None
        raise


def refuse_numa_options(numa_options: object) -> None:
    """Say clearly that a lone process is not bound, instead of starting it unbound.

    Raises:
        ConfigError: there are options.
    """
    if numa_options is not None:
        raise ConfigError(
            f"numa_options is {numa_options!r}, but a single process does not know how many share "
            "the machine with it",
            hint="leave it out, or use start_processes, which binds",
        )
