"""`quicksand run`: a shell in a new sandbox, line by line."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import importlib
import logging
import sys
from pathlib import Path
from typing import Any

from quicksand._arguments import Commands, add_command, mount
from quicksand_core import Accelerator, Forward, Guest, Host, NetworkMode, Sandbox

_NETWORKS = {
    "none": NetworkMode.NONE,
    "mounts-only": NetworkMode.MOUNTS_ONLY,
    "full": NetworkMode.FULL,
}
_LEVELS = ["debug", "info", "warning", "error"]
_PORTS = "[SRC_ADDR:]SRC_PORT:[DST_ADDR:]DST_PORT"


def register(commands: Commands) -> None:
    parser = add_command(commands, "run", "Run an interactive shell in a sandbox", cmd)
    add = parser.add_argument
    every = functools.partial(add, action="append", default=[])
    add("image", metavar="IMAGE", help="Image to boot: base name, overlay package, save name, or path")
    add("--arch", help="Target architecture; only the host's is supported")
    add("-o", "--output", metavar="NAME_OR_PATH", help="Save sandbox state on exit (name or path)")
    add("--memory", default="512M", help="Memory allocation (default: 512M)")
    add("--cpus", type=int, default=1, help="Number of CPUs (default: 1)")
    every("-v", "--mount", metavar="HOST:GUEST", help="Mount host directory into sandbox (repeatable)")
    add("--network", choices=list(_NETWORKS), default="mounts-only", help="Network mode (default: mounts-only)")
    every("-p", "--port", metavar=_PORTS, help="Expose a guest port on the host, HOST:GUEST (repeatable)")
    every("-g", "--guest-port", metavar=_PORTS, help="Expose a host port inside the guest, GUEST:HOST (repeatable)")
    add("--boot-timeout", type=float, help="Boot timeout in seconds")
    add("--accel", choices=["auto", *Accelerator, "none"], default="auto", help="Hardware acceleration (default: auto)")
    add("--disk-size", help="Resize disk (e.g., '2G', '4G')")
    add("--enable-display", action="store_true", help="Enable virtual display, for VNC clients on 127.0.0.1")
    every("--extra-args", metavar="ARG", help="Extra QEMU argument (repeatable)")
    add("--log-level", choices=_LEVELS, default="warning", help="Log level (default: warning)")


def _parse_forward(spec: str, *, guest_to_host: bool) -> Forward:
    """A forward from [ADDRESS:]PORT:[ADDRESS:]PORT, source first. Raises ValueError."""
    try:
        source, target = _endpoints(spec.split(":"))
        if guest_to_host:
            return Forward(Guest(*source), Host(*target))
        return Forward(Host(*source), Guest(*target))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{spec} ({error}; expected {_PORTS})") from error


def _endpoints(parts: list[str]) -> tuple[tuple[str | None, int], tuple[str | None, int]]:
    if len(parts) == 2:
        return (None, int(parts[0])), (None, int(parts[1]))
    if len(parts) == 3 and parts[0].isdigit():
        return (None, int(parts[0])), (parts[1], int(parts[2]))
    if len(parts) == 3:
        return (parts[0], int(parts[1])), (None, int(parts[2]))
    if len(parts) == 4:
        return (parts[0], int(parts[1])), (parts[2], int(parts[3]))
    raise ValueError("wrong number of fields")


def cmd(args: argparse.Namespace) -> int:
    logging.basicConfig(level=args.log_level.upper(), format="%(name)s: %(message)s")
    try:
        options = _options(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return asyncio.run(_run(Sandbox(image=args.image, **options), args))


def _options(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {
        "memory": args.memory,
        "cpus": args.cpus,
        "mounts": [mount(each) for each in args.mount],
        "network_mode": _NETWORKS[args.network],
        "port_forwards": _forwards("-p", args.port) + _forwards("-g", args.guest_port),
        "extra_qemu_args": args.extra_args,
        "accel": None if args.accel == "none" else args.accel,
        "enable_display": args.enable_display,
    }
    given = {"boot_timeout": args.boot_timeout, "disk_size": args.disk_size, "arch": args.arch}
    return {**options, **{key: value for key, value in given.items() if value is not None}}


def _forwards(flag: str, specs: list[str]) -> list[Forward]:
    try:
        return [_parse_forward(spec, guest_to_host=flag == "-g") for spec in specs]
    except ValueError as error:
        raise ValueError(f"Invalid {flag} forward: {error}") from error


async def _run(sandbox: Sandbox, args: argparse.Namespace) -> int:
    print(f"Starting {args.image} sandbox...")
    async with sandbox:
        if sandbox.vnc_port is not None:
            print(f"Display: vnc://127.0.0.1:{sandbox.vnc_port}")
        print("Welcome to quicksand! Type 'exit' to quit.\n")
        try:
            await _shell(sandbox)
        except KeyboardInterrupt:
            print("\nInterrupted.")
        if args.output:
            await _save(sandbox, args.output)
        print("\nStopping sandbox...")
    return 0


async def _save(sandbox: Sandbox, output: str) -> None:
    """A name is saved in the working directory's saves, a path where it says."""
    print(f"\nSaving as: {output}...")
    path = Path(output)
    await sandbox.save(path.name, workspace=path.parent if "/" in output else None)
    print(f"Saved: {output}")


async def _shell(sandbox: Sandbox) -> None:
    with contextlib.suppress(ImportError):
        # Gives `input` an editor of lines.
        importlib.import_module("readline")
    while True:
        try:
            line = await asyncio.to_thread(input, "$ ")
        except EOFError:
            return
        if line.strip() in ("exit", "quit"):
            return
        if line.strip():
            await _execute(sandbox, line)


async def _execute(sandbox: Sandbox, line: str) -> None:
    shown: list[str] = []

    def show_error(text: str) -> None:
        shown.append(text)
        print(text, end="", file=sys.stderr, flush=True)

    result = await sandbox.execute(
        line, on_stdout=lambda text: print(text, end="", flush=True), on_stderr=show_error
    )
    if result.exit_code == -1 and result.stderr != "".join(shown):
        print(result.stderr, file=sys.stderr)
