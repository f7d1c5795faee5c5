"""Writes a running sandbox as a save of Quicksand.

Sandtree saves the disk as a snapshot's directory: the image, and one qcow2 for each layer on it. The layers become the
overlays of the save. If the sandbox came from a save, the overlays of that one come first.

When it fails: nothing is left, and an existing save is as it was.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from pathlib import Path

import sandtree

from .. import _qcow2
from .._constants import FilePatterns
from .._store import Found
from .._types import SandboxConfig, SaveManifest
from ..host.arch import _detect_architecture
from ..qemu import save as saves

_SNAPSHOT = "snapshot"


def place_of(name: str, workspace: str | Path | None) -> Path:
    """The directory of a save."""
    parent = Path(workspace) if workspace else Path.cwd() / saves.SAVES_DIR
    return parent / saves.check_name(name)


async def write(
    sandbox: sandtree.Sandbox, found: Found, config: SandboxConfig, target: Path, *, compress: bool
) -> SaveManifest:
    """Saves a sandbox; an existing save is replaced when the new one is complete."""
    manifest = SaveManifest(
        version=saves.SAVE_VERSION,
        config=config.model_copy(update={"image": found.name, "mounts": []}),
        arch=str(_detect_architecture()),
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    staged.mkdir()
    try:
        await sandbox.save(_SNAPSHOT, workspace=staged)
        await asyncio.to_thread(_convert, staged, found, manifest, compress)
        saves.publish(staged, target)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return manifest


def _convert(staged: Path, found: Found, manifest: SaveManifest, compress: bool) -> None:
    """Makes a save of the snapshot in the directory."""
    snapshot = staged / _SNAPSHOT
    described = json.loads((snapshot / "manifest.json").read_text())
    overlays = staged / FilePatterns.OVERLAYS_DIR
    overlays.mkdir()
    for number, below in enumerate(found.below):
        below.seek(0)
        with open(overlays / f"{number}.qcow2", "wb") as copy:
            shutil.copyfileobj(below, copy, 1 << 20)
    for number, layer in enumerate(described["disk"]["layers"], len(found.below)):
        blob = snapshot / "blobs" / layer["digest"]
        place = overlays / f"{number}.qcow2"
        if compress:
            _qcow2.compress(blob, place)
        else:
            blob.rename(place)
    fields = manifest.model_dump(mode="json")
    rootfs = found.rootfs if found.below else _rootfs(snapshot, described["image"]["digest"])
    if rootfs is not None:
        fields["sandtree"] = {"rootfs": rootfs}
    (staged / FilePatterns.MANIFEST).write_text(json.dumps(fields, indent=2))
    shutil.rmtree(snapshot)


def _rootfs(snapshot: Path, image: str) -> str:
    """The digest of the root file system that the layers lie on."""
    described = json.loads((snapshot / "blobs" / image).read_text())
    return str(described["rootfs"]["digest"])
