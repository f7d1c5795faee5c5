"""Values of the API: what callers pass, and what operations answer."""

from __future__ import annotations

import os
from enum import Enum
from typing import TYPE_CHECKING, Any, Mapping, Optional, TypeVar, Union

from ._errors import SandtreeError
from ._value import field, fields, value

if TYPE_CHECKING:
    from pathlib import Path

T = TypeVar("T")

PathLike = Union[str, "os.PathLike[str]"]
GuestPath = Union[str, bytes, "os.PathLike[str]"]


class NetworkMode(str, Enum):
    """What a sandbox reaches."""

    NONE = "none"
    """No network device."""
    ISOLATED = "isolated"
    """A device that reaches nothing; published ports work."""
    FULL = "full"
    """NAT through the host."""

    def __str__(self) -> str:
        return self.value


@value
class Mount:
    """A directory of the host in the guest.

    With `readonly` the guest cannot write. With `cow` its changes stay in the sandbox, branch with it, and can be
    written to the host's directory by `Sandbox.apply`.
    """

    host: PathLike
    guest: str
    readonly: bool = False
    cow: bool = False

    def _spec(self) -> dict[str, Any]:
        if self.readonly and self.cow:
            raise ValueError("a mount is readonly or cow, not both")
        access = "read_only" if self.readonly else "copy_on_write" if self.cow else "read_write"
        return {
            "host": os.path.abspath(os.fspath(self.host)),
            "guest": self.guest.rstrip("/") or "/",
            "access": access,
        }


@value
class MountHandle:
    """A mount that `Sandbox.mount` made, for `Sandbox.unmount`."""

    host: str
    guest: str
    readonly: bool
    cow: bool


@value
class ExecuteResult:
    """How a command ended, and what it printed.

    `exit_code` is 128 + n for a command that signal n ended, and 124 after a timeout.
    """

    stdout: str
    stderr: str
    exit_code: int
    signal: Optional[int] = None
    timed_out: bool = False
    stdout_bytes: bytes = field(default=b"", repr=False)
    stderr_bytes: bytes = field(default=b"", repr=False)

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    def check(self) -> ExecuteResult:
        """Returns itself, or raises `CommandFailed` if the exit code is not 0."""
        if not self.ok:
            raise CommandFailed(self)
        return self


class CommandFailed(SandtreeError):
    """A command ended with an exit code other than 0; `result` has its output."""

    def __init__(self, result: ExecuteResult) -> None:
        tail = (result.stderr or result.stdout)[-2000:].strip()
        message = f"exit code {result.exit_code}" + (f": {tail}" if tail else "")
        arguments = {"exit_code": result.exit_code}
        super().__init__(message, code="command_failed", kind="guest", arguments=arguments)
        self.result = result

    def __reduce__(self) -> tuple[Any, ...]:
        return (CommandFailed, (self.result,))


def ended(
    how: tuple[str, int], stdout: bytes, stderr: bytes
) -> ExecuteResult:
    """The result for what the native part reports."""
    word, number = how
    codes = {"exited": number, "signaled": 128 + (number & 0x7F), "timed_out": 124}
    return ExecuteResult(
        stdout=stdout.decode(errors="replace"),
        stderr=stderr.decode(errors="replace"),
        exit_code=codes[word],
        signal=number if word == "signaled" else None,
        timed_out=word == "timed_out",
        stdout_bytes=stdout,
        stderr_bytes=stderr,
    )


@value
class Output:
    """A piece of a command's output. `stream` is "stdout" or "stderr"."""

    stream: str
    data: bytes


class Line(str):
    """A line of a command's output, without its newline. `stream` is "stdout" or "stderr"."""

    stream: str

    def __new__(cls, text: str, stream: str) -> Line:
        line = super().__new__(cls, text)
        line.stream = stream
        return line

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return (str(self), self.stream)


@value
class Progress:
    """A step of long work: its stage, and bytes done of a total that may be unknown."""

    stage: str
    done_bytes: int
    total_bytes: Optional[int]
    output: Optional[bytes] = None
    """Output of a step of a build."""


