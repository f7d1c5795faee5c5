"""Waits for operations, in any thread."""

from __future__ import annotations

import threading
from signal import SIGKILL
from typing import Any, Callable, Iterable, Optional, TypeVar, Union

from .. import _native, _process
from .._errors import from_json
from .._native import Operation

DONE, FAILED, CANCELLED = 0, 1, 2

T = TypeVar("T")

Done = Callable[[int, Any], None]
Start = Callable[[Done], Operation]
Undo = Callable[[Any], Any]
Source = Union[bytes, str, Iterable[bytes]]


def run(start: Start, undo: Optional[Undo] = None, interrupt: bool = True) -> Any:
    """Starts an operation and waits for its result. Ctrl-C cancels and undoes it, as in `sandtree._async`."""
    _process.check()
    settled = threading.Event()
    outcome: list[tuple[int, Any]] = []

    def done(status: int, value: Any) -> None:
        outcome.append((status, value))
        settled.set()

    operation = start(done)
    try:
        settled.wait()
    except BaseException:
        if interrupt:
            operation.cancel()
        settled.wait()
        status, value = outcome[0]
        if status == DONE and undo is not None:
            undo(value)
        raise
    status, value = outcome[0]
    if status == FAILED:
        error = from_json(value)
        # Hints are written for the API with `async`.
        error.hint = error.hint and error.hint.replace("await ", "").replace("(await ", "(")
        raise error
    return value


def here(callback: Optional[Callable[[T], object]]) -> Optional[Callable[[T], object]]:
    """The function itself: it is called from another thread while this one waits."""
    return callback


class Guard:
    """Lets one thread at a time start something."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def lock(self) -> Any:
        return self._lock


class Feeding:
    """Writes a source to a command's stdin, on a thread of its own, while the output is read."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread: Optional[threading.Thread] = None
        self._operation: Optional[Operation] = None
        self._error: Optional[BaseException] = None

    def start(self, native: _native.Command, source: Source) -> None:
        self._thread = threading.Thread(target=self._run, args=(native, source), name="sandtree-stdin", daemon=True)
        self._thread.start()

    def _run(self, native: _native.Command, source: Source) -> None:
        try:
            self._feed(native, source)
        except BaseException as error:
            # Nothing is left to wait for: the reader sees the end, and then raises this.
            self._error = error
            native.signal(SIGKILL)

    def _feed(self, native: _native.Command, source: Source) -> None:
        if isinstance(source, str):
            source = source.encode()
        if isinstance(source, (bytes, bytearray, memoryview)):
            self._write(native, bytes(source))
        else:
            for chunk in source:
                if self._ended.is_set():
                    return
                self._write(native, chunk)
        if not self._ended.is_set():
            run(native.close_stdin)

    def _write(self, native: _native.Command, chunk: bytes) -> None:
        def start(done: Done) -> Operation:
            self._operation = native.write(chunk, done)
            if self._ended.is_set():
                self._operation.cancel()
            return self._operation

        run(start)

    def end(self) -> None:
        """Ends the feeding: the command has ended. Raises what the source raised."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._ended.set()
        if self._operation is not None:
            self._operation.cancel()
        # A source may never yield again; its thread is a daemon.
        thread.join(1.0)
        if self._error is not None:
            raise self._error
