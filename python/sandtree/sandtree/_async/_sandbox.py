"""A sandbox: a Linux machine that can be checkpointed, reverted and forked while it runs."""

from __future__ import annotations

import json
import os
import warnings
from typing import Any, AsyncIterator, Callable, Mapping, Optional, Sequence, Union

from .. import _native
from .._errors import WrongState, from_json
from .._options import (
    PortLike,
    Size,
    create_request,
    milliseconds,
    mount,
    placed,
    suggests,
    words,
)
from .._progress import Callback, Shown
from .._tree import StateTree
from .._types import (
    Checkpoint,
    CommandInfo,
    Diff,
    ExecuteResult,
    Exported,
    ForkReport,
    Forgotten,
    GuestPath,
    Mount,
    MountChanges,
    MountHandle,
    NetworkMode,
    PathLike,
    Paused,
    Restored,
    Reverted,
    SandboxInfo,
    SandboxState,
    Saved,
    Stats,
    ended,
    read,
)
from ._command import OUTPUT_LIMIT, Command
from ._display import Display
from ._files import Files
from ._host import Host, default_host
from ._wait import Guard, Source, Start, Undo, here, run

Env = Mapping[str, str]


class Sandbox:
    """A Linux machine, created by `start` or `async with`, and removed at the end.

    A sandbox belongs to this process: it is removed when it is closed, collected as garbage, or when the process ends,
    however it ends. `detach` lets it continue without this process, and `Sandbox.attach` finds it again.

    Args:
        image: an image or a snapshot, by name or digest, or the directory of a snapshot
        snapshot: the same, for what must be a snapshot
        name: the name of the sandbox [default: its id]
        memory: memory of the guest, as "1G" or a number of bytes [default: 512M, with a screen 2G, or the snapshot's]
        cpus: number of processors of the guest [default: 1, with a screen 2, or the snapshot's]
        disk: size of the disk; the file system grows to it [default: the image's]
        network: "none", "isolated" or "full" [default: "isolated", or the snapshot's]
        display: size of the screen, as "1280x800" [default: the image's or the snapshot's, or no screen]
        publish: ports of the guest on 127.0.0.1: (host, guest), "HOST:GUEST", or the guest's alone
        mounts: directories of the host: `Mount` or "HOST:GUEST[:ro|:cow]"
        save: save the disk as a snapshot of this name when the sandbox ends, for any reason
        replace: with save: replace the snapshot that has this name
        labels: with save: labels of the snapshot
        workspace: find and save snapshots as directories in this directory
        env, workdir, user: defaults for all commands
        cold: boot instead of restoring the image's booted state or the snapshot's memory
        auto_checkpoint: take a checkpoint before every command; a number: how many to keep
        durable: pass the guest's flushes to the host's disk
        expire_after: seconds after which the sandbox ends, counted from each start and resume
        on_expiry: what happens then: "remove", "pause" or "stop"
        accel: "auto", "kvm" or "tcg"
        arch: architecture of the guest; only the host's is supported
        cpu: a processor model of QEMU
        nested: allow KVM inside the guest
        memory_dir: a directory for memory layers
        memory_mode: "write-protect", "soft-dirty", "anonymous" or "full"
        kernel, initramfs, modules: a kernel to use instead of the image's
        ca_bundle: make the guest trust these certificate authorities; True: the host's
        qemu_args: further arguments of QEMU
        boot_timeout: seconds that a boot may take
        rm: remove the sandbox when it stops, even after `detach`
        host: the store to use
        progress: called with each step of a build of the image; without it, a terminal shows a line

    Example:
        async with Sandbox("tiny", memory="256M") as sb:
            result = await sb.execute("uname -s")
            assert result.stdout == "Linux\\n"
    """

    @suggests
    def __init__(
        self,
        image: Optional[str] = None,
        *,
        snapshot: Optional[str] = None,
        name: Optional[str] = None,
        memory: Optional[Size] = None,
        cpus: Optional[int] = None,
        disk: Optional[Size] = None,
        network: Union[NetworkMode, str, None] = None,
        display: Optional[str] = None,
        publish: Sequence[PortLike] = (),
        mounts: Sequence[Union[Mount, str]] = (),
        save: Optional[str] = None,
        replace: bool = False,
        labels: Optional[Mapping[str, str]] = None,
        workspace: Optional[PathLike] = None,
        env: Optional[Env] = None,
        workdir: Optional[str] = None,
        user: Optional[str] = None,
        cold: bool = False,
        auto_checkpoint: Union[bool, int] = False,
        durable: bool = False,
        expire_after: Optional[float] = None,
        on_expiry: str = "remove",
        accel: Optional[str] = None,
        arch: Optional[str] = None,
        cpu: Optional[str] = None,
        nested: bool = False,
        memory_dir: Optional[PathLike] = None,
        memory_mode: Optional[str] = None,
        kernel: Optional[PathLike] = None,
        initramfs: Optional[PathLike] = None,
        modules: Optional[PathLike] = None,
        ca_bundle: Union[PathLike, bool, None] = None,
        qemu_args: Sequence[str] = (),
        boot_timeout: Optional[float] = None,
        rm: bool = False,
        host: Optional[Host] = None,
        progress: Optional[Callback] = None,
    ) -> None:
        options = {key: value for key, value in locals().items() if key not in ("self", "host", "progress")}
        self._request: Optional[dict[str, Any]] = create_request(options)
        self._label = image or snapshot or ""
        self._boot_timeout = boot_timeout
        self._progress = progress
        self._host = host or default_host()
        self._defaults = _Defaults(env, workdir, user)
        self._native: Optional[_native.Sandbox] = None
        self._guard = Guard()
        self._closed = False

    @classmethod
    def _of(cls, native: _native.Sandbox, host: Host, defaults: _Defaults) -> Sandbox:
        sandbox = cls.__new__(cls)
        sandbox._request = None
        sandbox._label = native.name
        sandbox._boot_timeout = None
        sandbox._progress = None
        sandbox._host = host
        sandbox._defaults = defaults
        sandbox._native = native
        sandbox._guard = Guard()
        sandbox._closed = False
        return sandbox

    @classmethod
    async def attach(cls, name: str, *, host: Optional[Host] = None) -> Sandbox:
        """A sandbox by its name or id, whichever process runs it. It does not belong to this process."""
        host = host or default_host()
        opened = await host._opened()
        native = await run(lambda done: opened.sandbox(name, done))
        return cls._of(native, host, _Defaults())

    # What it is.

    @property
    def id(self) -> str:
        return self._created().id

    @property
    def name(self) -> str:
        return self._created().name

    @property
    def host(self) -> Host:
        return self._host

    @property
    def is_owned(self) -> bool:
        """Whether the sandbox is removed with this object or this process."""
        return self._native is not None and self._native.is_owned

    @property
    def files(self) -> Files:
        """The files of the guest."""
        return Files(self._created().files())

    @property
    def display(self) -> Display:
        """The screen of the guest. Raises `DisplayNotFound` if the sandbox was created without one."""
        found = self._created().display()
        if isinstance(found, str):
            raise from_json(found)
        return Display(found)

    async def info(self) -> SandboxInfo:
        """What `sandtree inspect` shows."""
        return read(SandboxInfo, await self._call("info"))

    async def stats(self) -> Stats:
        """What the sandbox uses."""
        return read(Stats, await self._call("stats"))

    async def console(self) -> str:
        """The newest part of the guest's console."""
        native = self._created()
        return (await run(native.console)).decode(errors="replace")  # type: ignore[no-any-return]

    async def watch(self) -> AsyncIterator[SandboxState]:
        """The present state and every later one, until the sandbox is removed."""
        native = await run(self._created().watch)
        while True:
            state = await run(native.next)
            if state is None:
                return
            yield read(SandboxState, json.loads(state))

    # From creation to removal.

    async def start(self) -> Sandbox:
        """Creates the sandbox; boots one that is stopped."""
        is_new = self._native is None
        async with self._guard.lock():
            if self._native is None:
                self._native = await self._create()
            elif not is_new:
                timeout = milliseconds(self._boot_timeout)
                await self._call("start", undo=self._undo_start, interrupt=False, boot_timeout_ms=timeout)
        return self

    async def _create(self) -> _native.Sandbox:
        if self._closed or self._request is None:
            raise _closed()
        text = json.dumps(self._request)
        opened = await self._host._opened()
        with Shown(here(self._progress), f"starting {self._label}") as shown:
            return await run(lambda done: opened.create(text, shown.meter, done), undo=_end)  # type: ignore[no-any-return]

    async def __aenter__(self) -> Sandbox:
        if self._native is None:
            await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> Optional[str]:
        """Removes a sandbox that belongs to this process; another one is left as it is.

        Returns the digest of its snapshot, if it was created with `save`.
        """
        native, self._native, self._closed = self._native, None, True
        if native is None:
            return None
        return await run(native.end, interrupt=False)  # type: ignore[no-any-return]

    async def detach(self) -> Sandbox:
        """Lets the sandbox continue without this process, in its keeper."""
        native = self._created()
        await run(native.detach, interrupt=False)
        return self

    async def remove(self) -> None:
        """Ends the machine, if it runs, and removes everything of the sandbox, also of another owner."""
        if self.is_owned:
            await self.close()
        else:
            await self._call("remove", interrupt=False)
            self._native, self._closed = None, True

    async def stop(self, grace: Optional[float] = None) -> None:
        """Shuts the guest down. Its processes get `grace` seconds to end. `start` boots it again."""
        await self._call("stop", interrupt=False, grace_ms=milliseconds(grace))

    async def kill(self) -> None:
        """Ends the machine at once, without a shutdown."""
        await self._call("kill", interrupt=False)

    async def pause(self) -> Paused:
        """Writes everything to disk and ends the machine. `resume` continues exactly there."""
        return read(Paused, await self._call("pause", undo=self._undo_pause, interrupt=False))

    async def resume(self) -> Restored:
        """Continues exactly where the sandbox was paused."""
        return read(Restored, await self._call("resume", undo=self._undo_resume, interrupt=False))

    # Commands.

    async def execute(
        self,
        command: str,
        timeout: Optional[float] = None,
        cwd: Optional[str] = None,
        shell: str = "/bin/sh",
        on_stdout: Optional[Callable[[str], object]] = None,
        on_stderr: Optional[Callable[[str], object]] = None,
        user: Optional[str] = None,
        *,
        env: Optional[Env] = None,
        stdin: Optional[Source] = None,
        limit: int = OUTPUT_LIMIT,
    ) -> ExecuteResult:
        """Runs a line of shell and returns what it printed. A timeout ends all its processes: exit code 124.

        `on_stdout` and `on_stderr` get the text as it comes. More output than `limit` bytes of a stream raises
        `OutputLimit`.

        Example:
            async with Sandbox("tiny") as sb:
                result = await sb.execute("cat; exit 3", stdin="hello")
                assert (result.stdout, result.exit_code) == ("hello", 3)
        """
        argv = [shell, "-c", command]
        if on_stdout is None and on_stderr is None and (stdin is None or isinstance(stdin, (str, bytes))):
            given = stdin.encode() if isinstance(stdin, str) else stdin
            request = self._defaults.request(argv, cwd, env, user, timeout, stdin=stdin is not None)
            native = self._created()
            how, out, err = await run(lambda done: native.run(request, given, limit, done))
            return ended(how, out, err)
        started = self.exec(*argv, cwd=cwd, env=env, user=user, timeout=timeout, stdin=stdin)
        async with started as running:
            return await running.wait(on_stdout, on_stderr, limit)

    def exec(
        self,
        *argv: str,
        cwd: Optional[str] = None,
        env: Optional[Env] = None,
        user: Optional[str] = None,
        timeout: Optional[float] = None,
        stdin: Union[Source, bool, None] = None,
        tty: Union[bool, "tuple[int, int]"] = False,
        detach: bool = False,
    ) -> Command:
        """A command, started at its first use: streams, stdin, signals, a terminal.

        Args:
            stdin: True to `write` to it; or its whole content; or an iterable of pieces
            tty: a terminal of 24 x 80, or (rows, columns); all output is then on stdout
            detach: the command continues without a reader; `command` finds it again by its id
        """
        request = self._defaults.request(
            list(argv), cwd, env, user, timeout, stdin=stdin not in (None, False), tty=tty, detach=detach
        )
        return self._command(lambda native: lambda done: native.exec(request, done), stdin)

    def main(
        self,
        *argv: str,
        entrypoint: Union[str, Sequence[str], None] = None,
        cwd: Optional[str] = None,
        env: Optional[Env] = None,
        user: Optional[str] = None,
        timeout: Optional[float] = None,
        stdin: Union[Source, bool, None] = None,
        tty: Union[bool, "tuple[int, int]"] = False,
        detach: bool = False,
    ) -> Command:
        """What `sandtree run` runs: the image's entry point, or another, with these arguments."""
        request = self._defaults.request(
            list(argv), cwd, env, user, timeout, stdin=stdin not in (None, False), tty=tty, detach=detach
        )
        entry = None if entrypoint is None else words(entrypoint)
        return self._command(lambda native: lambda done: native.exec_main(request, entry, done), stdin)

    def command(self, id: str) -> Command:
        """A detached command by its id, from the first byte of its output."""
        return self._command(lambda native: lambda done: native.attach(id, done))

    async def commands(self) -> list[CommandInfo]:
        """The detached commands of the sandbox."""
        return [read(CommandInfo, each) for each in await self._call("execs")]

    # States.

    async def checkpoint(self, tag: Optional[str] = None, *, replace: bool = False) -> Checkpoint:
        """Takes a state of memory, disk and processes; the guest continues. Without a tag, a number is one."""
        # One that has replaced another is not taken back: the other is gone.
        undo = None if replace else self._undo_checkpoint
        taken = await self._call("checkpoint", undo=undo, interrupt=False, tag=tag, replace=replace)
        return read(Checkpoint, taken)

    async def revert(self, state: str) -> Reverted:
        """Goes to a state, by tag or id. What was there is kept: `undo` returns to it."""
        return await self._go_to({"state": state})

    async def undo(self, steps: int = 1) -> Reverted:
        """Goes back by this number of states."""
        return await self._go_to({"undo": {"steps": steps}})

    async def redo(self) -> Reverted:
        """Returns to the state that the last undo left."""
        return await self._go_to("redo")

    async def states(self) -> StateTree:
        """The states of the sandbox. Prints as a tree; Jupyter shows a picture."""
        return StateTree._read(self.name, await self._call("states"))

    async def forget(self, *states: str, keep: Optional[int] = None, all: bool = False) -> Forgotten:
        """Removes states by tag or id; with `keep`, all checkpoints but the newest ones; with `all`, all states."""
        if bool(states) + (keep is not None) + all != 1:
            raise TypeError("forget() needs states, keep= or all=True")
        which: Any = {"these": list(states)} if states else "all" if keep is None else {"all_but": keep}
        return read(Forgotten, await self._call("forget", interrupt=False, which=which))

    async def fork(
        self,
        count: int = 1,
        *,
        name: Optional[str] = None,
        concurrency: Optional[int] = None,
        mounts: str = "read-only",
    ) -> list[Sandbox]:
        """Makes running copies, all or none. They belong to this process, as a new sandbox does.

        Args:
            name: the copies are called NAME-1, NAME-2 and so on [default: after this one]
            concurrency: how many are loaded at a time [default: twice the number of processors]
            mounts: what the copies may do with shared directories of the host: "read-only" or "shared"
        """
        copies, _ = await self.fork_with_report(count, name=name, concurrency=concurrency, mounts=mounts)
        return copies

    async def fork_with_report(
        self,
        count: int = 1,
        *,
        name: Optional[str] = None,
        concurrency: Optional[int] = None,
        mounts: str = "read-only",
    ) -> tuple[list[Sandbox], ForkReport]:
        """`fork`, with its figures."""
        native = self._created()
        access = mounts.replace("-", "_")
        request = json.dumps({"count": count, "name": name, "concurrency": concurrency, "mounts": access})
        copies, report = await run(lambda done: native.fork(request, done), undo=_end_all)
        made = [self._of(copy, self._host, self._defaults) for copy in copies]
        return made, read(ForkReport, json.loads(report))

    async def save(
        self,
        name: str,
        *,
        memory: bool = False,
        state: Optional[str] = None,
        replace: bool = False,
        labels: Optional[Mapping[str, str]] = None,
        compress: bool = False,
        delete_checkpoints: bool = False,
        workspace: Optional[PathLike] = None,
        progress: Optional[Callback] = None,
    ) -> Saved:
        """Publishes the sandbox, or one of its states, as a snapshot; the guest continues.

        With `memory`, a sandbox from the snapshot continues exactly there. With a `/` in its name, or a workspace, the
        snapshot is a directory.
        """
        if workspace is not None:
            os.makedirs(workspace, exist_ok=True)
        target = placed(name, workspace)
        # What it replaces or deletes would be lost.
        is_final = replace or delete_checkpoints
        saved = await self._call(
            "save",
            undo=None if is_final else _undoing(self._host.remove_snapshot, target),
            interrupt=not is_final,
            progress=progress,
            target=target,
            replace=replace,
            memory=memory,
            state=state,
            labels=dict(labels or {}),
            compress=compress,
            delete_checkpoints=delete_checkpoints,
        )
        return read(Saved, saved)

    async def export(
        self, path: PathLike, *, memory: bool = False, replace: bool = False, progress: Optional[Callback] = None
    ) -> Exported:
        """Writes the sandbox into one file that runs on another host. `Host.export` has more options."""
        return await self._host.export(self.id, path, memory=memory, replace=replace, progress=progress)

    async def diff(self, before: str, after: Optional[str] = None, *, times: bool = False) -> Diff:
        """The files that differ between a state and another one, or the present."""
        present = self.id
        return await self._host.diff(
            f"{present}@{before}", f"{present}@{after}" if after else present, times=times
        )

    # Directories and ports of the host.

    async def mount(
        self, host: Union[Mount, PathLike], guest: Optional[str] = None, readonly: bool = False, *, cow: bool = False
    ) -> MountHandle:
        """Mounts a directory of the host in the running guest."""
        if not isinstance(host, Mount):
            if guest is None:
                raise TypeError("mount() needs the path in the guest")
            host = Mount(host, guest, readonly, cow)
        spec = mount(host)
        undo = _undoing(self.unmount, spec["guest"], force=True)
        await self._call("mount", undo=undo, interrupt=False, spec=spec)
        return MountHandle(spec["host"], spec["guest"], host.readonly, host.cow)

    async def unmount(self, handle: Union[MountHandle, str], *, force: bool = False) -> None:
        """Unmounts a directory; with `force` even if programs in the guest use it."""
        path = handle if isinstance(handle, str) else handle.guest
        await self._call("unmount", interrupt=False, path=path, in_use="detach" if force else "refuse")

    async def changes(self, mount: str) -> MountChanges:
        """What the sandbox changed on top of a copy-on-write mount."""
        return read(MountChanges, await self._call("changes", mount=mount))

    async def patch(self, mount: str) -> str:
        """The changes of a copy-on-write mount, in the form of `diff -u`."""
        return await self._call("patch", mount=mount)  # type: ignore[no-any-return]

    async def apply(self, mount: str, *, dry_run: bool = False, force: bool = False) -> MountChanges:
        """Writes the changes of a copy-on-write mount to the host's directory.

        Raises `ApplyConflict` if a file changed on both sides, unless `force` is given.
        """
        applied = await self._call("apply", interrupt=False, mount=mount, dry_run=dry_run, force=force)
        return read(MountChanges, applied)

    async def forward(self, guest: int, host: int = 0) -> Forward:
        """Forwards a port of 127.0.0.1 to a port of the guest, until it is closed. 0 chooses a free port."""
        native = self._created()
        return Forward(await run(lambda done: native.forward(guest, host, done)), guest)

    # How it works.

    def _created(self) -> _native.Sandbox:
        if self._native is None:
            raise _closed() if self._closed else _not_started()
        return self._native

    def _command(
        self, start: Callable[[_native.Sandbox], Start], stdin: Union[Source, bool, None] = None
    ) -> Command:
        """A command that finds its sandbox when it starts."""
        return Command(lambda: start(self._created()), None if isinstance(stdin, bool) else stdin)

    async def _call(
        self,
        verb: str,
        undo: Optional[Undo] = None,
        interrupt: bool = True,
        progress: Optional[Callback] = None,
        **request: Any,
    ) -> Any:
        """Carries out a verb."""
        native = self._created()
        text = json.dumps({"verb": verb, **request})
        with Shown(here(progress), f"{verb} {self.name}") as shown:
            answer = await run(
                lambda done: native.call(text, shown.meter, done), undo=undo, interrupt=interrupt
            )
        return json.loads(answer)

    async def _go_to(self, goal: Any) -> Reverted:
        return read(Reverted, await self._call("go_to", undo=self._undo_revert, interrupt=False, goal=goal))

    async def _undo_checkpoint(self, taken: str) -> None:
        await self._call("forget", interrupt=False, which={"these": [json.loads(taken)["id"]]})

    async def _undo_revert(self, reverted: str) -> None:
        left = json.loads(reverted)["left"]
        if left is not None:
            await self._call("go_to", interrupt=False, goal={"state": left})

    async def _undo_start(self, _: Any) -> None:
        await self._call("stop", interrupt=False, grace_ms=None)

    async def _undo_pause(self, _: Any) -> None:
        await self._call("resume", interrupt=False)

    async def _undo_resume(self, _: Any) -> None:
        await self._call("pause", interrupt=False)

    def __del__(self) -> None:
        # The sandbox is removed with its native part, in the background.
        if getattr(self, "_native", None) is not None and self._native.is_owned:  # type: ignore[union-attr]
            warnings.warn(f"sandbox {self._label} was not closed", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        if self._native is None:
            state = "closed" if self._closed else "not started"
            return f"<Sandbox of {self._label}: {state}>"
        return f"<Sandbox {self.name}{'' if self.is_owned else ', detached'}>"


class Forward:
    """A port of 127.0.0.1 that leads into a guest."""

    def __init__(self, native: _native.Forward, guest: int) -> None:
        self._native = native
        self.port = native.port
        self.guest = guest

    async def close(self) -> None:
        """Ends the forward and its connections."""
        self._native.close()

    async def __aenter__(self) -> Forward:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Forward 127.0.0.1:{self.port} to port {self.guest}>"


class _Defaults:
    """What all commands of a sandbox have, unless they say otherwise."""

    def __init__(
        self, env: Optional[Env] = None, workdir: Optional[str] = None, user: Optional[str] = None
    ) -> None:
        self._env = dict(env or {})
        self._workdir = workdir
        self._user = user

    def request(
        self,
        argv: list[str],
        cwd: Optional[GuestPath],
        env: Optional[Env],
        user: Optional[str],
        timeout: Optional[float],
        *,
        stdin: bool,
        tty: Union[bool, "tuple[int, int]"] = False,
        detach: bool = False,
    ) -> dict[str, Any]:
        workdir = cwd if cwd is not None else self._workdir
        return {
            "argv": argv,
            "env": list({**self._env, **(env or {})}.items()),
            "workdir": None if workdir is None else os.fsdecode(workdir),
            "user": user if user is not None else self._user,
            "terminal": (24, 80) if tty is True else tty or None,
            "stdin": stdin,
            "timeout": timeout,
            "detached": detach,
        }


def _undoing(method: Callable[..., Any], *args: Any, **options: Any) -> Undo:
    """Calls a method to take back what was done."""

    async def undo(_: Any) -> None:
        await method(*args, **options)

    return undo


async def _end(native: _native.Sandbox) -> None:
    await run(native.end, interrupt=False)


async def _end_all(forked: tuple[list[_native.Sandbox], str]) -> None:
    for native in forked[0]:
        await _end(native)


def _closed() -> WrongState:
    return WrongState("the sandbox is closed", code="closed", kind="wrong_state", hint="create another one")


def _not_started() -> WrongState:
    return WrongState(
        "the sandbox is not started",
        code="not_started",
        kind="wrong_state",
        hint="use `async with Sandbox(...)`, or call `await sandbox.start()` first",
    )
