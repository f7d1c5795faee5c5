"""Waits for operations, in any event loop of asyncio."""

from __future__ import annotations

from signal import SIGKILL
from typing import Any, AsyncIterable, Awaitable, Callable, Optional, TypeVar, Union

from .. import _native, _process
from .._errors import from_json
from .._native import Operation

DONE, FAILED, CANCELLED = 0, 1, 2

T = TypeVar("T")

Done = Callable[[int, Any], None]
Start = Callable[[Done], Operation]
Undo = Callable[[Any], Awaitable[Any]]
Source = Union[bytes, str, AsyncIterable[bytes]]


async def run(start: Start, undo: Optional[Undo] = None, interrupt: bool = True) -> Any:
    """Starts an operation and waits for its result.

    When the waiting task is cancelled, the operation is cancelled, too; one that cannot be interrupted is awaited.
    `undo` gets the result of an operation that was done all the same. The cancellation continues when that is over.
    """
    import asyncio

    _process.check()
    loop = asyncio.get_running_loop()
    settled: asyncio.Future[tuple[int, Any]] = loop.create_future()

    def settle(status: int, value: Any) -> None:
        if not settled.done():
            settled.set_result((status, value))

    def done(status: int, value: Any) -> None:
        try:
            loop.call_soon_threadsafe(settle, status, value)
        except RuntimeError:
            pass  # The loop is closed: no task waits.

    operation = start(done)
    try:
        status, value = await asyncio.shield(settled)
    except asyncio.CancelledError as cancelled:
        if interrupt:
            operation.cancel()
        status, value = await _despite_cancellation(settled)
        if status == DONE and undo is not None:
            try:
                await _despite_cancellation(asyncio.ensure_future(undo(value)))
            except Exception as error:
                raise cancelled from error
        raise
    if status == FAILED:
        raise from_json(value)
    return value


async def _despite_cancellation(settled: Any) -> Any:
    """Waits for the end of work that must not be left half done."""
    import asyncio

    while True:
        try:
            return await asyncio.shield(settled)
        except asyncio.CancelledError:
            if settled.done():
                return settled.result()


def here(callback: Optional[Callable[[T], object]]) -> Optional[Callable[[T], object]]:
    """Calls a function in this event loop, from any thread."""
    if callback is None:
        return None
    import asyncio

    loop = asyncio.get_running_loop()
    called = callback

    def call(value: T) -> None:
        try:
            loop.call_soon_threadsafe(called, value)
        except RuntimeError:
            pass  # The loop is closed: no task waits.

    return call


class Guard:
    """Lets one task at a time start something."""

    def __init__(self) -> None:
        self._lock: Any = None

    def lock(self) -> Any:
        import asyncio

        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock


class Feeding:
    """Writes a source to a command's stdin while its output is read."""

    def __init__(self) -> None:
        self._task: Any = None

    def start(self, native: _native.Command, source: Source) -> None:
        import asyncio

        self._task = asyncio.ensure_future(_feed(native, source))

    async def end(self) -> None:
        """Ends the feeding: the command has ended. Raises what the source raised."""
        import asyncio

        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and task.exception() is not None:
            raise task.exception()


async def _feed(native: _native.Command, source: Source) -> None:
    if isinstance(source, str):
        source = source.encode()
    try:
        if isinstance(source, (bytes, bytearray, memoryview)):
            whole = bytes(source)
            await run(lambda done: native.write(whole, done))
        else:
            async for chunk in source:
                await _write(native, chunk)
    except Exception:
        # Nothing is left to wait for: the reader sees the end, and then raises this.
        native.signal(SIGKILL)
        raise
    await run(native.close_stdin)


async def _write(native: _native.Command, chunk: bytes) -> None:
    await run(lambda done: native.write(chunk, done))
