"""Progress of long work: a line on the terminal, or a function of the caller."""

from __future__ import annotations

import sys
import time
from typing import Callable, Optional

from ._types import Progress

Callback = Callable[[Progress], object]
Meter = Callable[[str, int, Optional[int], Optional[bytes]], None]

_PATIENCE_S = 1.0
_WIDTH = 24


class Shown:
    """Shows progress, from the moment that work takes longer than a second. `with` removes the line."""

    def __init__(self, callback: Optional[Callback], label: str) -> None:
        self._callback = callback
        self._label = label
        self._is_terminal = callback is None and sys.stderr is not None and sys.stderr.isatty()
        self._began = time.monotonic()
        self._drawn = False

    @property
    def meter(self) -> Optional[Meter]:
        return self._report if self._callback or self._is_terminal else None

    def _report(self, stage: str, done: int, total: Optional[int], output: Optional[bytes]) -> None:
        if self._callback is not None:
            self._callback(Progress(stage, done, total, output))
        elif output is None and time.monotonic() - self._began > _PATIENCE_S:
            sys.stderr.write("\r\033[K" + self._line(stage, done, total))
            sys.stderr.flush()
            self._drawn = True

    def _line(self, stage: str, done: int, total: Optional[int]) -> str:
        text = f"{self._label}: {stage}"[:60]
        if not total:
            return text
        filled = min(_WIDTH, done * _WIDTH // total)
        return f"{text} [{'#' * filled}{'.' * (_WIDTH - filled)}] {_bytes(done)} of {_bytes(total)}"

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
