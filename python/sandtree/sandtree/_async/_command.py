"""Commands in a guest."""

from __future__ import annotations

import codecs
import signal as signals
from typing import Any, AsyncIterator, Callable, Generator, Optional, Union

from .. import _native
from .._errors import LinkEnded, WrongState, output_limit
from .._options import invalid
from .._types import ExecuteResult, Line, Output, ended
from ._wait import Feeding, Guard, Source, Start, run

OUTPUT_LIMIT = 256 << 20
"""The most bytes of each stream that a result has, unless the caller allows more."""
LINE_MAX = 1 << 20
_STREAMS = {1: "stdout", 2: "stderr"}


class Command:
    """A command in a guest, started at its first use.

    Its output is read by `lines`, `output` or `wait`; if nothing reads, the command waits after some mebibytes. A command
    that is not detached ends when this object does, or is closed by `async with`.

    Example:
        async with Sandbox("tiny") as sb:
            async for line in sb.exec("printf", "one\\ntwo\\n").lines():
                print(line.stream, line)
    """

    def __init__(self, start: Callable[[], Start], stdin: Optional[Source] = None) -> None:
        self._begin = start
        self._source = stdin
        self._native: Optional[_native.Command] = None
        self._is_closed = False
        self._guard = Guard()
        self._feeding = Feeding()
        # Events that a cancelled reader has not seen.
        self._held: list[Any] = []
        # What readers have not returned yet: lines, the begun ones, and the output that `wait` collects.
        self._lines: list[Line] = []
        self._text = {name: _Text() for name in _STREAMS.values()}
        self._collected = {name: bytearray() for name in _STREAMS.values()}
        self._result: Optional[tuple[str, int]] = None

    async def start(self) -> Command:
        """Starts the command, unless it was started."""
        async with self._guard.lock():
            if self._is_closed:
                raise WrongState("the command is closed", code="closed", kind="wrong_state", hint="start another one")
            if self._native is None:
                self._native = await run(self._begin(), undo=_end)
                if self._source is not None:
                    self._feeding.start(self._native, self._source)
        return self

    @property
    def id(self) -> str:
        """Names the command in its sandbox, also after a fork."""
        return self._started().id

    @property
    def pid(self) -> int:
        """The process id in the guest."""
        return self._started().pid

    @property
    def exit_code(self) -> Optional[int]:
        """The exit code, once the end of the command was read."""
        return None if self._result is None else ended(self._result, b"", b"").exit_code

    def _started(self) -> _native.Command:
        if self._native is None:
            raise WrongState(
                "the command is not started yet",
                code="not_started",
                kind="wrong_state",
                hint="call `await command.start()` first",
            )
        return self._native

    async def _next(self) -> Optional[tuple[int, Any]]:
        """The next event; None after the end."""
        if self._result is not None:
            return None
        native = (await self.start())._started()

        async def hold(event: Any) -> None:
            self._held.append(event)

        event: Any = self._held.pop(0) if self._held else await run(native.next, undo=hold)
        if event is None:
            raise LinkEnded("the command ended without a result", code="link_ended", kind="wrong_state")
        if event[0] == 0:
            self._result = event[1]
            await self._feeding.end()
            return None
        return event  # type: ignore[no-any-return]

    async def output(self) -> AsyncIterator[Output]:
        """The output in pieces, as it comes, until the command has ended."""
        while True:
            event = await self._next()
            if event is None:
                return
            yield Output(_STREAMS[event[0]], event[1])

    async def lines(self) -> AsyncIterator[Line]:
        """The lines of stdout and stderr, as they come, without their newlines: "\\n", or "\\r\\n" as terminals write it.

        A reader may stop and call this again: it continues with the next line. A line of more than a mebibyte comes in
        pieces.
        """
        while True:
            while self._lines:
                yield self._lines.pop(0)
            event = await self._next()
            if event is None:
                break
            stream = _STREAMS[event[0]]
            self._lines += [Line(text, stream) for text in self._text[stream].lines(event[1])]
        for stream, text in self._text.items():
            rest = text.rest()
            if rest:
                yield Line(rest, stream)

    async def wait(
        self,
        on_stdout: Optional[Callable[[str], object]] = None,
        on_stderr: Optional[Callable[[str], object]] = None,
        limit: int = OUTPUT_LIMIT,
    ) -> ExecuteResult:
        """Reads the rest of the output and waits for the end. The result has the output that was read here.

        More than `limit` bytes of a stream raise `OutputLimit`.
        """
        callbacks = {"stdout": on_stdout, "stderr": on_stderr}
        decoders = {name: _decoder() for name in callbacks}
        async for piece in self.output():
            collected = self._collected[piece.stream]
            collected += piece.data
            if len(collected) > limit:
                raise output_limit(limit)
            _tell(callbacks[piece.stream], decoders[piece.stream].decode(piece.data))
        for name, callback in callbacks.items():
            _tell(callback, decoders[name].decode(b"", True))
        if self._result is None:
            raise LinkEnded("the command ended without a result", code="link_ended", kind="wrong_state")
        return ended(self._result, bytes(self._collected["stdout"]), bytes(self._collected["stderr"]))

    # async-only
    def __await__(self) -> Generator[Any, None, ExecuteResult]:
        return self.wait().__await__()

    async def write(self, data: Union[bytes, str]) -> None:
        """Writes to the command's stdin, and waits while it does not read. Needs `stdin=True`."""
        native = (await self.start())._started()
        raw = data.encode() if isinstance(data, str) else bytes(data)
        await run(lambda done: native.write(raw, done))

    async def close_stdin(self) -> None:
        """The command then reads the end of its input."""
        native = (await self.start())._started()
        await run(native.close_stdin)

    def signal(self, number: Union[int, str]) -> bool:
        """Sends a signal to the command's process group: a number, or a name such as "TERM".

        Returns whether the command still ran.
        """
        return self._started().signal(_signal(number))

    def terminate(self) -> bool:
        """Sends SIGTERM."""
        return self.signal(signals.SIGTERM)

    def kill(self) -> bool:
        """Sends SIGKILL."""
        return self.signal(signals.SIGKILL)

    def resize(self, rows: int, cols: int) -> bool:
        """Changes the size of the command's terminal."""
        return self._started().resize(rows, cols)

    async def __aenter__(self) -> Command:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        """Ends the command, if it still runs, unless it is detached."""
        self._is_closed = True
        native, self._native = self._native, None
        if native is not None:
            native.close()
        if self._result is None:
            await self._feeding.end()

    def __repr__(self) -> str:
        if self._native is None:
            return "<Command, not started>"
        state = "runs" if self._result is None else f"exit code {self.exit_code}"
        return f"<Command {self._native.id}, pid {self._native.pid}: {state}>"


class _Text:
    """The text of a stream, in lines."""

    def __init__(self) -> None:
        self._decoder = _decoder()
        self._begun = ""

    def lines(self, data: bytes) -> list[str]:
        *ended, self._begun = (self._begun + self._decoder.decode(data)).split("\n")
        whole = [line.removesuffix("\r") for line in ended]
        if len(self._begun) > LINE_MAX:
            whole.append(self._begun)
            self._begun = ""
        return whole

    def rest(self) -> str:
        rest, self._begun = self._begun + self._decoder.decode(b"", True), ""
        return rest


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


def _tell(callback: Optional[Callable[[str], object]], text: str) -> None:
    if callback is not None and text:
        callback(text)


def _signal(which: Union[int, str]) -> int:
    """The number of a signal."""
    try:
        if isinstance(which, str):
            name = which.upper()
            return signals.Signals[name if name.startswith("SIG") else f"SIG{name}"].value
        number = int(which)
    except KeyError:
        number = 0
    if not 1 <= number <= 64:
        raise invalid("signal", which, "a number from 1 to 64, or a name such as TERM")
    return number


async def _end(native: _native.Command) -> None:
    """Ends a command whose start was cancelled, also a detached one."""
    native.signal(signals.SIGKILL)
    native.close()
