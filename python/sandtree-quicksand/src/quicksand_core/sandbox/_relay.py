"""Forwards of TCP connections that Sandtree's published ports do not cover.

Host to guest, on another address than 127.0.0.1: a listener of this process, connected to a forward of Sandtree.

Guest to host: the guest has no way out, so connections travel as commands of the sandbox:

    client ──► listener in the guest ──► handler, for each connection: two pipes in a directory of /run/.quicksand
                                              │ writes the directory's name into the pipe `accept`
    host ◄──► two commands for each connection: one prints the pipe `up`, one fills the pipe `down`

The listener is `python3` or the `nc` of busybox, whichever the guest has. Its address is added to the loopback device.
The smaller build of `nc` listens on all addresses of the guest.

Always: a connection ends when the server on the host closes it, and the end of the client's data reaches the server.
After a revert the listeners are started again; connections from before are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
from collections.abc import AsyncIterator

import sandtree

from .._forwards import Forward

logger = logging.getLogger("quicksand.sandbox")

_CHUNK_BYTES = 64 << 10
_ROOT = "/run/.quicksand"

# stdin and stdout are the connection. `dd` reads from descriptor 3, because a shell gives background commands an empty
# stdin. It is not `cat`: that of busybox uses sendfile, which locks the pipe while it waits for the socket. Both copies
# run in the background, because a shell handles a signal only between commands.
_HANDLER = """#!/bin/sh
dir=$(mktemp -d {dir}/c.XXXXXX) || exit 1
mkfifo "$dir/up" "$dir/down"
echo $$ >"$dir/pid"
exec 3<&0
dd bs=65536 <&3 >"$dir/up" 2>/dev/null &
up=$!
cat "$dir/down" &
down=$!
trap 'kill "$down" 2>/dev/null' TERM
echo "$dir" >{dir}/accept
wait "$down"
kill "$up" 2>/dev/null
rm -rf "$dir"
"""

_PYTHON = """
import socket, subprocess
listener = socket.create_server(({address!r}, {port}), backlog=128)
while True:
    connection = listener.accept()[0]
    subprocess.Popen(["/bin/sh", {handler!r}], stdin=connection, stdout=connection)
    connection.close()
"""

_SETUP = """
set -e
cat {dir}/pids {dir}/c.*/pid 2>/dev/null | while read pid; do kill "$pid" 2>/dev/null || true; done
rm -rf {dir}
mkdir -p -m 0700 {dir}
mkfifo {dir}/accept
ip address add {address}/32 dev lo 2>/dev/null || true
cat >{dir}/handler
chmod 0700 {dir}/handler
"""

_LISTEN = """
if command -v python3 >/dev/null; then
  exec python3 -c {python}
elif nc --help 2>&1 | grep -q -- '-lk.*persistent'; then
  exec nc -lk -s {address} -p {port} -e /bin/sh {handler}
elif nc --help 2>&1 | grep -q -- '-ll.*persistent'; then
  exec nc -ll -p {port} -e /bin/sh {handler}
else
  echo 'neither python3 nor the nc of busybox is in the guest' >&2
  exit 127
fi
"""

_LISTENS = """
for try in 1 2 3 4 5 6 7 8 9 10; do
  cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | grep -qE '{wanted}' && exit 0
  sleep 0.2
