"""The architecture of this host."""

from __future__ import annotations

import platform as _platform
import sysconfig
from enum import StrEnum

_X86_NAMES = {"x86_64", "amd64", "x64"}
_ARM_NAMES = {"arm64", "aarch64"}


class Architecture(StrEnum):
    """Architectures of processors."""

    X86_64 = "x86_64"
    ARM64 = "arm64"

    @classmethod
    def from_str(cls, value: str) -> Architecture:
        """An architecture from any of its names. Raises ValueError for others."""
        name = value.lower()
        if name in _X86_NAMES:
            return cls.X86_64
        if name in _ARM_NAMES:
            return cls.ARM64
        known = ", ".join(sorted(_X86_NAMES | _ARM_NAMES))
        raise ValueError(f"Unknown architecture: {value!r}. Expected one of: {known}")

    @property
    def image_arch(self) -> str:
        """The name in the files of images: "amd64" or "arm64"."""
        return "amd64" if self is Architecture.X86_64 else "arm64"


def _detect_architecture() -> Architecture:
    machine = _platform.machine().lower()
    try:
        return Architecture.from_str(machine)
    except ValueError:
        raise RuntimeError(
            f"Unsupported CPU architecture: {machine}\n"
            f"Quicksand supports: x86_64/amd64, arm64/aarch64"
        ) from None


def _is_emulated() -> bool:
    """Whether Python was built for another architecture than the host's."""
    try:
        built_for = Architecture.from_str(sysconfig.get_platform().rsplit("-", 1)[-1])
    except ValueError:
        return False
    return built_for is not _detect_architecture()
