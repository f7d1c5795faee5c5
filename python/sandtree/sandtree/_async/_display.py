"""The screen of a sandbox."""

from __future__ import annotations

import json
from typing import Any, Optional

from .. import _native
from .._errors import WrongState
from .._options import milliseconds
from .._screen import (
    ScreenInfo,
    Screenshot,
    button as known_button,
    optional_place,
    place,
    size,
    text as checked,
)
from .._types import read
from ._wait import Guard, Start, run


class Display:
    """The screen of a sandbox, with its keyboard, mouse and clipboard.

    Places are pixels from the upper left corner. Pictures come from QEMU, whatever the guest does.
    Everything else returns when the guest's X server has taken it. In a guest without one, keys and
    mouse are those of its kernel; clipboard, size and other scripts are not possible.
    """

    def __init__(self, native: _native.Display) -> None:
        self._native = native

    # Looking.

    async def screenshot(self) -> Screenshot:
        """What the screen shows, with the pointer."""
        return Screenshot(await run(self._native.screenshot))

    async def wait_change(self, from_: Screenshot, timeout: float = 30.0) -> Screenshot:
        """Waits until the screen differs from a picture of it, and returns the new one.

        Raises `TimedOut`. A blinking cursor is a change, too.
        """
        native, before = self._native, from_._native
        return Screenshot(await run(lambda done: native.wait_change(before, timeout, done)))

    async def wait_still(self, still: float = 0.5, timeout: float = 30.0) -> Screenshot:
        """Waits until the screen has not changed for `still` seconds, and returns its picture.

        Raises `TimedOut`.
        """
        native = self._native
        return Screenshot(await run(lambda done: native.wait_still(still, timeout, done)))

    async def info(self) -> ScreenInfo:
        """The size of the screen, the pointer, and whether a desktop runs."""
        return read(ScreenInfo, await self._call("info"))

    async def set_size(self, width: int, height: int) -> None:
        """Changes the size of the screen, from 320x200 to 2560x1600."""
        await self._call("set_size", **size(width, height))

    # Keys.

    async def type(self, text: str) -> None:
        """Types a text in any script; a line break is Enter.

        Raises `Invalid` before the first key if a character cannot be typed.
        """
        await self._call("type", text=checked(text))

    async def press(self, *chords: str, hold: Optional[float] = None) -> None:
        """Presses keys together and releases them: "ctrl+shift+t", "F5", "enter".

        Several chords follow each other. `hold` is how many seconds each is held, at most 10.
        """
        if not chords:
            raise TypeError("press() needs keys, such as 'ctrl+l'")
        named = [checked(chord) for chord in chords]
        await self._call("press", chords=named, hold_ms=milliseconds(hold))

    # The mouse.

    async def move(self, x: int, y: int) -> None:
        """Moves the pointer."""
        await self._call("move", to=place(x, y))

    async def click(
        self, x: Optional[int] = None, y: Optional[int] = None, button: str = "left", count: int = 1
    ) -> None:
        """Clicks at a place, or where the pointer is. A `count` of 2 is a double click.

        Buttons are "left", "middle", "right", "back" and "forward".
        """
        await self._call("click", at=optional_place(x, y), button=known_button(button), count=count)

    async def down(self, button: str = "left") -> None:
        """Presses a button and holds it."""
        await self._call("down", button=known_button(button))

    async def up(self, button: str = "left") -> None:
        """Releases a button."""
        await self._call("up", button=known_button(button))

    async def drag(self, x: int, y: int, to_x: int, to_y: int, button: str = "left") -> None:
        """Drags from one place to another."""
        places = {"from": place(x, y), "to": place(to_x, to_y)}
        await self._call("drag", **places, button=known_button(button))

    async def scroll(
        self, down: int, x: Optional[int] = None, y: Optional[int] = None, right: int = 0
    ) -> None:
        """Turns the wheel by steps, at a place or where the pointer is.

        Negative steps are up and left.
        """
        await self._call("scroll", at=optional_place(x, y), down=down, right=right)

    # The clipboard.

    async def clipboard(self) -> Optional[str]:
        """The text of the clipboard; None if it has no text."""
        return await self._call("clipboard")  # type: ignore[no-any-return]

    async def set_clipboard(self, text: str) -> None:
        """Puts a text into the clipboard."""
        await self._call("set_clipboard", text=checked(text))

    # The live view.

    def view(self, port: int = 0, *, password: bool = True) -> View:
        """A live view for VNC clients, on a port of 127.0.0.1. 0 chooses a free port.

        Without a password, every program of this host can see and use the screen.
        """
        begin = self._native.view if password else self._native.view_without_password
        return View(lambda done: begin(port, done))

    async def _call(self, verb: str, **request: Any) -> Any:
        native = self._native
        wanted = json.dumps({"verb": verb, **request})
        return json.loads(await run(lambda done: native.call(wanted, done)))


class View:
    """A live view of a screen, for any VNC client: from `start` or `async with` until it is closed.

    Viewers stay connected over revert, pause and resume, and show the picture of the new moment. A
    stop ends them; the view then serves new ones after the next start.
    """

    host = "127.0.0.1"

    def __init__(self, start: Start) -> None:
        self._begin = start
        self._native: Optional[_native.View] = None
        self._guard = Guard()

    async def start(self) -> View:
        """Listens, unless it does already."""
        async with self._guard.lock():
            if self._native is None:
                self._native = await run(self._begin, undo=_close)
        return self

    @property
    def port(self) -> int:
        return self._started().port

    @property
    def password(self) -> str:
        """What a viewer must know; empty if nothing. Each view has another one."""
        return self._started().password or ""

    async def close(self) -> None:
        """Ends the view and its connections."""
        native, self._native = self._native, None
        if native is not None:
            await _close(native)

    async def __aenter__(self) -> View:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _started(self) -> _native.View:
        if self._native is None:
            raise WrongState(
                "the view is not started",
                code="not_started",
                kind="wrong_state",
                hint="use `async with display.view() as view`, or call `await view.start()` first",
            )
        return self._native

    def __repr__(self) -> str:
        return "<View: not started>" if self._native is None else f"<View {self.host}:{self.port}>"


async def _close(native: _native.View) -> None:
    await run(native.close, interrupt=False)
