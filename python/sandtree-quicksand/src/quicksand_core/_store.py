"""Images for sandboxes, in Sandtree's store.

    save            its base, then the save is imported on it as an image
    image package   its qcow2 is imported as an image, named after its content
    other names     an image or snapshot of the store; a mapping; else `debian` or `desktop`, and a
                    warning

Imported files keep nothing but their content: kernel and agent are Sandtree's own. A screen needs
the kernel `full`. An image that was imported before is found again by the digest of its files.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import sandtree

from . import _bundle
from ._constants import FilePatterns
from ._types import ResolvedImage, SandboxConfig
from .qemu import save as saves
from .qemu.image_resolver import ImageResolver, check_arch
from .utils.hashing import compute_file_sha256

VARIABLE = "SANDTREE_QUICKSAND_IMAGES"
"""Images for other names: "ubuntu=debian,alpine=my-alpine"."""
_BUILT_IN = ("browser", "debian", "desktop", "tiny")
SUBSTITUTES = {
    "alpine": "debian",
    "alpine-desktop": "desktop",
    "ubuntu": "debian",
    "ubuntu-desktop": "desktop",
}
"""Images for the names that Quicksand publishes. Any other name is more likely a mistake."""
_WITH_SCREEN = "desktop"
_CHUNK_BYTES = 1 << 20

_mapped: dict[str, str] = {}
_warned: set[str] = set()
_digests: dict[tuple[str, int, int], str] = {}


@dataclass(frozen=True)
class Found:
    """An image of Sandtree's store."""

    name: str
    """Its canonical name in Quicksand, for saves."""
    reference: str
    """Its name in the store."""
    rootfs: str | None = None
    """The digest of the disk that `below` lies on, if it is known."""
    below: list[BinaryIO] = field(default_factory=list)
    """The overlays of the save that it came from: a save of the new sandbox contains them, too."""
    is_substitute: bool = False
    """Whether it replaces an image of Quicksand, and lacks what those have."""

    def close(self) -> None:
        for file in self.below:
            file.close()


def map_image(name: str, to: str) -> None:
    """Uses the image `to` of Sandtree's store wherever a program asks for the image `name`.

    Example:
        map_image("ubuntu", "my-ubuntu")
    """
    _mapped[name] = to


def _mapping(name: str) -> str | None:
    if name in _mapped:
        return _mapped[name]
    for pair in os.environ.get(VARIABLE, "").split(","):
        key, separator, value = pair.partition("=")
        if separator and key.strip() == name:
            return value.strip()
    return None


async def find_image(config: SandboxConfig, host: sandtree.Host) -> Found:
    """The image that a sandbox starts from, imported if necessary."""
    kernel = "full" if config.enable_display else None
    if _bundle.is_bundle(config.image):
        with _bundle.unpacked(Path(config.image)) as directory:
            return await _from_save(directory, host, kernel)
    resolver = ImageResolver()
    found = resolver._find_save_dir(config.image)
    if found is not None:
        return await _from_save(found, host, kernel)
    package = resolver.find_package(config.image, arch=config.arch)
    if package is not None:
        return await _from_package(package, host, kernel)
    return await _from_store(config, host)


async def _from_save(directory: Path, host: sandtree.Host, kernel: str | None) -> Found:
    manifest = saves.validate(directory)
    check_arch(manifest)
    name = manifest.config.image
    rootfs = saves.base_digest(directory)
    base = await _base_of(name, host, rootfs, kernel)
    if base is None:
        raise _no_base(name)
    overlays = saves.overlay_files(directory)
    # Held open: the save may be replaced while the sandbox runs, even by the sandbox itself.
    below: list[BinaryIO] = [open(overlay, "rb") for overlay in overlays]
    found = Found(name, "", rootfs, below)
    try:
        reference = await _imported(base, overlays, host)
    except BaseException:
        found.close()
        raise
    return replace(found, reference=reference)


def _no_base(name: str) -> RuntimeError:
    return RuntimeError(
        f"Base image '{name}' not installed.\nInstall it with: quicksand install {name}"
    )


