"""`quicksand dev`: new image packages, by the scaffold packages of Quicksand."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from quicksand._arguments import Commands, add_command


def register(commands: Commands) -> None:
    parser = add_command(commands, "dev", "Development tools for building images and packages", cmd)
    parser.set_defaults(dev_parser=parser)
    scaffold = parser.add_subparsers(dest="dev_command").add_parser(
        "scaffold", help="Scaffold a new image package"
    )
    kinds = scaffold.add_subparsers(dest="scaffold_type")
    overlay = kinds.add_parser("overlay", help="Scaffold an overlay image package")
    overlay.add_argument("--base", required=True, help="Base image (e.g. ubuntu, alpine)")
    base = kinds.add_parser("base", help="Scaffold a base image package")
    for each in (overlay, base):
        each.add_argument("name", help="Package name (e.g. my-agent-sandbox)")
        each.add_argument("--output-dir", type=Path, default=None, help="Output directory")


def cmd(args: argparse.Namespace) -> int:
    if args.dev_command != "scaffold":
        args.dev_parser.print_help()
        return 0
    if args.scaffold_type is None:
        print("Usage: quicksand dev scaffold {overlay,base} ...", file=sys.stderr)
        return 1
    options = {"name": args.name, "output_dir": args.output_dir}
    if args.scaffold_type == "overlay":
        options["base"] = args.base
    return _scaffold(args.scaffold_type, options)


def _scaffold(kind: str, options: dict[str, object]) -> int:
    try:
        module = importlib.import_module(f"quicksand_{kind}_scaffold.scaffold")
    except ImportError:
        print(
            f"Error: quicksand-{kind}-scaffold is not installed.\n\nInstall with: quicksand install dev",
            file=sys.stderr,
        )
        return 1
    try:
        module.scaffold(**options)
    except (ValueError, FileExistsError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0
