"""What of a machine depends on its architecture."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from ..host.arch import Architecture, _detect_architecture


class MachineType(StrEnum):
    """Machine types of QEMU."""

    VIRT = "virt"
    Q35 = "q35"


class BaseArchitectureConfig:
    """Names of devices of an architecture."""

    _arch_type: ClassVar[Architecture]
    _machine_type: ClassVar[MachineType]
    _qemu_suffix: ClassVar[str]
    _console_device: ClassVar[str]
    _virtio_suffix: ClassVar[str]
    _virtio_gpu_device: ClassVar[str]
    _default_cpu_model: ClassVar[str]

    @property
    def arch_type(self) -> Architecture:
        return self._arch_type

    @property
    def machine_type(self) -> MachineType:
        return self._machine_type

    @property
    def qemu_suffix(self) -> str:
        return self._qemu_suffix

    @property
    def console_device(self) -> str:
        return self._console_device

    @property
    def virtio_net_device(self) -> str:
        return f"virtio-net-{self._virtio_suffix}"

    @property
    def virtio_blk_device(self) -> str:
        return f"virtio-blk-{self._virtio_suffix}"

    @property
    def virtio_gpu_device(self) -> str:
        return self._virtio_gpu_device

    @property
    def default_cpu_model(self) -> str:
        return self._default_cpu_model

    def build_cpu_args(self, has_hw_accel: bool) -> list[str]:
        """QEMU's arguments for the processor."""
        model = "host" if has_hw_accel else self.default_cpu_model
        return ["-cpu", model] if model else []


class X86_64Config(BaseArchitectureConfig):
    """x86_64."""

    _arch_type = Architecture.X86_64
    _machine_type = MachineType.Q35
    _qemu_suffix = "x86_64"
    _console_device = "ttyS0"
    _virtio_suffix = "pci"
    _virtio_gpu_device = "virtio-vga"
    _default_cpu_model = ""


class ARM64Config(BaseArchitectureConfig):
    """ARM64."""

    _arch_type = Architecture.ARM64
    _machine_type = MachineType.VIRT
    _qemu_suffix = "aarch64"
    _console_device = "ttyAMA0"
    _virtio_suffix = "device"
    _virtio_gpu_device = "virtio-gpu-pci"
    _default_cpu_model = "max"


_CONFIGS: dict[Architecture, type[BaseArchitectureConfig]] = {
    Architecture.X86_64: X86_64Config,
    Architecture.ARM64: ARM64Config,
}


class ArchitectureConfig(BaseArchitectureConfig):
    """The configuration of this host: `ArchitectureConfig()` returns an instance of its class."""

    def __new__(cls) -> BaseArchitectureConfig:  # type: ignore[misc]
        return object.__new__(_CONFIGS[_detect_architecture()])
