"""Words of memory that programs wait for: where they lie, what they hold, and who set them.

Locks, flags and counters are words that programs change with atomics and look at again and again.
A program that waits for one in vain is told with it, so that its holder is found.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rankwise.sim.triton.dtypes import dtype
    from rankwise.sim.triton.memory import Buffer

_REMEMBERED = 65_536


class ProgramName(NamedTuple):
    """What messages call a program of a launch; its text is made when it is wanted."""

    number: int
    grid: tuple[int, int, int]

    def __str__(self) -> str:
        width, height, _depth = self.grid
        rest, x = divmod(self.number, width)
        return f"program {(x, rest % height, rest // height)}"


class _LastWrite(NamedTuple):
    value: Any
    who: object
    place: str


class LastWriters:
    """Which program has set which word with an atomic last, by address; the latest words only."""

    def __init__(self) -> None:
        self._settings: dict[int, _LastWrite] = {}

    def note(self, address: int, value: Any, who: object, place: str) -> None:
        """Note that a program has just set a word."""
        self._settings.pop(address, None)
        if len(self._settings) >= _REMEMBERED:
            del self._settings[next(iter(self._settings))]
        self._settings[address] = _LastWrite(value, who, place)

    def of(self, word: "BufferElement") -> str:
        """The program that set a word to what it holds, in words; empty if that is unknown."""
        setting = self._settings.get(word.address)
        if setting is None or repr(setting.value) != repr(word.value):  # a NaN is itself
            return ""
        return f", set by {setting.who} at {setting.place}"


class BufferElement(NamedTuple):
    """An element of a buffer that a program looks at."""

    buffer: "Buffer"
    element: "dtype"
    position: int

    @property
    def address(self) -> int:
        """Its first byte."""
        return int(self.buffer.address + self.position * self.element.itemsize)

    @property
    def value(self) -> Any:
        """What it holds."""
        flat = self.buffer.elements(self.element)
        return self.element.decode(flat[self.position : self.position + 1])[0].item()

    @property
    def bits(self) -> bytes:
        """What it holds, to be compared: a NaN is no other value than itself."""
        flat = self.buffer.elements(self.element)
        return bytes(flat[self.position : self.position + 1].tobytes())

    def __str__(self) -> str:
        name = f"{self.buffer.name}[{self.position}]"
        return f"{name} at {self.address:#x} holds {self.value}"


class AwaitedChange(NamedTuple):
    """That a word changes: what a program waits for, or, if that is not certain, may wait for."""

    word: BufferElement
    setters: LastWriters
    is_certain: bool = True

    @property
    def change(self) -> str:
        """Which word, what it holds, and who has set it."""
        return f"{self.word}{self.setters.of(self.word)}"

    def __str__(self) -> str:
        return f"memory to change: {self.change}"
