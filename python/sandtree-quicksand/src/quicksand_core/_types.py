"""Values of the API: configuration, results, manifests and image providers."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal, Protocol, TypedDict, runtime_checkable

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from ._constants import (
    EnvironmentVariables,
    FilePatterns,
    GuestCommands,
    KernelParams,
    MountOptions,
    NetworkConstants,
    Timeouts,
)
from ._forwards import Endpoint, Forward, Guest, Host, PortForward
from ._keys import Key
from .host import Accelerator
from .utils.memory import parse_memory_size

__all__ = [
    "AgentErrorBody",
    "BaseImageInfo",
    "BootTiming",
    "Endpoint",
    "EnvironmentVariables",
    "ExecuteParams",
    "ExecuteResponseResult",
    "ExecuteResult",
    "FilePatterns",
    "Forward",
    "Guest",
    "GuestCommands",
    "Host",
    "ImageProvider",
    "KernelParams",
    "Key",
    "Mount",
    "MountHandle",
    "MountOptions",
    "MountType",
    "NO_WINDOW_CREATIONFLAGS",
    "NetworkConstants",
    "NetworkMode",
    "PortForward",
    "QuicksandGuestAgentMethod",
    "ResolvedAccelerator",
    "ResolvedImage",
    "SandboxConfig",
    "SandboxConfigParams",
    "SaveManifest",
    "StdinSource",
    "Timeouts",
]

NO_WINDOW_CREATIONFLAGS: int = getattr(subprocess, "CREATE_NO_WINDOW", 0)

MountType = Literal["cifs", "9p"]
StdinSource = AsyncIterable[bytes] | bytes | str


@dataclass
class Mount:
    """A directory of the host in the guest. Sandtree mounts both types in the same way."""

    host: str
    guest: str
    readonly: bool = False
    type: MountType = "cifs"


@dataclass(frozen=True)
class MountHandle:
    """A mount that `Sandbox.mount` made."""

    host: str
    guest: str
    readonly: bool
    _share_name: str


class NetworkMode(StrEnum):
    """What the guest reaches."""

    NONE = "none"
    """No network device."""
    MOUNTS_ONLY = "mounts_only"
    """No internet. Mounts and forwards work."""
    FULL = "full"
    """The internet, and the host at 10.0.2.2."""


class QuicksandGuestAgentMethod(StrEnum):
    """Methods of Quicksand's guest agent. Sandtree's agent has a protocol of its own."""

    EXECUTE = "execute"
    EXECUTE_STREAM = "execute_stream"
    STDIN = "stdin"
    CANCEL = "cancel"
    PING = "ping"
    AUTHENTICATE = "authenticate"
    CREATE_USER = "create_user"
    DELETE_USER = "delete_user"


@dataclass
class ExecuteParams:
    command: str
    timeout: float
    shell: str
    cwd: str | None = None
    exclusive: bool = False
    user: str | None = None


@dataclass
class ExecuteResponseResult:
    stdout: str
    stderr: str
    exit_code: int


@dataclass
class AgentErrorBody:
    message: str
    code: int = -1


@dataclass
class ExecuteResult:
    """How a command ended. `exit_code` is -1 if it did not end by itself; `stderr` has the reason."""

    stdout: str
    stderr: str
    exit_code: int


@dataclass
class BaseImageInfo:
    """What the tools that build images know about one."""

    name: str
    docker_dir: Path
    version: str


@dataclass(frozen=True)
class ResolvedImage:
    """The disk of an image: a base, and overlays on it from the oldest to the newest."""

    name: str
    chain: list[Path]
    kernel: Path | None = None
    initrd: Path | None = None
    guest_arch: str | None = None


@runtime_checkable
class ImageProvider(Protocol):
    """What the entry points `quicksand.images` lead to."""

    name: str
    type: Literal["base", "overlay"]
    images_dir: Path

    def resolve(self, arch: str | None = None) -> ResolvedImage: ...


@dataclass(frozen=True)
class ResolvedAccelerator:
    accel: Accelerator
    nested_virt: bool = False
    boot_timeout: float = Timeouts.BOOT_DEFAULT


_PHASES = (
    "resolve_image",
    "detect_accelerator",
    "load_runtime",
    "setup_disk",
    "launch_process",
    "connect_agent",
    "connect_qmp",
    "post_boot",
)
_AGENT_PARTS = (
    ("  ├ kernel_boot", "kernel_boot_s"),
    ("  ├ init_system", "init_system_s"),
    ("  └ agent_startup", "agent_startup_s"),
)


@dataclass
class BootTiming:
    """How long each phase of a start took, in seconds."""

    resolve_image_s: float = 0.0
    detect_accelerator_s: float = 0.0
    load_runtime_s: float = 0.0
    setup_disk_s: float = 0.0
    launch_process_s: float = 0.0
    connect_agent_s: float = 0.0
    connect_qmp_s: float = 0.0
    post_boot_s: float = 0.0
    kernel_boot_s: float | None = None
    init_system_s: float | None = None
    agent_startup_s: float | None = None
    console_log: str | None = None

    @property
    def total_s(self) -> float:
        return float(sum(getattr(self, f"{phase}_s") for phase in _PHASES))

    def _rows(self) -> list[tuple[str, float]]:
        rows: list[tuple[str, float]] = []
        for phase in _PHASES:
            rows.append((phase, getattr(self, f"{phase}_s")))
            if phase == "connect_agent":
                parts = ((name, getattr(self, field)) for name, field in _AGENT_PARTS)
                rows += [(name, value) for name, value in parts if value is not None]
        return rows

    def __str__(self) -> str:
        total = self.total_s
        lines = []
        for name, seconds in self._rows():
            percent = seconds / total * 100 if total > 0 else 0.0
            filled = int(min(percent / 100, 1.0) * 20)
            bar = "#" * filled + "-" * (20 - filled)
            lines.append(f"  {name:<22} {bar} {seconds:>7.3f}s ({percent:>5.1f}%)")
        lines.append(f"  {'total':<22} {'':>20} {total:>7.3f}s")
        return "\n".join(lines)


class SandboxConfig(BaseModel):
    """The configuration of a sandbox. It cannot be changed."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    image: str
    arch: str | None = None
    memory: str = "512M"
    cpus: int = 1
    mounts: list[Mount] = []
    port_forwards: list[Forward] = []
    network_mode: NetworkMode = NetworkMode.MOUNTS_ONLY
    extra_qemu_args: list[str] = []
    boot_timeout: float = Timeouts.BOOT_DEFAULT
    accel: Accelerator | Literal["auto"] | None = "auto"
    disk_size: str | None = None
    enable_display: bool = False
    host_dns_proxy: bool | None = None

    @field_validator("memory")
    @classmethod
    def _check_memory(cls, value: str) -> str:
        parse_memory_size(value)
        return value

    @property
    def host_forwards(self) -> list[Forward]:
        """The forwards from the host to the guest."""
        return [each for each in self.port_forwards if each.host_to_guest]

    @property
    def guest_forwards(self) -> list[Forward]:
        """The forwards from the guest to the host."""
        return [each for each in self.port_forwards if not each.host_to_guest]

    @property
    def memory_bytes(self) -> int:
        return parse_memory_size(self.memory)

    @model_validator(mode="after")
    def _check_forwards(self) -> SandboxConfig:
        self._check_host_forwards()
        if self.guest_forwards:
            self._check_guest_forwards()
        return self

    def _check_host_forwards(self) -> None:
        seen = set()
        for each in self.host_forwards:
            place = (each.host.address, each.host.port)
            if place in seen:
                raise ValueError(
                    f"Duplicate host-to-guest Forward listening on {place[0]}:"
                    f"{place[1]}; each host address/port may be forwarded only once."
                )
            seen.add(place)

    def _check_guest_forwards(self) -> None:
        if self.network_mode is NetworkMode.NONE:
            raise ValueError(
                "Forward(Guest, Host) requires network_mode=FULL or MOUNTS_ONLY; "
                "NetworkMode.NONE has no network device to tunnel through."
            )
        mounts = (NetworkConstants.GUESTFWD_SMB_IP, NetworkConstants.GUESTFWD_SMB_PORT)
        seen = set()
        for each in self.guest_forwards:
            place = (each.guest.address, each.guest.port)
            if place == mounts:
                raise ValueError(
                    f"Forward from Guest {place[0]}:{place[1]} collides with the "
                    "CIFS mount tunnel; choose another guest address or port."
                )
            if place in seen:
                raise ValueError(
                    f"Duplicate guest-to-host Forward from {place[0]}:{place[1]}; "
                    "each guest address/port may be forwarded only once."
                )
            seen.add(place)


class SandboxConfigParams(TypedDict, total=False):
    """The keywords of `Sandbox`, except `image`."""

    arch: str | None
    memory: str
    cpus: int
    mounts: list[Mount]
    port_forwards: list[Forward]
    network_mode: NetworkMode
    extra_qemu_args: list[str]
    boot_timeout: float
    accel: Accelerator | Literal["auto"] | None
    disk_size: str | None
    enable_display: bool
    host_dns_proxy: bool | None


class SaveManifest(BaseModel):
    """`manifest.json` of a save."""

    version: int
    config: SandboxConfig
    arch: str | None = None
