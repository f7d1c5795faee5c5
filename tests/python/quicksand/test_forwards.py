"""Forwards in both directions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from quicksand import Forward, Guest, Host, Sandbox
from quicksand_core.utils import find_free_port

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE = "mkdir -p /www; echo page >/www/index.html; httpd -p 8000 -h /www"


@asynccontextmanager
async def server(answer_bytes: int = 0) -> AsyncIterator[int]:
    """A server of the host that answers with the size of what it got, or with this many bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got = await reader.readuntil(b"\r\n\r\n") if answer_bytes else await reader.read()
        head = b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * answer_bytes
        writer.write(head if answer_bytes else b"got %d" % len(got))
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        listening.close()


async def _get(address: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(address, port)
    writer.write(b"GET / HTTP/1.0\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer


async def test_from_the_host(store: str) -> None:
    local, wide = find_free_port(), find_free_port()
    forwards = [Forward(Host(local), Guest(8000)), Forward(Host("127.0.0.2", wide), Guest(8000))]
    async with Sandbox(image="tiny", port_forwards=forwards) as sandbox:
        await sandbox.execute(PAGE)
        for address, port in (("127.0.0.1", local), ("127.0.0.2", wide)):
            assert (await _get(address, port)).endswith(b"page\n")
        await sandbox.checkpoint("one")
        await sandbox.revert("one")
        for address, port in (("127.0.0.1", local), ("127.0.0.2", wide)):
            assert (await _get(address, port)).endswith(b"page\n")
    with pytest.raises(OSError):
        await _get("127.0.0.2", wide)


async def test_from_the_guest(store: str) -> None:
    async with server() as counting, server(answer_bytes=300_000) as web:
        forwards = [
            Forward(Guest(3128), Host(counting)),
            Forward(Guest("10.0.2.102:80"), Host("localhost", web)),
        ]
        async with Sandbox(image="tiny", port_forwards=forwards) as sandbox:
            for _ in range(2):
                await _reaches_both(sandbox)
                await sandbox.checkpoint("one")
                await sandbox.revert("one")
            assert (await sandbox.execute("ping -c 1 -w 2 8.8.8.8")).exit_code != 0


async def _reaches_both(sandbox: Sandbox) -> None:
    counted = await sandbox.execute("head -c 200000 /dev/zero | nc 10.0.2.101 3128", timeout=120)
    assert counted.stdout == "got 200000"
    fetch = "wget -q -O - http://10.0.2.102/ | wc -c"
    assert (await sandbox.execute(fetch, timeout=120)).stdout == "300000\n"
    together = await sandbox.execute(f"for i in 1 2 3 4; do {fetch} & done; wait", timeout=120)
    assert together.stdout == "300000\n" * 4


async def test_a_server_that_is_not_there(store: str) -> None:
    forward = Forward(Guest(3128), Host(find_free_port()))
    async with Sandbox(image="tiny", port_forwards=[forward]) as sandbox:
        answer = await sandbox.execute("echo hello | nc 10.0.2.101 3128", timeout=60)
        assert (answer.stdout, answer.stderr) == ("", "")


async def test_a_port_that_is_taken(store: str) -> None:
    async with server() as port:
        sandbox = Sandbox(image="tiny", port_forwards=[Forward(Host(port), Guest(80))])
        with pytest.raises(RuntimeError, match=str(port)):
            await sandbox.start()
    with pytest.raises(ValueError, match="10.0.2.15"):
        other = Forward(Host(find_free_port()), Guest("10.0.2.77", 80))
        await Sandbox(image="tiny", port_forwards=[other]).start()
