"""Measures the Python package: `make bench-python`. Prints one table; ratios count, because machines are noisy.

A figure and its peer are measured in turn.
"""

import asyncio
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from sandtree import Sandbox, _process

ROUNDS = 5
COMMANDS = 100
STREAM_MB = 256
STREAM = ["dd", "if=/dev/zero", "bs=1M", f"count={STREAM_MB}"]


def seconds(command):
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def import_ms():
    """What `import sandtree` adds to the start of an interpreter."""
    bare, with_it = [], []
    for _ in range(4 * ROUNDS):
        bare.append(seconds([sys.executable, "-c", "pass"]))
        with_it.append(seconds([sys.executable, "-c", "import sandtree"]))
    return (statistics.median(with_it) - statistics.median(bare)) * 1000


def used_s():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def execute_ms(sb):
    """Wall time of a command, and the processor time of this process for it: more than that cannot be ours."""
    walls = []
    before = used_s()
    for _ in range(COMMANDS):
        began = time.perf_counter()
        await sb.execute("true")
        walls.append(time.perf_counter() - began)
    return statistics.median(walls) * 1000, (used_s() - before) / COMMANDS * 1000


async def streamed(sb):
    began = time.perf_counter()
    count = 0
    async for piece in sb.exec(*STREAM).output():
        count += len(piece.data) if piece.stream == "stdout" else 0
    assert count == STREAM_MB << 20
    return STREAM_MB / (time.perf_counter() - began)


def by_program(sb):
    return STREAM_MB / seconds([_process.program(), "exec", sb.name, "--", *STREAM])


async def main():
    rows = [("import sandtree", f"{import_ms():.1f} ms", "< 50 ms")]
    async with Sandbox("tiny") as sb:
        await sb.execute("true")
        wall, own = await execute_ms(sb)
        rows.append(("execute('true'), whole", f"{wall:.1f} ms", ""))
        rows.append(("... processor time of this process", f"{own:.2f} ms", "< 1 ms"))
        ours, theirs = [], []
        for _ in range(ROUNDS):
            ours.append(await streamed(sb))
            theirs.append(by_program(sb))
        ratio = statistics.median(ours) / statistics.median(theirs)
        rows.append(("stdout", f"{statistics.median(ours):.0f} MiB/s", ""))
        rows.append(("... as a ratio to the program's", f"{ratio:.2f}", ">= 0.8"))
    print(f"Python {sys.version.split()[0]}, load {os.getloadavg()[0]:.1f}")
    for name, value, target in rows:
        print(f"{name:<40} {value:>14}  {target}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="sandtree-bench-") as home:
        base = os.environ.get("SANDTREE_TEST_BASE")
        store = os.path.join(home, "store")
        if base:
            shutil.copytree(base, store, copy_function=os.link, ignore=shutil.ignore_patterns("lock"))
        os.environ["SANDTREE_HOME"] = store
        asyncio.run(main())
