"""Writes a running sandbox as a save of Quicksand.

Sandtree exports the disk as an archive without the image: one qcow2 for each layer on it. The layers become the overlays
of the save. If the sandbox came from a save, the overlays of that one come first.

When it fails: nothing is left, and an existing save is as it was.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import tarfile
from pathlib import Path
from typing import IO

import sandtree

from .. import _qcow2
from .._constants import FilePatterns
from .._store import Found
from .._types import SandboxConfig, SaveManifest
from ..host.arch import _detect_architecture
from ..qemu import save as saves

_ARCHIVE = "snapshot.tar"


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
        await sandbox.host.export(sandbox.id, staged / _ARCHIVE, plain=True, without_image=True)
        fields = manifest.model_dump(mode="json")
        rootfs = found.rootfs if found.below else await _rootfs(sandbox)
        if rootfs is not None:
            fields["sandtree"] = {"rootfs": rootfs}
        (staged / FilePatterns.MANIFEST).write_text(json.dumps(fields, indent=2))
        await asyncio.to_thread(_convert, staged, found, compress)
        saves.publish(staged, target)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return manifest


async def _rootfs(sandbox: sandtree.Sandbox) -> str:
    """The digest of the root file system that the layers of the sandbox lie on."""
    image = await sandbox.host.image((await sandbox.info()).image_digest)
    return str(image.details["rootfs"])


def _convert(staged: Path, found: Found, compress: bool) -> None:
    """Makes the overlays of a save from the archive in the directory."""
    overlays = staged / FilePatterns.OVERLAYS_DIR
    overlays.mkdir()
    for number, below in enumerate(found.below):
        below.seek(0)
        with open(overlays / f"{number}.qcow2", "wb") as copy:
            shutil.copyfileobj(below, copy, 1 << 20)
    with tarfile.open(staged / _ARCHIVE) as archive:
        described = json.loads(_file(archive, "manifest.json").read())
        for number, layer in enumerate(described["disk"]["layers"], len(found.below)):
            place = overlays / f"{number}.qcow2"
            with _file(archive, f"blobs/{layer['digest']}") as blob, open(place, "wb") as copy:
                shutil.copyfileobj(blob, copy, 1 << 20)
            if compress:
                _compress(place)
    (staged / _ARCHIVE).unlink()


def _file(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    found = archive.extractfile(name)
    if found is None:
        raise RuntimeError(f"the export has no file {name}")
    return found


def _compress(overlay: Path) -> None:
    plain = overlay.with_suffix(".plain")
    overlay.rename(plain)
    _qcow2.compress(plain, overlay)
    plain.unlink()