async def _base_of(
    name: str, host: sandtree.Host, rootfs: str | None, kernel: str | None
) -> Found | None:
    """The base of a save. Without the digest of its disk, only an image of the same name can be the base."""
    package = ImageResolver().find_package(name)
    if package is not None:
        return replace(await _from_package(package, host, kernel), rootfs=rootfs)
    if rootfs is not None or await _is_in_store(name, host):
        return Found(name, name, rootfs)
    return None


async def _from_package(package: ResolvedImage, host: sandtree.Host, kernel: str | None) -> Found:
    base, *overlays = package.chain
    reference = f"quicksand-{(await _digest(base))[:40]}{'-' + kernel if kernel else ''}"
    if not await _is_in_store(reference, host):
        await host.import_image(base, name=reference, kernel=kernel)
    found = Found(package.name, reference)
    if not overlays:
        return found
    return Found(package.name, await _imported(found, overlays, host))


async def _imported(base: Found, overlays: list[Path], host: sandtree.Host) -> str:
    """The image of overlays on a base."""
    parts = [base.reference, base.rootfs or ""]
    parts += [await _digest(overlay) for overlay in overlays]
    name = f"quicksand-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:40]}"
    if await _is_in_store(name, host):
        return name
    with _as_save(base, overlays) as directory:
        try:
            await host.import_image(directory, name=name)
        except sandtree.NotFound as error:
            if error.code == "no_save_base":
                raise _no_base(base.name) from error
            raise
    return name


@contextlib.contextmanager
def _as_save(base: Found, overlays: list[Path]) -> Iterator[Path]:
    """A save directory with these overlays, for the importer. The files are linked where that is possible."""
    near = overlays[0].parent if os.access(overlays[0].parent, os.W_OK) else None
    staged = Path(tempfile.mkdtemp(prefix=".sandtree-", dir=near))
    try:
        (staged / FilePatterns.OVERLAYS_DIR).mkdir()
        for number, overlay in enumerate(overlays):
            if overlay.is_symlink() or not overlay.is_file():
                raise ValueError(f"{overlay} is not a plain file")
            _place(overlay, staged / FilePatterns.OVERLAYS_DIR / f"{number}.qcow2")
        manifest: dict[str, object] = {"version": 6, "config": {"image": base.reference}}
        if base.rootfs is not None:
            manifest["sandtree"] = {"rootfs": base.rootfs}
        (staged / FilePatterns.MANIFEST).write_text(json.dumps(manifest))
        yield staged
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _place(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


async def _from_store(config: SandboxConfig, host: sandtree.Host) -> Found:
    name = config.image
    mapped = _mapping(name)
    if await _is_in_store(name, host) or (mapped is None and name in _BUILT_IN):
        return Found(name, name)
    if mapped is not None:
        return Found(name, mapped)
    substitute = SUBSTITUTES.get(name)
    if substitute is None:
        raise RuntimeError(
            f"Image not found: '{name}'\n"
            f"Not a local/global save and no matching entry point.\n"
            f"Install it with: quicksand install {name}"
        )
    if config.enable_display:
        substitute = _WITH_SCREEN
    _warn_once(name, substitute)
    return Found(name, substitute, is_substitute=True)


def _warn_once(name: str, substitute: str) -> None:
    if name in _warned:
        return
    _warned.add(name)
    warnings.warn(
        f"there is no image {name!r}; {substitute!r} is used instead. Install the package quicksand-{name}, import an "
        f"image of that name, or set {VARIABLE}={name}=IMAGE",
        UserWarning,
        stacklevel=2,
    )


async def _is_in_store(name: str, host: sandtree.Host) -> bool:
    """Whether the store has an image or a snapshot of this name."""
    try:
        await host.image(name)
        return True
    except (sandtree.NotFound, sandtree.Invalid):
        pass
    try:
        await host.inspect_snapshot(name)
        return True
    except (sandtree.NotFound, sandtree.Invalid):
        return False


async def _digest(path: Path) -> str:
    """The digest of a file, computed once for each version of the file."""
    status = path.stat()
    key = (str(path.resolve()), status.st_size, status.st_mtime_ns)
    if key not in _digests:
        _digests[key] = await asyncio.to_thread(compute_file_sha256, path, chunk_size=_CHUNK_BYTES)
    return _digests[key]