done
exit 1
"""

# The pipe is opened for reading and writing, so that it never ends.
_ACCEPT = "echo $$ >>{dir}/pids; exec 3<>{dir}/accept; exec cat <&3"

_DOWN = 'cat >"$1/down"'


class GuestForward:
    """A listener in the guest, whose connections reach an address of the host."""

    def __init__(self, sandbox: sandtree.Sandbox, forward: Forward) -> None:
        self._sandbox = sandbox
        self._forward = forward
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        guest = self._forward.guest
        place = {"dir": f"{_ROOT}/{guest.port}-{guest.address}", "address": guest.address}
        prepared = await self._sandbox.execute(
            _SETUP.format(**place), cwd="/", stdin=_HANDLER.format(**place)
        )
        if prepared.exit_code != 0:
            raise RuntimeError(f"cannot listen in the guest: {prepared.stderr.strip()}")
        handler = f"{place['dir']}/handler"
        python = _PYTHON.format(address=guest.address, port=guest.port, handler=handler)
        listen = _LISTEN.format(
            python=shlex.quote(python), address=guest.address, port=guest.port, handler=handler
        )
        line = f"echo $$ >>{place['dir']}/pids; {listen}"
        listening = self._sandbox.exec("/bin/sh", "-c", line, cwd="/")
        await listening.start()
        self._spawn(self._watch(listening))
        accepting = self._sandbox.exec("/bin/sh", "-c", _ACCEPT.format(**place), cwd="/")
        await accepting.start()
        self._spawn(self._accept(accepting))
        await self._listens()

    async def _listens(self) -> None:
        """Waits until the guest's kernel shows the listener."""
        wanted = f":{self._forward.guest.port:04X} 0+:0000 0A"
        found = await self._sandbox.execute(_LISTENS.format(wanted=wanted), cwd="/", timeout=30)
        if found.exit_code != 0:
            guest = self._forward.guest
            raise RuntimeError(
                f"nothing listens on {guest.address}:{guest.port} in the guest: a forward from the guest needs python3 "
                "or the nc of busybox there"
            )

    async def _watch(self, listening: sandtree.Command) -> None:
        ended = await listening.wait()
        logger.warning("the listener of %s in the guest ended: %s", self._forward, ended.stderr.strip())

    async def _accept(self, accepting: sandtree.Command) -> None:
        async for directory in accepting.lines():
            self._spawn(self._connect(str(directory)))

    async def _connect(self, directory: str) -> None:
        host = self._forward.host
        up = self._sandbox.exec("cat", f"{directory}/up", cwd="/")
        down = self._sandbox.exec("/bin/sh", "-c", _DOWN, "sh", directory, cwd="/", stdin=True)
        async with up, down:
            try:
                reader, writer = await asyncio.open_connection(host.address, host.port)
                async with _closing(writer):
                    await _relayed(reader, writer, up, down)
            except OSError as error:
                logger.warning("a connection of the guest to %s:%s failed: %s", host.address, host.port, error)
                await self._sandbox.execute(f"kill $(cat {directory}/pid)", cwd="/")

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _logged(work: object) -> None:
    try:
        await work  # type: ignore[misc]
    except (OSError, sandtree.SandtreeError) as error:
        logger.debug("a forward ended: %s", error)


async def _relayed(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    up: sandtree.Command,
    down: sandtree.Command,
) -> None:
    """Copies in both directions until the server on the host has ended its answer."""
    sending = asyncio.ensure_future(_to_host(up, writer))
    try:
        with contextlib.suppress(ConnectionResetError):
            while chunk := await reader.read(_CHUNK_BYTES):
                await down.write(chunk)
        await down.close_stdin()
        await down.wait()
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def _to_host(up: sandtree.Command, writer: asyncio.StreamWriter) -> None:
    async for piece in up.output():
        if piece.stream == "stdout":
            writer.write(piece.data)
            await writer.drain()
    writer.write_eof()


class HostForward:
    """A listener on an address of the host other than 127.0.0.1."""

    def __init__(self, sandbox: sandtree.Sandbox, forward: Forward) -> None:
        self._sandbox = sandbox
        self._forward = forward
        self._inner: sandtree.Forward | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._inner = await self._sandbox.forward(self._forward.guest.port)
        host = self._forward.host
        self._server = await asyncio.start_server(self._serve, host.address, host.port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._inner is not None
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._inner.port)
        except OSError:
            writer.close()
            return
        async with _closing(inner_writer), _closing(writer):
            await asyncio.gather(
                _copy(reader, inner_writer), _copy(inner_reader, writer), return_exceptions=True
            )

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._inner is not None:
            await self._inner.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
    writer.write_eof()


@contextlib.asynccontextmanager
async def _closing(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    try:
        yield
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
