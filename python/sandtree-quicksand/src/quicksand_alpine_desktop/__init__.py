"""Alpine with a desktop; without its image package, Sandtree's image `desktop`: Debian with Xfce."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Unpack

from quicksand_core import ResolvedImage, Sandbox
from quicksand_core._base_image import overlay_image
from quicksand_core._types import SandboxConfigParams

DISTRO_VERSION = "3.23"
__version__ = "0.9.11"

_IMAGES_DIR = Path(__file__).parent / "images"


class _AlpineDesktopImageProvider:
    """The image of the package `quicksand-alpine-desktop`."""

    name = "alpine-desktop"
    type: Literal["overlay"] = "overlay"
    images_dir = _IMAGES_DIR

    def resolve(self, arch: str | None = None) -> ResolvedImage:
        return overlay_image("alpine-desktop", _IMAGES_DIR)


image = _AlpineDesktopImageProvider()


class AlpineDesktopSandbox(Sandbox):
    """A sandbox of the image `alpine-desktop`."""

    def __init__(
        self,
        *,
        image: str = "alpine-desktop",
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


__all__ = ["AlpineDesktopSandbox", "__version__"]
