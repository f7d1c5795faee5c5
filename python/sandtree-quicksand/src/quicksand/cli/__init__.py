"""The command `quicksand`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from quicksand import _arguments

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    from quicksand import benchmark

    from . import clean, dev, install, list_extras, qemu, run, uninstall

    parser = argparse.ArgumentParser(prog="quicksand", description="A VM harness for AI agents.")
    commands = parser.add_subparsers(dest="command")
    for module in (run, install, uninstall, list_extras, clean, qemu, dev, benchmark):
        module.register(commands)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    work: _arguments.Work = args.work
    try:
        return work(args)
    except (RuntimeError, ValueError, OSError) as error:
        print(f"quicksand: {error}", file=sys.stderr)
        return 1
