"""Keyboard, mouse and screen. Sandtree has no desktop yet: every method says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from ._protocol import Started


class DesktopMixin(Started):
    """The methods of a desktop."""

    async def type_text(self, text: str) -> None:
        """Types text."""
        self._refuse_display()

    async def press_key(self, *keys: str) -> None:
        """Presses keys together."""
        self._refuse_display()

    async def mouse_move(self, x: int, y: int) -> None:
        """Moves the mouse to a place from 0 to 32767 on both axes."""
        self._refuse_display()

    async def mouse_click(self, button: str = "left", *, double: bool = False) -> None:
        """Clicks a button of the mouse."""
        self._refuse_display()

    async def screenshot(self, path: str | Path) -> None:
        """Writes the screen as a PNG."""
        self._refuse_display()

    async def query_display_size(self) -> tuple[int, int]:
        """The width and the height of the screen."""
        self._refuse_display()

    async def query_mouse_position(self) -> dict[str, Any] | None:
        """The active mouse of QEMU."""
        self._refuse_display()

    @property
    def vnc_port(self) -> int | None:
        """The port of VNC; None, because there is no display."""
        return None

    def _refuse_display(self) -> NoReturn:
        if not self.is_running:
            raise RuntimeError("Sandbox is not running")
        if not self.config.enable_display:
            raise RuntimeError("Display is not enabled. Set enable_display=True in SandboxConfig.")
        raise RuntimeError("Sandtree does not have a desktop yet: keyboard, mouse and screen are not available")
