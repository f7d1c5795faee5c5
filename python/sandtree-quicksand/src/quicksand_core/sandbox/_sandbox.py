"""The sandbox, with Quicksand's methods and results.

    new ── start ──► running ── stop ──► stopped ── start ──► running, with a fresh disk

Each start makes a sandbox of Sandtree and each stop removes it. It also ends with this process.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Unpack

import sandtree

from .. import _store
from .._constants import GuestCommands, NetworkConstants, Timeouts
from .._types import (
    BootTiming,
    ExecuteResult,
    Forward,
    Mount,
    MountHandle,
    NetworkMode,
    SandboxConfig,
    SandboxConfigParams,
    SaveManifest,
    StdinSource,
)
from ..host import Accelerator, Architecture, get_host_memory_bytes
from ..host.arch import _detect_architecture
from ..qemu import save as saves
from ..utils.memory import format_bytes
from . import _execution, _saving, _users
from ._desktop import SCREEN, DesktopMixin
from ._disk import disk_bytes
from ._protocol import as_runtime_error
from ._relay import GuestForward, HostForward
from ._users import SandboxUser

logger = logging.getLogger("quicksand.sandbox")

_NETWORKS = {
    NetworkMode.NONE: "none",
    NetworkMode.MOUNTS_ONLY: "isolated",
    NetworkMode.FULL: "full",
}
_OWN_ADDRESSES = (None, NetworkConstants.QEMU_SLIRP_GUEST_IP, NetworkConstants.LOCALHOST)


class Sandbox(DesktopMixin):
    """A virtual machine.

    Args:
        image: a save by name or path, an image package, or an image of Sandtree's store
        progress_callback: called with stage, bytes done and bytes in all while an image is made
        save: save the disk under this name when the sandbox stops
        workspace: the directory of that save [default: .quicksand/sandboxes]

    The other keywords are the fields of `SandboxConfig`.
    """

    def __init__(
        self,
        *,
        image: str,
        progress_callback: Callable[[str, int, int], None] | None = None,
        save: str | None = None,
        workspace: str | Path | None = None,
        **kwargs: Unpack[SandboxConfigParams],
    ) -> None:
        _refuse_unknown(kwargs)
        self.config = SandboxConfig.model_validate({"image": image, **kwargs})
        self._progress_callback = progress_callback
        self._save_name = None if save is None else saves.check_name(save)
        self._workspace = Path(workspace) if workspace else None
        self._inner: sandtree.Sandbox | None = None
        self._phase: str | None = None
        self._watching: asyncio.Task[None] | None = None
        self._found: _store.Found | None = None
        self._accelerator: Accelerator | None = None
        self._qemu_command: list[str] | None = None
        self._boot_timing: BootTiming | None = None
        self._checkpoints: list[str] = []
        self._mounts: list[MountHandle] = []
        self._forwards: list[GuestForward | HostForward] = []
        self._is_exclusive = False
        self._accounts = asyncio.Lock()

    # What it is.

    @property
    def is_running(self) -> bool:
        """Whether the machine runs."""
        return self._inner is not None and self._phase == "running"

    @property
    def accelerator(self) -> Accelerator | None:
        """The accelerator of the machine; None before the start."""
        return self._accelerator

    @property
    def boot_timeout(self) -> float:
        """How many seconds a boot may take. The default is longer without an accelerator."""
        is_default = self.config.boot_timeout == Timeouts.BOOT_DEFAULT
        if self._accelerator is Accelerator.TCG and is_default:
            return Timeouts.BOOT_TCG
        return self.config.boot_timeout

    @property
    def qemu_command(self) -> list[str] | None:
        """The command line of QEMU; None before the start."""
        return self._qemu_command

    @property
    def boot_timing(self) -> BootTiming | None:
        """How long the phases of the last start took; None before its end."""
        return self._boot_timing

    @property
    def active_mounts(self) -> list[MountHandle]:
        """The mounts that `mount` made."""
        return list(self._mounts)

    # From start to stop.

    async def start(self) -> None:
        """Starts a machine with a fresh disk."""
        if self.is_running:
            raise RuntimeError("Sandbox is already running")
        await self._release()
        self._check_config()
        timing = BootTiming()
        host = sandtree.Host()
        began = time.perf_counter()
        self._found = await as_runtime_error(_store.find_image(self.config, host))
        timing.resolve_image_s = _since(began)
        try:
            await self._boot(host, timing)
            began = time.perf_counter()
            await self._mount_shares()
            await self._start_forwards()
            if self.config.enable_display:
                await self._open_view()
            timing.post_boot_s = _since(began)
        except BaseException:
            await self._release()
            raise
        self._boot_timing = timing

    async def _boot(self, host: sandtree.Host, timing: BootTiming) -> None:
        began = time.perf_counter()
        self._accelerator = self._wanted_accelerator()
        timing.detect_accelerator_s = _since(began)
        began = time.perf_counter()
        assert self._found is not None
        inner = sandtree.Sandbox(self._found.reference, host=host, **self._options())
        try:
            await inner.start()
        except sandtree.SandtreeError as error:
            raise _start_error(error) from error
        self._inner = inner
        self._phase = "running"
        timing.connect_agent_s = _since(began)
        self._watching = asyncio.ensure_future(self._watch(inner))
        await self._look(inner, timing)
        if self._found.is_substitute:
            await _users.create_default(inner)

    def _options(self) -> dict[str, Any]:
        config = self.config
        accel = "auto" if config.accel == "auto" else str(config.accel or Accelerator.TCG)
        assert self._found is not None
        published = [each for each in config.host_forwards if _is_published(each)]
        return {
            "memory": config.memory_bytes,
            "cpus": config.cpus,
            "disk": disk_bytes(config.disk_size),
            "network": _NETWORKS[config.network_mode],
            "display": SCREEN if config.enable_display else None,
            # As in Quicksand's images. Ours may have another user.
            "user": "root" if self._found.name in _store.SUBSTITUTES else None,
            "publish": [(each.host.port, each.guest.port) for each in published],
            "qemu_args": config.extra_qemu_args,
            "accel": accel,
            "boot_timeout": self.boot_timeout,
            "progress": self._report if self._progress_callback else None,
        }

    def _report(self, progress: sandtree.Progress) -> None:
        assert self._progress_callback is not None
        self._progress_callback(progress.stage, progress.done_bytes, progress.total_bytes or 0)

    async def _look(self, inner: sandtree.Sandbox, timing: BootTiming) -> None:
        """Notes what runs."""
        info = await inner.info()
        if info.accelerator is not None:
            self._accelerator = Accelerator(info.accelerator)
        self._qemu_command = _command_of(info.qemu_pid)
        timing.console_log = (await inner.console())[-16000:]

    async def _watch(self, inner: sandtree.Sandbox) -> None:
        with suppress(sandtree.SandtreeError):
            async for state in inner.watch():
                self._phase = state.phase
        self._phase = None

    def _check_config(self) -> None:
        config = self.config
        if config.arch is not None:
            wanted = Architecture.from_str(config.arch)
            if wanted is not _detect_architecture():
                raise RuntimeError(f"Sandtree runs machines of the host's architecture only, not {wanted}")
        if config.accel in (Accelerator.HVF, Accelerator.WHPX):
            raise RuntimeError(f"The accelerator {config.accel} does not exist on Linux")
        if config.host_dns_proxy:
            logger.warning("host_dns_proxy is only supported on macOS hosts; ignoring")
        for each in config.host_forwards:
            if each.guest.address not in _OWN_ADDRESSES:
                raise ValueError(f"{each}: the guest has the address 10.0.2.15 only")
        self._check_memory()

    def _check_memory(self) -> None:
        total = get_host_memory_bytes()
        wanted = self.config.memory_bytes
        if total is not None and wanted > total * 0.8:
            share = f"{wanted / total * 100:.0f}%"
            logger.warning(
                "Sandbox memory %s is %s of host RAM %s", format_bytes(wanted), share, format_bytes(total)
            )

    def _wanted_accelerator(self) -> Accelerator | None:
        if self.config.accel == "auto":
            return self._accelerator
        return self.config.accel or Accelerator.TCG

    async def stop(self) -> None:
        """Ends the machine; with `save`, its disk is saved first.

        A save that fails raises RuntimeError, after the machine has ended.
        """
        failed = None
        if self.is_running and self._save_name is not None:
            try:
                await self._save(self._save_name, self._workspace)
            except Exception as error:
                failed = error
        await self._release()
        if failed is not None:
            raise RuntimeError(f"Auto-save for '{self._save_name}' failed: {failed}") from failed

    async def _release(self) -> None:
        """Removes the machine and everything that belongs to it."""
        inner, self._inner, self._phase = self._inner, None, None
        watching, self._watching = self._watching, None
        found, self._found = self._found, None
        await self._stop_forwards()
        await self._close_view()
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        self._checkpoints.clear()
        self._mounts.clear()
        if found is not None:
            found.close()
        if inner is not None:
            await inner.close()

    async def __aenter__(self) -> Sandbox:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _running(self, message: str = "Sandbox is not running") -> sandtree.Sandbox:
        self._require_running(message)
        assert self._inner is not None
        return self._inner

    # Commands.

    async def execute(
        self,
        command: str,
        timeout: float = Timeouts.GUEST_AGENT_REQUEST,
        cwd: str | None = None,
        shell: str = GuestCommands.SHELL,
        on_stdout: Callable[[str], None] | None = None,
        on_stderr: Callable[[str], None] | None = None,
        exclusive: bool = False,
        user: str | None = None,
        *,
        stdin: StdinSource | None = None,
    ) -> ExecuteResult:
        """Runs a line of shell. A command that cannot run or does not end has the exit code -1."""
        inner = self._running()
        _execution.check_stdin(stdin)
        if self._is_exclusive:
            return _execution.failed("Exclusive command in progress")
        request = _execution.Request(
            command, timeout, cwd, shell, on_stdout, on_stderr, user, stdin
        )
        self._is_exclusive = exclusive
        try:
            return await _execution.run(inner, request)
        finally:
            if exclusive:
                self._is_exclusive = False

    async def create_user(self, name: str) -> SandboxUser:
        """Makes a user in the guest. Raises RuntimeError with the reason."""
        inner = self._running()
        async with self._accounts:
            try:
                number, home = await _users.create(inner, name)
            except (RuntimeError, sandtree.SandtreeError) as error:
                raise RuntimeError(f"Failed to create user {name!r}: {error}") from error
        return SandboxUser(self, name, uid=number, gid=number, home=home)

    async def delete_user(self, name: str, *, remove_home: bool = True) -> None:
        """Ends the processes of a user and removes it. Raises RuntimeError with the reason."""
        inner = self._running()
        async with self._accounts:
            try:
                await _users.delete(inner, name, remove_home=remove_home)
            except (RuntimeError, sandtree.SandtreeError) as error:
                raise RuntimeError(f"Failed to delete user {name!r}: {error}") from error

    # States.

    async def checkpoint(self, tag: str) -> None:
        """Takes a state of memory and disk. One with the same tag is replaced."""
        inner = self._running("Cannot checkpoint a non-running sandbox")
        await as_runtime_error(inner.checkpoint(tag, replace=True))
        if tag not in self._checkpoints:
            self._checkpoints.append(tag)

    async def revert(self, tag: str) -> None:
        """Returns to a checkpoint. All checkpoints stay."""
        inner = self._running("Cannot revert a non-running sandbox")
        if tag not in self._checkpoints:
            available = ", ".join(self._checkpoints or ["(none)"])
            raise ValueError(f"No checkpoint '{tag}' in current session. Available: {available}")
        await self._stop_forwards()
        try:
            await as_runtime_error(inner.revert(tag))
        finally:
            await self._start_forwards()

    async def save(
        self,
        name: str,
        *,
        workspace: str | Path | None = None,
        compress: bool = False,
        delete_checkpoints: bool = False,
    ) -> SaveManifest:
        """Saves the disk as the directory WORKSPACE/NAME; the guest continues."""
        inner = self._running("Cannot save a non-running sandbox")
        if self._checkpoints and not delete_checkpoints:
            raise RuntimeError(
                f"save() called with active checkpoint snapshots: {self._checkpoints}. "
                "Pass delete_checkpoints=True to delete them before saving."
            )
        if self._checkpoints:
            await as_runtime_error(inner.forget(*self._checkpoints))
            self._checkpoints.clear()
        return await self._save(name, workspace, compress=compress)

    async def _save(
        self, name: str, workspace: str | Path | None, *, compress: bool = False
    ) -> SaveManifest:
        assert self._inner is not None and self._found is not None
        target = _saving.place_of(name, workspace)
        writing = _saving.write(self._inner, self._found, self.config, target, compress=compress)
        return await as_runtime_error(writing)

    @staticmethod
    def validate_save(path: str | Path) -> SaveManifest:
        """The manifest of a save. Raises FileNotFoundError or ValueError if there is no valid save."""
        directory = Path(path)
        if not directory.exists():
            raise FileNotFoundError(f"Save not found: {directory}")
        return saves.validate(directory)

    # Directories and ports.

    async def _mount_shares(self) -> None:
        try:
            for mount in self.config.mounts:
                if mount.type not in ("cifs", "9p"):
                    raise ValueError(f"unknown mount type {mount.type!r}: use 'cifs' or '9p'")
                if mount.type == "cifs" and self.config.network_mode is NetworkMode.NONE:
                    raise ValueError(
                        "CIFS mounts require network_mode=FULL or MOUNTS_ONLY. "
                        "Use type='9p' for mounts with network_mode=NONE."
                    )
                await self._mount(mount)
        except (OSError, ValueError, sandtree.SandtreeError) as error:
            raise RuntimeError(f"Failed to mount shares: {error}") from error

    async def _mount(self, mount: Mount) -> None:
        assert self._inner is not None
        os.makedirs(mount.host, exist_ok=True)
        await self._inner.mount(mount.host, mount.guest, mount.readonly)

    async def mount(self, host: str, guest: str, readonly: bool = False) -> MountHandle:
        """Mounts a directory of the host, which is made if it is missing."""
        self._running()
        if self.config.network_mode is NetworkMode.NONE:
            raise RuntimeError(
                "Dynamic mounts require network_mode=FULL or MOUNTS_ONLY. "
                "NONE disables networking entirely."
            )
        try:
            await self._mount(Mount(host, guest, readonly))
        except (OSError, ValueError, sandtree.SandtreeError) as error:
            raise RuntimeError(f"Failed to mount {host} at {guest}: {error}") from error
        handle = MountHandle(host, guest, readonly, guest)
        self._mounts.append(handle)
        return handle

    async def unmount(self, handle: MountHandle) -> None:
        """Unmounts a directory. One that programs in the guest use is detached."""
        inner = self._running()
        await as_runtime_error(inner.unmount(handle.guest, force=True))
        if handle in self._mounts:
            self._mounts.remove(handle)

    async def _start_forwards(self) -> None:
        inner = self._inner
        if inner is None:
            return
        relayed = [each for each in self.config.host_forwards if not _is_published(each)]
        forwards: list[GuestForward | HostForward] = [HostForward(inner, each) for each in relayed]
        forwards += [GuestForward(inner, each) for each in self.config.guest_forwards]
        for forward in forwards:
            self._forwards.append(forward)
            await as_runtime_error(forward.start())

    async def _stop_forwards(self) -> None:
        forwards, self._forwards = self._forwards, []
        for forward in forwards:
            await forward.close()


def _is_published(forward: Forward) -> bool:
    """Whether Sandtree itself publishes the port."""
    return forward.host.address == NetworkConstants.LOCALHOST


def _refuse_unknown(given: Any) -> None:
    for name in given:
        if name not in SandboxConfig.model_fields:
            near = difflib.get_close_matches(name, SandboxConfig.model_fields, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"Sandbox() got an unexpected keyword argument {name!r}{hint}")


def _start_error(error: sandtree.SandtreeError) -> RuntimeError:
    if isinstance(error, sandtree.BootTimedOut):
        console = error.arguments.get("console") or ""
        tail = f"\n\nConsole output (last 2KB):\n{console[-2000:]}" if console else ""
        return RuntimeError(f"Failed to connect to guest agent: {error}{tail}")
    return RuntimeError(str(error))


def _command_of(pid: int | None) -> list[str] | None:
    if pid is None:
        return None
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    return [os.fsdecode(word) for word in raw.split(b"\0")[:-1]]


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 4)
