"""Finds what the name of an image means: a save, an image package, or an image of Sandtree's store.

    1  a save at this path                         4  an entry point `quicksand.images` of this name
    2  ./.quicksand/sandboxes/NAME                 5  the entry point quicksand-NAME
    3  ~/.quicksand/sandboxes/NAME                 6  Sandtree's store, see `quicksand_core._store`

Steps 1 to 5 are Quicksand's, and this module's. Saves lie on a base image; `resolve` follows them down to it.
"""

from __future__ import annotations

import logging
from importlib.metadata import entry_points
from pathlib import Path

from .._types import ResolvedImage, SaveManifest
from ..host.arch import Architecture, _detect_architecture
from .save import SAVE_VERSION, SAVES_DIR, overlay_files, validate

__all__ = ["SAVE_VERSION", "ImageResolver"]

logger = logging.getLogger("quicksand.image")


class ImageResolver:
    """Finds saves and image packages."""

    def resolve(self, image: str, *, arch: str | None = None) -> ResolvedImage:
        """The files of a save or of an image package. Raises RuntimeError if there is none."""
        found = self.find(image, arch=arch)
        if found is None:
            raise RuntimeError(
                f"Image not found: '{image}'\n"
                f"Not a local/global save and no matching entry point.\n"
                f"Install it with: quicksand install {image}"
            )
        return found

    def find(self, image: str, *, arch: str | None = None) -> ResolvedImage | None:
        """The same, or None."""
        save = self._find_save_dir(image)
        if save is not None:
            return self._resolve_save(save)
        return self.find_package(image, arch=arch)

    def find_package(self, image: str, *, arch: str | None = None) -> ResolvedImage | None:
        """The files of an image package."""
        wanted = None if arch is None else Architecture.from_str(arch).image_arch
        found = self._resolve_base_by_name(image, arch=wanted)
        if found is None and not image.startswith("quicksand-"):
            found = self._resolve_base_by_name(f"quicksand-{image}", arch=wanted)
        return found

    def validate_save(self, path: Path) -> SaveManifest:
        """The manifest of a save. Raises ValueError if the save is wrong."""
        return validate(path)

    def _resolve_save(self, save_dir: Path) -> ResolvedImage:
        manifest = validate(save_dir)
        check_arch(manifest)
        base = self._resolve_base_by_name(manifest.config.image)
        if base is None:
            raise RuntimeError(
                f"Base image '{manifest.config.image}' not installed.\n"
                f"Install it with: quicksand install {manifest.config.image}"
            )
        return ResolvedImage(
            name=manifest.config.image,
            chain=[*base.chain, *overlay_files(save_dir)],
            kernel=base.kernel,
            initrd=base.initrd,
        )

    @staticmethod
    def _resolve_base_by_name(name: str, *, arch: str | None = None) -> ResolvedImage | None:
        for entry in entry_points(group="quicksand.images"):
            if entry.name != name:
                continue
            try:
                found = entry.load().resolve(arch=arch)
            except Exception as error:
                logger.warning("the image package %s (%s) is not usable: %s", name, entry.value, error)
                continue
            if not isinstance(found, ResolvedImage) or not found.chain:
                logger.warning("the image package %s (%s) returned no image", name, entry.value)
                continue
            return ResolvedImage(
                name=name,
                chain=found.chain,
                kernel=found.kernel,
                initrd=found.initrd,
                guest_arch=found.guest_arch,
            )
        return None

    @staticmethod
    def _find_save_dir(image: str) -> Path | None:
        """The directory of a save."""
        for place in (Path(image), Path.cwd() / SAVES_DIR / image, Path.home() / SAVES_DIR / image):
            if place.is_file() and place.name.endswith((".tar.gz", ".tar")):
                raise RuntimeError(
                    f"Tar save files are no longer supported: {place}\n"
                    f"Extract the archive first: tar xzf {place}"
                )
            if place.is_dir() and (place / "manifest.json").exists():
                return place
        return None


def check_arch(manifest: SaveManifest) -> None:
    """Refuses a save of another architecture. Sandtree runs machines of the host's only."""
    host = _detect_architecture()
    if manifest.arch is not None and Architecture.from_str(manifest.arch) is not host:
        raise RuntimeError(
            f"Save was created on {manifest.arch} but host is {host}: "
            "Sandtree runs machines of the host's architecture only"
        )
