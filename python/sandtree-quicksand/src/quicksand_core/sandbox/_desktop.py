"""Keyboard, mouse and screen of a sandbox with `enable_display`.

Keys and mouse go to the guest's X server or kernel, as in `sandtree.Display`: a slow guest loses
none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import sandtree

from ..utils.network import VNC_PORTS
from ._protocol import Started, as_runtime_error

T = TypeVar("T")

SCREEN = "1280x800"
"""The size of the screen of a machine, as in Quicksand."""
_AXIS_MAX = 32767
_HOLD_SECONDS = 0.1
_BUTTONS = {
    "left": "left",
    "middle": "middle",
    "right": "right",
    "side": "back",
    "extra": "forward",
}
_WHEEL = {"wheel-up": (-1, 0), "wheel-down": (1, 0), "wheel-left": (0, -1), "wheel-right": (0, 1)}


class DesktopMixin(Started):
    """The methods of a desktop."""

    _view: sandtree.View | None = None

    async def type_text(self, text: str) -> None:
        """Types text in any script; a line break is Enter."""
        await self._use(lambda screen: screen.type(text))

    async def press_key(self, *keys: str) -> None:
        """Presses keys together."""
        chord = "+".join(str(key) for key in keys)
        if chord:
            await self._use(lambda screen: screen.press(chord, hold=_HOLD_SECONDS))
        else:
            self._screen()

    async def mouse_move(self, x: int, y: int) -> None:
        """Moves the mouse to a place from 0 to 32767 on both axes."""
        if not (0 <= x <= _AXIS_MAX and 0 <= y <= _AXIS_MAX):
            rule = f"both are from 0 to {_AXIS_MAX}, whatever the size of the screen is"
            raise ValueError(f"mouse_move({x}, {y}): {rule}")
        width, height = await self.query_display_size()
        place = _scaled(x, _AXIS_MAX, width - 1), _scaled(y, _AXIS_MAX, height - 1)
        await self._use(lambda screen: screen.move(*place))

    async def mouse_click(self, button: str = "left", *, double: bool = False) -> None:
        """Clicks a button of the mouse, or turns its wheel."""
        count = 2 if double else 1
        if button in _WHEEL:
            down, right = _WHEEL[button]
            await self._use(lambda screen: screen.scroll(down * count, right=right * count))
        elif button in _BUTTONS:
            await self._use(lambda screen: screen.click(button=_BUTTONS[button], count=count))
        else:
            known = ", ".join([*_BUTTONS, *_WHEEL])
            raise RuntimeError(f"There is no mouse button {button!r}: use {known}")

    async def screenshot(self, path: str | Path) -> None:
        """Writes the screen as a PNG."""
        picture = await self._use(lambda screen: screen.screenshot())
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        picture.save(target)

    async def query_display_size(self) -> tuple[int, int]:
        """The width and the height of the screen."""
        picture = await self._use(lambda screen: screen.screenshot())
        return picture.width, picture.height

    async def query_mouse_position(self) -> dict[str, Any] | None:
        """The mouse, as QEMU lists it, and its place in the units of `mouse_move`."""
        info = await self._use(lambda screen: screen.info())
        return {
            "name": "QEMU Virtio Tablet",
            "index": 0,
            "current": True,
            "absolute": True,
            "x": _scaled(info.x, info.width - 1, _AXIS_MAX),
            "y": _scaled(info.y, info.height - 1, _AXIS_MAX),
        }

    @property
    def vnc_port(self) -> int | None:
        """The port of VNC on 127.0.0.1; None without a display. There is no password."""
        return None if self._view is None else self._view.port

    async def _open_view(self) -> None:
        """Serves VNC clients on the first free port of VNC."""
        screen = self._screen()
        for port in VNC_PORTS:
            view = screen.view(port, password=False)
            try:
                await view.start()
            except sandtree.SandtreeError as error:
                if error.code == "port_unavailable":
                    continue
                raise RuntimeError(str(error)) from error
            self._view = view
            return
        raise RuntimeError("No free VNC ports available in range 5900-5999")

    async def _close_view(self) -> None:
        view, self._view = self._view, None
        if view is not None:
            await view.close()

    def _screen(self) -> sandtree.Display:
        inner = self._running()
        if not self.config.enable_display:
            raise RuntimeError("Display is not enabled. Set enable_display=True in SandboxConfig.")
        return inner.display

    async def _use(self, work: Callable[[sandtree.Display], Awaitable[T]]) -> T:
        return await as_runtime_error(work(self._screen()))


def _scaled(value: int, most: int, wanted: int) -> int:
    """A value from 0 to `most`, as one from 0 to `wanted`."""
    return round(value * wanted / most)
