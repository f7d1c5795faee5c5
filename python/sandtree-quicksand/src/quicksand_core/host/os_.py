"""The operating system of this host and its accelerator. Sandtree runs on Linux."""

from __future__ import annotations

import os
import platform as _platform
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar


class OS(StrEnum):
    """Operating systems of hosts."""

    DARWIN = "darwin"
    LINUX = "linux"
    WINDOWS = "windows"


class Accelerator(StrEnum):
    """Accelerators of QEMU."""

    KVM = "kvm"
    HVF = "hvf"
    WHPX = "whpx"
    TCG = "tcg"


@dataclass
class AcceleratorStatus:
    """What was found of an accelerator, and why it cannot be used."""

    available: Accelerator | None
    fallback: Accelerator
    error: str | None = None
    hint: str | None = None
    nested: bool = False

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator to use."""
        return self.available or self.fallback


class BaseOSConfig(ABC):
    """What depends on the host's operating system."""

    _os_type: ClassVar[OS]
    _default_accelerator: ClassVar[Accelerator]
    _binary_extension: ClassVar[str] = ""
    _extra_kernel_params: ClassVar[tuple[str, ...]] = ()
    _disk_aio: ClassVar[str | None] = None

    @property
    def os_type(self) -> OS:
        return self._os_type

    @property
    def binary_extension(self) -> str:
        return self._binary_extension

    @property
    def extra_kernel_params(self) -> list[str]:
        return list(self._extra_kernel_params)

    @property
    def default_accelerator(self) -> Accelerator:
        return self._default_accelerator

    @property
    def kvm_device(self) -> Path | None:
        return None

    @property
    @abstractmethod
    def cache_dir(self) -> Path: ...

    @property
    def images_dir(self) -> Path:
        return self.cache_dir / "images"

    @property
    def disk_aio(self) -> str | None:
        return self._disk_aio

    def detect_accelerator(self) -> AcceleratorStatus:
        """The accelerator of this host. Sandtree has none on other systems than Linux."""
        return AcceleratorStatus(
            available=None,
            fallback=Accelerator.TCG,
            error=f"Sandtree does not run on {self._os_type}",
        )


class LinuxConfig(BaseOSConfig):
    """Linux."""

    _os_type = OS.LINUX
    _default_accelerator = Accelerator.KVM
    _disk_aio = "io_uring"

    @property
    def kvm_device(self) -> Path | None:
        return Path("/dev/kvm")

    @property
    def cache_dir(self) -> Path:
        xdg = os.environ.get("XDG_CACHE_HOME")
        return (Path(xdg) if xdg else Path.home() / ".cache") / "quicksand"

    def detect_accelerator(self) -> AcceleratorStatus:
        device = self.kvm_device
        if not device or not device.exists():
            return AcceleratorStatus(
                available=None,
                fallback=Accelerator.TCG,
                error="/dev/kvm does not exist",
                hint=(
                    "KVM may not be available if:\n"
                    "  - Running in a VM without nested virtualization\n"
                    "  - KVM kernel module not loaded: sudo modprobe kvm\n"
                    "  - CPU doesn't support virtualization (check BIOS settings)"
                ),
            )
        if not os.access(device, os.R_OK | os.W_OK):
            return AcceleratorStatus(
                available=None,
                fallback=Accelerator.TCG,
                error=f"Permission denied: {device}",
                hint="Add your user to the kvm group: sudo usermod -aG kvm $USER",
            )
        return AcceleratorStatus(available=Accelerator.KVM, fallback=Accelerator.KVM)


class DarwinConfig(BaseOSConfig):
    """macOS."""

    _os_type = OS.DARWIN
    _default_accelerator = Accelerator.HVF

    @property
    def cache_dir(self) -> Path:
        return Path.home() / ".cache" / "quicksand"


class WindowsConfig(BaseOSConfig):
    """Windows."""

    _os_type = OS.WINDOWS
    _default_accelerator = Accelerator.WHPX
    _binary_extension = ".exe"
    _extra_kernel_params = ("noapic",)

    @property
    def cache_dir(self) -> Path:
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "quicksand"


def _detect_os() -> OS:
    system = _platform.system().lower()
    try:
        return OS(system)
    except ValueError:
        supported = ", ".join(each.value for each in OS)
        raise RuntimeError(
            f"Unsupported operating system: {system}\nQuicksand supports: {supported}"
        ) from None


_CONFIGS: dict[OS, type[BaseOSConfig]] = {
    OS.LINUX: LinuxConfig,
    OS.DARWIN: DarwinConfig,
    OS.WINDOWS: WindowsConfig,
}


class OSConfig(BaseOSConfig):
    """The configuration of this host: `OSConfig()` returns an instance of its system's class."""

    def __new__(cls) -> BaseOSConfig:  # type: ignore[misc]
        return object.__new__(_CONFIGS[_detect_os()])

    @property
    def cache_dir(self) -> Path:
        raise NotImplementedError
