"""Installs QEMU by the system's package manager."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess

from ..host.arch import Architecture, _detect_architecture
from .platform import RuntimeInfo, get_platform_config, get_runtime

logger = logging.getLogger("quicksand.qemu.installer")


def install_qemu() -> None:
    """Installs QEMU, unless it is on PATH. Raises RuntimeError if that fails."""
    if shutil.which(get_platform_config().qemu_system_binary()):
        return
    command = _command(_detect_architecture())
    logger.info("running %s", " ".join(command))
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"QEMU could not be installed: {error}") from error


def _command(arch: Architecture) -> list[str]:
    sudo = [] if os.geteuid() == 0 else ["sudo"]
    is_x86 = arch is Architecture.X86_64
    if shutil.which("apt-get"):
        package = "qemu-system-x86" if is_x86 else "qemu-system-arm"
        return [*sudo, "apt-get", "install", "-y", package]
    if shutil.which("dnf"):
        package = "qemu-system-x86-core" if is_x86 else "qemu-system-aarch64-core"
        return [*sudo, "dnf", "install", "-y", package]
    raise RuntimeError("QEMU cannot be installed here: neither apt-get nor dnf was found")


def ensure_runtime() -> RuntimeInfo:
    """QEMU, installed if it is missing."""
    try:
        return get_runtime()
    except RuntimeError:
        install_qemu()
        return get_runtime()
