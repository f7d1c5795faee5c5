"""Quicksand's core on top of Sandtree. Programs import `quicksand`; image packages import this."""

import logging

from . import _types as types
from ._store import map_image as map_image
from ._types import (
    BaseImageInfo,
    BootTiming,
    Forward,
    Guest,
    Host,
    ImageProvider,
    Key,
    Mount,
    MountHandle,
    MountType,
    NetworkMode,
    PortForward,
    QuicksandGuestAgentMethod,
    ResolvedImage,
    SaveManifest,
)
from .host import (
    OS,
    Accelerator,
    AcceleratorStatus,
    Architecture,
    BaseOSConfig,
    DarwinConfig,
    LinuxConfig,
    OSConfig,
    WindowsConfig,
)
from .qemu.arch import (
    ArchitectureConfig,
    ARM64Config,
    BaseArchitectureConfig,
    MachineType,
    X86_64Config,
)
from .qemu.installer import ensure_runtime, install_qemu
from .qemu.platform import (
    PlatformConfig,
    RuntimeInfo,
    detect_accelerator,
    get_accelerator,
    get_machine_type,
    get_platform_config,
    get_runtime,
    is_runtime_available,
)
from .sandbox import ExecuteResult, Sandbox, SandboxConfig, SandboxConfigParams, SandboxUser

__all__ = [
    "ARM64Config",
    "Accelerator",
    "AcceleratorStatus",
    "Architecture",
    "ArchitectureConfig",
    "BaseArchitectureConfig",
    "BaseImageInfo",
    "BaseOSConfig",
    "BootTiming",
    "DarwinConfig",
    "ExecuteResult",
    "Forward",
    "Guest",
    "Host",
    "ImageProvider",
    "Key",
    "LinuxConfig",
    "MachineType",
    "Mount",
    "MountHandle",
    "MountType",
    "NetworkMode",
    "OS",
    "OSConfig",
    "PlatformConfig",
    "PortForward",
    "QuicksandGuestAgentMethod",
    "ResolvedImage",
    "RuntimeInfo",
    "Sandbox",
    "SandboxConfig",
    "SandboxConfigParams",
    "SandboxUser",
    "SaveManifest",
    "WindowsConfig",
    "X86_64Config",
    "detect_accelerator",
    "ensure_runtime",
    "get_accelerator",
    "get_machine_type",
    "get_platform_config",
    "get_runtime",
    "install_qemu",
    "is_runtime_available",
    "types",
]

__version__ = "0.14.0"
"""The version of Quicksand's core whose interface this is."""

logging.getLogger("quicksand").addHandler(logging.NullHandler())
