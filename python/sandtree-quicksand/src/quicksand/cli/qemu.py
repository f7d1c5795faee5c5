"""`quicksand qemu`: which QEMU is used, and how to get one."""

from __future__ import annotations

import argparse
import subprocess

from quicksand._arguments import Commands, add_command
from quicksand_core.qemu.installer import install_qemu
from quicksand_core.qemu.platform import get_runtime


def register(commands: Commands) -> None:
    parser = add_command(commands, "qemu", "Show QEMU installation info or install QEMU", cmd)
    parser.add_subparsers(dest="qemu_command").add_parser(
        "install", help="Install QEMU via system package manager"
    )


def cmd(args: argparse.Namespace) -> int:
    if args.qemu_command == "install":
        try:
            install_qemu()
        except RuntimeError as error:
            print(f"Failed to install QEMU: {error}")
            return 1
        print("QEMU installed successfully.")
    return _status()


def _status() -> int:
    try:
        runtime = get_runtime()
    except RuntimeError as error:
        print(f"QEMU not available: {error}")
        return 1
    print("Source: system")
    print(f"Path: {runtime.qemu_binary}")
    try:
        shown = subprocess.run([runtime.qemu_binary, "--version"], capture_output=True, text=True)
    except OSError as error:
        print(f"Version: unknown ({error})")
        return 1
    print(f"Version: {shown.stdout.strip().splitlines()[0] if shown.stdout else 'unknown'}")
    return 0
