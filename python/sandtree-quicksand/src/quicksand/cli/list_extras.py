"""`quicksand list`: the installed image packages."""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, version

from quicksand._arguments import Commands, add_command

from .install import ALIASES


def register(commands: Commands) -> None:
    parser = add_command(commands, "list", "List installed quicksand extras", cmd)
    parser.add_argument("--all", action="store_true", help="Also show extras that are not installed")


def cmd(args: argparse.Namespace) -> int:
    print(f"quicksand {_version('sandtree-quicksand') or '(not installed)'} (sandtree-quicksand)\n")
    rows = _rows(show_all=args.all)
    for row in rows:
        print(row)
    if not rows:
        print("  (no extras installed — use `quicksand install` to add some)")
    return 0


def _rows(*, show_all: bool) -> list[str]:
    width = max(map(len, ALIASES))
    rows = []
    for alias, packages in ALIASES.items():
        versions = {package: _version(package) for package in packages}
        if not any(versions.values()):
            rows += [f"  {alias:<{width}}  (not installed)"] if show_all else []
            continue
        for number, (package, found) in enumerate(versions.items()):
            label = "" if number else alias
            rows.append(f"  {label:<{width}}  {package} {found or '(not installed)'}")
    return rows


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