@value
class Degradation:
    """What works worse than it could, and why."""

    code: str
    message: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@value
class Port:
    """A published port of 127.0.0.1, and the port of the guest that it leads to."""

    host: int
    guest: int


@value
class MountInfo:
    """A mount of a sandbox. `problem` says why the guest cannot use it now, or why it is slow."""

    guest: str
    host: Optional[str]
    access: str
    problem: Optional[str]
    last_error: Optional[str] = None
    requests: Optional[int] = None


@value
class SandboxInfo:
    """A sandbox, as `sandtree inspect` shows it."""

    id: str
    name: str
    state: str
    reason: Optional[str]
    ended: Optional[str]
    image: str
    image_digest: str
    snapshot: Optional[str]
    arch: str
    accelerator: Optional[str]
    qemu_version: Optional[str]
    qemu_pid: Optional[int]
    keeper_pid: Optional[int]
    memory_bytes: int
    cpus: int
    disk_bytes: int
    network: str
    display: Optional[str]
    ports: tuple[Port, ...]
    auto_remove: bool
    memory_dir: Optional[str]
    memory_mode: Optional[str]
    auto_checkpoint: Optional[int]
    cpu: Optional[str]
    durable: bool
    save_on_stop: Optional[str]
    save_failed: Optional[str]
    mounts: tuple[MountInfo, ...]
    labels: Mapping[str, str]
    expires_at: Optional[str]
    degraded: tuple[Degradation, ...]
    created_at: str


@value
class SandboxState:
    """A state of a sandbox as `watch` reports it. `phase` is None once it is removed."""

    phase: Optional[str]
    reason: Optional[str]
    saved: Optional[str]
    save_failed: Optional[str]


@value
class Checkpoint:
    """A checkpoint that was taken."""

    id: str
    tag: Optional[str]
    mode: str
    pause_ms: float
    total_ms: float
    memory_bytes: int
    disk_bytes: int
    degraded: tuple[Degradation, ...]


@value
class Restored:
    """A restore of memory: until the guest ran, until its agent acknowledged, and in all."""

    running_ms: float
    acknowledged_ms: float
    total_ms: float
    from_spare: bool
    hooks_failed: tuple[str, ...]
    degraded: tuple[Degradation, ...]


@value
class Reverted(Restored):
    """A step to another state. `left` is the state that holds what was left."""

    id: str
    tag: Optional[str]
    left: Optional[str]
    dropped: Optional[str]


@value
class Paused:
    """A pause: everything is on disk, and the machine has ended."""

    mode: str
    total_ms: float
    memory_bytes: int
    disk_bytes: int
    awaited: bool
    degraded: tuple[Degradation, ...]


@value
class Forgotten:
    """States that were removed."""

    states: tuple[str, ...]
    freed_bytes: int


@value
class Saved:
    """A snapshot that was published."""

    digest: str
    name: Optional[str]
    path: Optional[str]
    consistency: str
    memory: bool
    bytes: int
    pause_ms: float
    total_ms: float
    removed: tuple[str, ...]
    degraded: tuple[Degradation, ...]


@value
class Stats:
    """What a sandbox uses: in the guest, and of the host."""

    guest: Mapping[str, int]
    host_memory_bytes: Optional[int]
    host_cpu_ms: Optional[int]
    host_disk_bytes: Optional[int]


@value
class CommandInfo:
    """A detached command. `ended` is None while it runs."""

    id: str
    command: str
    pid: Optional[int]
    ended: Optional[str]
    stdout_bytes: int
    stderr_bytes: int


@value
class FileInfo:
    """A file in the guest. `kind` is "file", "directory", "symlink" or "other"."""

    name: str
    kind: str
    mode: int
    uid: int
    gid: int
    size: int
    modified_ns: int
    target: str

    @property
    def is_dir(self) -> bool:
        return self.kind == "directory"

    @property
    def is_file(self) -> bool:
        return self.kind == "file"


@value
class Transfer:
    """Files that were copied. `skipped` lists what could not be, with the reason."""

    bytes: int
    skipped: tuple[str, ...]


