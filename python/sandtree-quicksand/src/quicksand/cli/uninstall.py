"""`quicksand uninstall`: removes image packages."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable

from quicksand._arguments import Commands, add_command

from .install import ALIASES


def _resolve(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(each for name in names for each in ALIASES.get(name, [name])))


def uninstall(*names: str) -> None:
    """Removes packages by name or alias. Raises RuntimeError if pip fails."""
    if not names:
        raise ValueError("At least one name is required")
    packages = _resolve(names)
    if _uninstall_packages(packages) != 0:
        raise RuntimeError(f"Failed to uninstall packages: {packages}")


def register(commands: Commands) -> None:
    parser = add_command(commands, "uninstall", "Uninstall quicksand extras", cmd)
    parser.add_argument(
        "names", nargs="+", metavar="NAME", help=f"Packages to uninstall. Aliases: {', '.join(ALIASES)}."
    )


def cmd(args: argparse.Namespace) -> int:
    return _uninstall_packages(_resolve(args.names))


def _uninstall_packages(packages: list[str]) -> int:
    print(f"Uninstalling: {', '.join(packages)}")
    pip = [sys.executable, "-m", "pip", "uninstall", "-y", *packages]
    if subprocess.run(pip).returncode != 0:
        print("\nError: pip uninstall failed.")
        return 1
    print(f"\nUninstalled {len(packages)} package(s)")
    return 0
