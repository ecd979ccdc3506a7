"""What torch asks any process group in Python for, beside operations."""

import torch
from torch.distributed import ProcessGroup


class NamedProcessGroup(ProcessGroup):  # type: ignore[misc]  # the same
    """What torch asks any process group in Python for: names.

    Args:
        rank, size: this rank in the group, and how many there are.
        backend: the backend that the program has asked for; it is told this name.
    """

    def __init__(self, rank: int, size: int, backend: str) -> None:
        super().__init__(rank, size)
        self._backend_name = backend
        self._own_name = ""
        self._own_description = ""
        self.bound_device_id = None

    @property
    def _device_types(self) -> list[torch.device]:
        """Where tensors may lie: whatever backend is asked for, it takes those of the CPU."""
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> "NamedProcessGroup":
        """What carries out operations on such a device: itself."""
        del device
        return self

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """What C++ is told: it takes a group of the name gloo for its own class."""
        return "rankwise"

    def name(self) -> str:
        """The backend that the program has asked for."""
        return self._backend_name

    def _set_group_name(self, name: str) -> None:
        self._own_name = name

    def _set_group_desc(self, description: str) -> None:
        self._own_description = description

    @property
    def group_name(self) -> str:
        """The name in torch's registry, unique to this rank."""
        return self._own_name

    @property
    def group_desc(self) -> str:
        """What torch calls it."""
        return self._own_description

    def getGroupName(self) -> str:  # noqa: N802  # the same
        """The same, for C++."""
        return self._own_name

    def getGroupDesc(self) -> str:  # noqa: N802  # the same
        """The same, for C++."""
        return self._own_description

    def _get_backend_name(self) -> str:
        return self._backend_name

    def _set_sequence_number_for_group(self) -> None:
        """It counts from 1 anyway."""

    def _has_hooks(self) -> bool:
        return False