@value
class Node:
    """A file on one side of a comparison."""

    kind: str
    mode: int
    uid: int
    gid: int
    size: int
    links: Optional[int] = None
    modified_unix_s: Optional[int] = None
    target: Optional[str] = None


@value
class Change:
    """A file that differs. `change` is "added", "removed" or "changed", `what` says in which respects."""

    path: str
    change: str
    what: tuple[str, ...]
    before: Optional[Node]
    after: Optional[Node]


@value
class Diff:
    """The files that differ between two states. `incomplete` says what could not be compared."""

    changes: tuple[Change, ...]
    incomplete: Optional[str]

    def __str__(self) -> str:
        letters = {"added": "A", "removed": "D"}
        return "\n".join(f"{letters.get(change.change, 'M')}  {change.path}" for change in self.changes)


@value
class MountChange:
    """A change on top of a copy-on-write mount. `conflict` says what the host's file would lose."""

    path: str
    change: str
    kind: str
    conflict: Optional[str]


@value
class MountChanges:
    """The changes of a copy-on-write mount."""

    mount: str
    host: str
    changes: tuple[MountChange, ...]
    left_out: tuple[str, ...]

    @property
    def conflicts(self) -> tuple[MountChange, ...]:
        return tuple(change for change in self.changes if change.conflict)


@value
class ImageInfo:
    """An image of the store."""

    names: tuple[str, ...]
    digest: str
    arch: str
    kernel: str
    disk_bytes: int
    disk_bytes_used: int
    unreadable: Optional[str]
    details: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Everything that `sandtree image inspect --json` prints."""


@value
class SnapshotInfo:
    """A snapshot of the store."""

    names: tuple[str, ...]
    digest: str
    path: Optional[str]
    created_at: str
    parent: Optional[str]
    labels: Mapping[str, str]
    image: str
    image_digest: str
    arch: str
    bytes: int
    memory: bool
    memory_bytes: int
    disk_bytes: int
    consistency: str
    unreadable: Optional[str]


@value
class Exported:
    """An artifact that was written."""

    path: Path
    digest: str
    content_bytes: int
    file_bytes: int


@value
class Imported:
    """A snapshot that was read from an artifact."""

    name: str
    digest: str
    bytes: int
    memory: bool


@value
class Verified:
    """The result of reading every byte of a snapshot."""

    bytes: int
    damaged: tuple[Mapping[str, Any], ...]

    @property
    def whole(self) -> bool:
        return not self.damaged


@value
class Pulled:
    """An image or a snapshot that came from a registry."""

    name: str
    kind: str
    digest: str
    manifest: str
    fetched_bytes: int


@value
class Pushed:
    """An image or a snapshot that a registry has."""

    reference: str
    manifest: str
    digest: str
    sent_bytes: int
    total_bytes: int


@value
class Collected:
    """What `gc` removed, or would remove."""

    bytes: int
    removed: tuple[Mapping[str, Any], ...]
    held_back: Optional[str]


@value
class ForkReport:
    """How a fork went: how long its source was stopped, and how long it took."""

    pause_ms: float
    total_ms: float
    degraded: tuple[Degradation, ...]


_PARTS: dict[str, Any] = {
    "degraded": Degradation,
    "ports": Port,
    "mounts": MountInfo,
}


def read(kind: type[T], data: Mapping[str, Any], **more: Any) -> T:
    """A value from JSON. Fields that this version does not know are left out."""
    values: dict[str, Any] = {}
    for name, known in fields(kind).items():
        if name in more:
            values[name] = more[name]
        elif name in data:
            values[name] = _value(kind, name, data[name])
        elif not known.has_default:
            values[name] = None
    return kind(**values)


def _value(kind: type[Any], name: str, value: Any) -> Any:
    if name == "changes":
        part = MountChange if kind is MountChanges else Change
        return tuple(read(part, each) for each in value)
    if name in ("before", "after") and isinstance(value, Mapping):
        return read(Node, value)
    if name in _PARTS:
        return tuple(read(_PARTS[name], each) for each in value)
    return tuple(value) if isinstance(value, list) else value
