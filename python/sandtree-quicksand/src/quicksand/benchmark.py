"""`quicksand benchmark`: how long sandboxes take to start."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time

from pydantic import BaseModel, ConfigDict

from quicksand._arguments import Commands, add_command, mount
from quicksand.cli.install import install
from quicksand_core import BootTiming, Mount, Sandbox


class BootSample(BaseModel):
    """One start."""

    model_config = ConfigDict(frozen=True)

    iteration: int
    boot_time_s: float


class BenchmarkResult(BaseModel):
    """All starts, and their distribution."""

    model_config = ConfigDict(frozen=True)

    image: str
    iterations: int
    qemu_command: list[str]
    samples: list[BootSample]
    boot_timing: BootTiming | None
    min_s: float
    p50_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    max_s: float

    def __str__(self) -> str:
        lines = ["Quicksand Boot Benchmark", f"  Image:       {self.image}", f"  Iterations:  {self.iterations}", ""]
        lines += ["QEMU Command:", f"  {' '.join(self.qemu_command) or '(not captured)'}", ""]
        for sample in self.samples:
            filled = int(min(sample.boot_time_s / self.max_s, 1.0) * 20) if self.max_s else 0
            bar = "█" * filled + "░" * (20 - filled)
            lines.append(f"  #{sample.iteration + 1:<3} {bar} {sample.boot_time_s:>7.3f}s")
        lines.append("")
        for label in ("min", "p50", "p90", "p95", "p99", "max"):
            lines.append(f"  {label:<4} {getattr(self, f'{label}_s'):>7.3f}s")
        if self.boot_timing:
            lines += ["", "Boot Phase Breakdown (last run):", str(self.boot_timing)]
        return "\n".join(lines)


async def benchmark(
    image: str,
    *,
    iterations: int = 5,
    install_extras: list[str] | None = None,
    mounts: list[Mount] | None = None,
) -> BenchmarkResult:
    """Starts an image several times and measures each start."""
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    if install_extras:
        install(*install_extras)
    samples = []
    for number in range(iterations):
        _print_progress(number, iterations)
        sandbox = Sandbox(image=image, mounts=mounts or [])
        began = time.perf_counter()
        await sandbox.start()
        samples.append(BootSample(iteration=number, boot_time_s=round(time.perf_counter() - began, 4)))
        await sandbox.stop()
    _print_progress(iterations, iterations)
    sys.stderr.write("\n")
    times = sorted(each.boot_time_s for each in samples)
    ranks = {f"p{rank}_s": _percentile(times, rank) for rank in (50, 90, 95, 99)}
    return BenchmarkResult(
        image=image,
        iterations=iterations,
        qemu_command=sandbox.qemu_command or [],
        boot_timing=sandbox.boot_timing,
        samples=samples,
        min_s=times[0],
        max_s=times[-1],
        **ranks,
    )


def _percentile(ordered: list[float], rank: float) -> float:
    place = rank / 100 * (len(ordered) - 1)
    below, above = math.floor(place), math.ceil(place)
    return round(ordered[below] + (ordered[above] - ordered[below]) * (place - below), 4)


def _print_progress(done: int, total: int) -> None:
    filled = 30 * done // total
    bar = "#" * filled + "-" * (30 - filled)
    sys.stderr.write(f"\r  {bar} {done / total * 100:5.1f}% ({done}/{total} iterations)")
    sys.stderr.flush()


def register(commands: Commands) -> None:
    parser = add_command(commands, "benchmark", "Benchmark sandbox boot times", cmd)
    parser.add_argument("image", help="Image to benchmark (e.g. ubuntu)")
    parser.add_argument("-n", "--iterations", type=int, default=5, help="Number of boot iterations (default: 5)")
    parser.add_argument(
        "-v", "--mount", action="append", default=[], metavar="HOST:GUEST[:TYPE]",
        help="Mount host directory into sandbox during boot (repeatable)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", dest="json_output", help="Output results as JSON")


def cmd(args: argparse.Namespace) -> int:
    mounts = [mount(each) for each in args.mount]
    result = asyncio.run(benchmark(args.image, iterations=args.iterations, mounts=mounts))
    print(result.model_dump_json(indent=2) if args.json_output else result)
    return 0
