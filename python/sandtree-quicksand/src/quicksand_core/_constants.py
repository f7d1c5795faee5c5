"""Constants of Quicksand's modules. Sandtree uses a few of them; programs may use all."""

from __future__ import annotations


class Timeouts:
    """Seconds."""

    BOOT_DEFAULT = 60.0
    BOOT_TCG = 600.0
    BOOT_WHPX = 120.0
    GUEST_AGENT_REQUEST = 30.0
    GUEST_AGENT_HTTP = 5.0
    GUEST_AGENT_CONNECT = 2.0
    SMB_WAIT = 30.0
    MOUNT_OPERATION = 10.0
    PROCESS_TERMINATE = 5.0
    GRACEFUL_SHUTDOWN = 10.0


class NetworkConstants:
    """Addresses of the guest's network."""

    LOCALHOST = "127.0.0.1"
    QEMU_SLIRP_GATEWAY = "10.0.2.2"
    QEMU_SLIRP_GUEST_IP = "10.0.2.15"
    QEMU_SLIRP_DNS = "10.0.2.3"
    QEMU_SLIRP_NETMASK = "255.255.255.0"
    GUEST_SMB_PORT = 445
    GUESTFWD_SMB_IP = "10.0.2.100"
    GUESTFWD_SMB_PORT = 445
    GUESTFWD_DEFAULT_IP = "10.0.2.101"


class FilePatterns:
    """Names of files of images and saves."""

    KERNEL_SUFFIX = ".kernel"
    INITRD_SUFFIX = ".initrd"
    OVERLAY = "overlay.qcow2"
    OVERLAYS_DIR = "overlays"
    MANIFEST = "manifest.json"
    SAVE_EXT = ".tar.gz"
    SAVE_EXT_LEGACY = ".tar"
    CONSOLE_LOG = "console.log"


class KernelParams:
    """Parameters of the kernel that Quicksand's guest agent reads. Sandtree has its own agent."""

    TOKEN = "quicksand_token"
    PORT = "quicksand_port"
    SMB_PORT = "quicksand_smb_port"
    SMB_MOUNTS = "quicksand_smb_mounts"
    SMB_GATEWAY = "quicksand_smb_gateway"


class EnvironmentVariables:
    """Variables that Quicksand sets for QEMU."""

    QEMU_MODULE_DIR = "QEMU_MODULE_DIR"
    DNS_PROXY = "QUICKSAND_DNS_PROXY"


class GuestCommands:
    """Commands of the guest."""

    SHELL = "/bin/sh"
    SYNC = "sync"
    FSTRIM = "fstrim -av 2>/dev/null || true"
    DETECT_DISK_LAYOUT = "test -b /dev/vda1 && echo partitioned || echo whole"
    GROWPART = "growpart /dev/vda 1 2>&1 || true"
    RESIZE_PARTITION = "resize2fs /dev/vda1 2>&1 || xfs_growfs / 2>&1 || true"
    RESIZE_WHOLE_DISK = "resize2fs /dev/vda 2>&1 || xfs_growfs / 2>&1 || true"


class MountOptions:
    """Options of CIFS mounts. Sandtree's mounts need none of them."""

    STABILIZATION_DELAY = 2.0
    MAX_RETRIES = 3
    RETRY_DELAY = 1.0

    @staticmethod
    def cifs_opts(username: str, password: str) -> str:
        sec = "ntlmssp" if password else "none"
        return f"username={username},password={password},sec={sec},vers=3.0,nosharesock"
