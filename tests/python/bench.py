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


def used_s(whose=resource.RUSAGE_SELF):
    usage = resource.getrusage(whose)
    return usage.ru_utime + usage.ru_stime


def started_s(line):
    """Wall and processor time of an interpreter that runs a line."""
    before = used_s(resource.RUSAGE_CHILDREN)
    wall = seconds([sys.executable, "-c", line])
    return wall, used_s(resource.RUSAGE_CHILDREN) - before


def import_ms():
    """What `import sandtree` adds to the start of an interpreter: wall and processor time."""
    bare, with_it = [], []
    for _ in range(4 * ROUNDS):
        bare.append(started_s("pass"))
        with_it.append(started_s("import sandtree"))
    medians = [[statistics.median(times) for times in zip(*each)] for each in (bare, with_it)]
    return [(longer - shorter) * 1000 for shorter, longer in zip(*medians)]


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
    wall, own = import_ms()
    rows = [("import sandtree", f"{wall:.1f} ms", "< 50 ms")]
    rows.append(("... processor time", f"{own:.1f} ms", ""))
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
