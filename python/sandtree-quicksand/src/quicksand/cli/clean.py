"""`quicksand clean`: removes saves."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from quicksand._arguments import Commands, add_command
from quicksand_core.utils import format_bytes


def clean(*, global_: bool = False) -> None:
    """Removes `.quicksand` in the working directory; with `global_` also in the home directory."""
    _remove(Path.cwd() / ".quicksand")
    if global_:
        _remove(Path.home() / ".quicksand")


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        return
    size = sum(each.lstat().st_size for each in path.rglob("*") if not each.is_symlink() and each.is_file())
    shutil.rmtree(path)
    print(f"  Removed {path} ({format_bytes(size)})")


def register(commands: Commands) -> None:
    parser = add_command(commands, "clean", "Remove quicksand data directories", cmd)
    parser.add_argument("--global", dest="global_", action="store_true", help="Also remove ~/.quicksand/")


def cmd(args: argparse.Namespace) -> int:
    clean(global_=args.global_)
    return 0
