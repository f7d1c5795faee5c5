"""Ubuntu: a sandbox class and the provider of its image.

The images come from the package `quicksand-ubuntu` of PyPI, if it is installed (`quicksand install ubuntu`). Otherwise
Sandtree uses an image `ubuntu` of its store, or `debian`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Unpack

from quicksand_core import ResolvedImage, Sandbox
from quicksand_core._base_image import base_image
from quicksand_core._types import SandboxConfigParams

DISTRO_VERSION = "24.04"
__version__ = "0.10.1"

_IMAGES_DIR = Path(__file__).parent / "images"


class _UbuntuImageProvider:
    """The image of the package `quicksand-ubuntu`."""

    name = "ubuntu"
    type: Literal["base"] = "base"
    images_dir = _IMAGES_DIR

    def resolve(self, arch: str | None = None) -> ResolvedImage:
        return base_image("ubuntu", DISTRO_VERSION, _IMAGES_DIR, arch)


image = _UbuntuImageProvider()


class UbuntuSandbox(Sandbox):
    """A sandbox of the image `ubuntu`."""

    def __init__(
        self,
        *,
        image: str = "ubuntu",
        progress_callback: Callable[[str, int, int], None] | None = None,
        save: str | None = None,
        workspace: str | Path | None = None,
        **kwargs: Unpack[SandboxConfigParams],
    ) -> None:
        super().__init__(
            image=image, progress_callback=progress_callback, save=save, workspace=workspace, **kwargs
        )


__all__ = ["DISTRO_VERSION", "UbuntuSandbox", "__version__"]
