"""Ubuntu with a desktop; without its image package, Sandtree's image `desktop`: Debian with Xfce."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Unpack

from quicksand_core import ResolvedImage, Sandbox
from quicksand_core._base_image import overlay_image
from quicksand_core._types import SandboxConfigParams

DISTRO_VERSION = "24.04"
__version__ = "0.9.11"

_IMAGES_DIR = Path(__file__).parent / "images"


class _UbuntuDesktopImageProvider:
    """The image of the package `quicksand-ubuntu-desktop`."""

    name = "ubuntu-desktop"
    type: Literal["overlay"] = "overlay"
    images_dir = _IMAGES_DIR

    def resolve(self, arch: str | None = None) -> ResolvedImage:
        return overlay_image("ubuntu-desktop", _IMAGES_DIR)


image = _UbuntuDesktopImageProvider()


class UbuntuDesktopSandbox(Sandbox):
    """A sandbox of the image `ubuntu-desktop`."""

    def __init__(
        self,
        *,
        image: str = "ubuntu-desktop",
        progress_callback: Callable[[str, int, int], None] | None = None,
        save: str | None = None,
        workspace: str | Path | None = None,
        **kwargs: Unpack[SandboxConfigParams],
    ) -> None:
        kwargs.setdefault("memory", "1G")
        kwargs.setdefault("cpus", 2)
        kwargs.setdefault("enable_display", True)
        super().__init__(
            image=image, progress_callback=progress_callback, save=save, workspace=workspace, **kwargs
        )


__all__ = ["UbuntuDesktopSandbox", "__version__"]
