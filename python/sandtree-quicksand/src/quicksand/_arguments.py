"""What the commands share: their types, and the arguments that several have."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from quicksand_core import Mount

Work = Callable[[argparse.Namespace], int]

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = argparse._SubParsersAction


def add_command(commands: Commands, name: str, help: str, work: Work) -> argparse.ArgumentParser:
    """A command with its function."""
    parser = commands.add_parser(name, help=help)
    parser.set_defaults(work=work)
    return parser


def mount(text: str) -> Mount:
    """HOST:GUEST[:TYPE]. Raises ValueError."""
    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(parts):
        raise ValueError(f"Invalid mount format: {text} (expected HOST:GUEST[:TYPE])")
    kind = parts[2] if len(parts) == 3 else "cifs"
    if kind == "cifs":
        return Mount(parts[0], parts[1])
    if kind == "9p":
        return Mount(parts[0], parts[1], type="9p")
    raise ValueError(f"Invalid mount type: {kind} (expected cifs or 9p)")
