"""Runs commands with Quicksand's results: what went wrong is in `stderr`, with the exit code -1."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterable, Callable
from dataclasses import dataclass
from typing import Any

import sandtree

from .._types import ExecuteResult, StdinSource

Callback = Callable[[str], None]

_USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]*\$?")


@dataclass(frozen=True)
class Request:
    """A command, as `Sandbox.execute` was called."""

    command: str
    timeout: float
    cwd: str | None
    shell: str
    on_stdout: Callback | None
    on_stderr: Callback | None
    user: str | None
    stdin: StdinSource | None

    def options(self) -> dict[str, Any]:
        # Without a user, Quicksand starts commands in the directory of its agent.
        cwd = "/" if self.cwd is None and self.user is None else self.cwd
        return {"cwd": cwd, "user": self.user, "timeout": self.timeout}

    @property
    def argv(self) -> list[str]:
        return [self.shell, "-c", self.command]


def failed(reason: str) -> ExecuteResult:
    return ExecuteResult(stdout="", stderr=reason, exit_code=-1)


async def run(sandbox: sandtree.Sandbox, request: Request) -> ExecuteResult:
    """Runs a command. Raises only what callbacks and the source of the input raise."""
    if request.user is not None and not _USER.fullmatch(request.user):
        return failed(f"No such user: {request.user}")
    try:
        return _translated(await _ended(sandbox, request), request.timeout)
    except sandtree.SandtreeError as error:
        if await _lacks_user(sandbox, request.user, error):
            return failed(f"No such user: {request.user}")
        return failed(str(error))


async def _ended(sandbox: sandtree.Sandbox, request: Request) -> sandtree.ExecuteResult:
    source = request.stdin
    if request.on_stdout is None and request.on_stderr is None and not isinstance(source, AsyncIterable):
        return await sandbox.execute(
            request.command, shell=request.shell, stdin=source, **request.options()
        )
    command = sandbox.exec(*request.argv, stdin=source is not None, **request.options())
    async with command:
        reading = asyncio.ensure_future(command.wait(request.on_stdout, request.on_stderr))
        feeding = asyncio.ensure_future(_feed(command, source))
        try:
            return await _both(reading, feeding)
        finally:
            # Exceptions may keep the command alive for longer than this block.
            with contextlib.suppress(sandtree.SandtreeError):
                command.kill()
            await _cancelled(reading, feeding)


async def _both(
    reading: asyncio.Future[sandtree.ExecuteResult], feeding: asyncio.Future[None]
) -> sandtree.ExecuteResult:
    """The result of the command, unless its input fails first."""
    both: set[asyncio.Future[Any]] = {reading, feeding}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if feeding.done():
        feeding.result()
    return await reading


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(command: sandtree.Command, source: StdinSource | None) -> None:
    if source is None:
        return
    try:
        async for chunk in _chunks(source):
            if not isinstance(chunk, bytes):
                raise TypeError(f"stdin must yield bytes, got {type(chunk).__name__}")
            await command.write(chunk)
        await command.close_stdin()
    except sandtree.SandtreeError:
        # The command has ended or closed its input: what is left of the input is not wanted.
        return
    finally:
        close = getattr(source, "aclose", None)
        if close is not None:
            await close()


async def _chunks(source: StdinSource) -> Any:
    if isinstance(source, (str, bytes)):
        yield source.encode() if isinstance(source, str) else source
        return
    async for chunk in source:
        yield chunk


def check_stdin(source: object) -> None:
    if source is not None and not isinstance(source, (str, bytes, AsyncIterable)):
        raise TypeError(
            f"stdin must be str, bytes or an async iterable of bytes, got {type(source).__name__}"
        )


def _translated(result: sandtree.ExecuteResult, timeout: float) -> ExecuteResult:
    if result.timed_out:
        reason = f"Command timed out after {timeout:g} seconds"
        return ExecuteResult(result.stdout, _joined(result.stderr, reason), -1)
    code = -1 if result.signal is not None else result.exit_code
    return ExecuteResult(result.stdout, result.stderr, code)


def _joined(text: str, reason: str) -> str:
    return reason if not text or text.endswith("\n") and not text.strip() else f"{text.rstrip()}\n{reason}"


async def _lacks_user(
    sandbox: sandtree.Sandbox, user: str | None, error: sandtree.SandtreeError
) -> bool:
    if user is None or error.code != "command_not_started":
        return False
    try:
        accounts = await sandbox.files.read_text("/etc/passwd")
    except sandtree.SandtreeError:
        return False
    return not any(line.startswith(f"{user}:") for line in accounts.splitlines())
