"""Values of a screen: its pictures, what the guest reports about it, and what callers pass."""

from __future__ import annotations

from functools import cached_property
from operator import index
from typing import TYPE_CHECKING, Optional

from ._options import invalid
from ._types import PathLike
from ._value import value

if TYPE_CHECKING:
    from . import _native

_BUTTONS = ("left", "middle", "right", "back", "forward")
_PIXELS_MAX = 65535
_SHOWN_MAX = 64
"""The characters of a text that an error shows."""


@value
class ScreenInfo:
    """What the guest reports about its screen.

    `x` and `y` are the place of the pointer, `ready` is whether a desktop runs.
    """

    width: int
    height: int
    x: int
    y: int
    ready: bool


class Screenshot:
    """What a screen showed at one moment.

    Two with the same pixels are equal. Jupyter shows the picture.
    """

    def __init__(self, native: _native.Screenshot) -> None:
        self._native = native
        self.width = native.width
        self.height = native.height

    @cached_property
    def png(self) -> bytes:
        """The picture as a PNG file."""
        return self._native.png()

    @cached_property
    def rgb(self) -> bytes:
        """Red, green and blue of each pixel, line by line from the top."""
        return self._native.rgb()

    def save(self, path: PathLike) -> None:
        """Writes the picture as a PNG file."""
        with open(path, "wb") as file:
            file.write(self.png)

    def _repr_png_(self) -> bytes:
        return self.png

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Screenshot):
            return NotImplemented
        return self._native.is_same(other._native)

    def __hash__(self) -> int:
        return hash((self.width, self.height, self.rgb))

    def __repr__(self) -> str:
        return f"<Screenshot {self.width}x{self.height}>"


def place(x: int, y: int) -> dict[str, int]:
    """A place in pixels. The guest knows how many its screen has."""
    wanted = {"x": index(x), "y": index(y)}
    if not all(0 <= number <= _PIXELS_MAX for number in wanted.values()):
        raise invalid("place", f"{x},{y}", "pixels from the upper left corner of the screen")
    return wanted


def optional_place(x: Optional[int], y: Optional[int]) -> Optional[dict[str, int]]:
    """A place, or None for that of the pointer."""
    if x is None and y is None:
        return None
    if x is None or y is None:
        raise TypeError("a place needs x and y")
    return place(x, y)


def size(width: int, height: int) -> dict[str, int]:
    """The size of a screen in pixels. The library knows which sizes are possible."""
    wanted = {"width": index(width), "height": index(height)}
    if not all(0 <= number <= _PIXELS_MAX for number in wanted.values()):
        raise invalid("size of a screen", f"{width}x{height}", "a width and a height in pixels")
    return wanted


def button(name: str) -> str:
    if name not in _BUTTONS:
        raise invalid("button", name, "left, middle, right, back or forward")
    return name


def text(given: str) -> str:
    """A text for a guest, which is UTF-8."""
    try:
        given.encode()
    except UnicodeEncodeError:
        rule = "characters of Unicode, without surrogates"
        raise invalid("text", given[:_SHOWN_MAX], rule) from None
    return given
