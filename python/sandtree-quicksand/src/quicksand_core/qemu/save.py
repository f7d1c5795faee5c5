"""Save directories: how they are read and written.

    NAME/manifest.json       version 6; our own saves add "sandtree": {"rootfs": DIGEST}
    NAME/overlays/N.qcow2    what was written to the disk of the base image, oldest first

The digest names the root file system that the overlays lie on, so that a save is never read on another version of its
base. Quicksand ignores it.

Always: a save is complete, or it is not there. It is written into a directory with another name. An existing save and
the new one change places at once; where the file system cannot do that, by renames: if the process dies between them,
the old save is at `.NAME.old`.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

from .._constants import FilePatterns
from .._types import SaveManifest

SAVES_DIR = ".quicksand/sandboxes"
"""Where saves are, from the working directory."""
SAVE_VERSION = 6

_MAX_MANIFEST_BYTES = 1 << 20
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def check_name(name: str) -> str:
    """Refuses a name that would place a save outside of its workspace."""
    if not name or name in (".", "..") or "/" in name or "\0" in name or name.startswith("."):
        raise ValueError(
            f"Invalid save name {name!r}: it must be one file name, without '/' and not beginning with '.'"
        )
    return name


def read_manifest(directory: Path) -> dict[str, Any]:
    """The fields of a manifest, also those that Quicksand does not know."""
    path = directory / FilePatterns.MANIFEST
    if not path.is_file():
        raise ValueError(f"Missing {FilePatterns.MANIFEST} in save: {directory}")
    with open(path, "rb") as file:
        text = file.read(_MAX_MANIFEST_BYTES + 1)
    if len(text) > _MAX_MANIFEST_BYTES:
        raise ValueError(f"{path} is larger than 1 MiB")
    # The checks of the model come first: their messages are those of Quicksand.
    SaveManifest.model_validate_json(text)
    return json.loads(text)  # type: ignore[no-any-return]


def base_digest(directory: Path) -> str | None:
    """The digest of the disk that the overlays of one of our own saves lie on."""
    extension = read_manifest(directory).get("sandtree")
    rootfs = extension.get("rootfs") if isinstance(extension, dict) else None
    return rootfs if isinstance(rootfs, str) else None


def validate(directory: Path) -> SaveManifest:
    """The manifest of a save. Raises ValueError if the save cannot be one."""
    if not directory.is_dir():
        raise ValueError(f"Save path is not a directory: {directory}")
    manifest = SaveManifest.model_validate(read_manifest(directory))
    if manifest.version > SAVE_VERSION:
        raise ValueError(
            f"Save version {manifest.version} is newer than supported version {SAVE_VERSION}"
        )
    overlay_files(directory)
    return manifest


def overlay_files(directory: Path) -> list[Path]:
    """The overlays of a save, oldest first."""
    overlays = directory / FilePatterns.OVERLAYS_DIR
    if not overlays.is_dir():
        raise ValueError(f"Missing {FilePatterns.OVERLAYS_DIR}/ directory in save: {directory}")
    found = list(overlays.glob("*.qcow2"))
    if not found:
        raise ValueError(f"No overlay files found in {overlays}")
    return sorted(found, key=_order)


def _order(path: Path) -> tuple[int, str]:
    # As texts, 10 would precede 2.
    return (int(path.stem), "") if path.stem.isdecimal() else (1 << 62, path.name)


def publish(staged: Path, target: Path) -> None:
    """Puts a finished save at its place; an existing one is replaced."""
    _sync_all(staged)
    if not target.exists() and not target.is_symlink():
        staged.rename(target)
        _sync(target.parent)
        return
    if not (target / FilePatterns.MANIFEST).is_file():
        raise ValueError(f"{target} exists and is not a save; it is not replaced")
    if not _exchange(staged, target):
        old = target.with_name(f".{target.name}.old")
        _remove(old)
        target.rename(old)
        staged.rename(target)
        old.rename(staged)
    _sync(target.parent)
    _remove(staged)


def _exchange(one: Path, other: Path) -> bool:
    """Lets two files change places. Returns False if their file system cannot do that."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _sync_all(directory: Path) -> None:
    for path in directory.rglob("*"):
        _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
