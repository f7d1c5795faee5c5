"""Files of image packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from ._auto_install import auto_install_images
from ._types import ResolvedImage
from .host.arch import Architecture, _detect_architecture


def base_image(name: str, version: str, images: Path, arch: str | None) -> ResolvedImage:
    """The disk of a base image. Raises FileNotFoundError if the package has none."""
    wanted = Architecture.from_str(arch) if arch else _detect_architecture()
    title = name.capitalize()
    disk = _disk(name, version, images, wanted)
    if disk is None and auto_install_images(f"quicksand-{name}", images):
        disk = _disk(name, version, images, wanted)
    if disk is None:
        available = ", ".join(path.name for path in images.glob("*.qcow2"))
        if available:
            raise FileNotFoundError(
                f"{title} image for {wanted.image_arch} not found. Available: {available}\n"
                f"Reinstall with:  quicksand install quicksand-{name}"
            )
        raise FileNotFoundError(
            f"No {title} images found. If you installed from PyPI, download images with:\n"
            f"  quicksand install {name}"
        )
    return ResolvedImage(
        name=name,
        chain=[disk],
        kernel=disk.with_suffix(".kernel"),
        initrd=disk.with_suffix(".initrd"),
    )


def _disk(name: str, version: str, images: Path, arch: Architecture) -> Path | None:
    for stem in (f"{name}-{version}-{arch.image_arch}", f"{name}-{version}"):
        path = image_file(name, images, f"{stem}.qcow2")
        if path.exists():
            return path
    return None


def image_file(name: str, images: Path, file: str) -> Path:
    """A file of an image package: next to its module, or where the package of PyPI was installed."""
    near = images / file
    if near.exists():
        return near
    try:
        package = distribution(f"quicksand-{name}")
    except PackageNotFoundError:
        return near
    module = f"quicksand_{name.replace('-', '_')}"
    return Path(str(package.locate_file(f"{module}/images/{file}")))


def overlay_image(name: str, images: Path) -> ResolvedImage:
    """The disk of an image that is a save in a package. Raises FileNotFoundError if the package has none."""
    from .qemu.image_resolver import ImageResolver

    package = f"quicksand-{name}"
    manifest = image_file(name, images, "manifest.json")
    if not manifest.exists() and not auto_install_images(package, images):
        raise FileNotFoundError(
            "No bundled save found. If you installed from PyPI, download images with:\n"
            f"  quicksand install {package}"
        )
    return ImageResolver()._resolve_save(image_file(name, images, "manifest.json").parent)
