"""Exceptions: one class for each kind of failure, and for the codes that programs distinguish.

`docs/errors.md` lists every code with its arguments. A code without a class of its own raises the class of its kind.
"""

from __future__ import annotations

import json
from typing import Any, Mapping, Optional, Sequence

from . import _hints


class SandtreeError(Exception):
    """A failure of Sandtree.

    Attributes:
        code: which failure it is; stable.
        kind: its class, one of thirteen; stable.
        message: for people.
        causes: the chain of its causes, for people.
        arguments: the values of the error by name; stable for each code.
        hint: what to do about it, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "internal",
        kind: str = "internal",
        causes: Sequence[str] = (),
        arguments: Optional[Mapping[str, Any]] = None,
        hint: Optional[str] = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.kind = kind
        self.message = message
        self.causes = tuple(causes)
        self.arguments = dict(arguments or {})
        self.hint = hint if hint is not None else _hints.of(code, self.arguments)

    def __str__(self) -> str:
        text = ": ".join([self.message, *self.causes])
        return f"{text}\n  hint: {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.code, self.kind, self.causes, self.arguments, self.hint))


def _rebuild(
    kind_of: type[SandtreeError],
    message: str,
    code: str,
    kind: str,
    causes: Sequence[str],
    arguments: Mapping[str, Any],
    hint: Optional[str],
) -> SandtreeError:
    return kind_of(message, code=code, kind=kind, causes=causes, arguments=arguments, hint=hint)


class SandtreeWarning(UserWarning):
    """Something of the store cannot be read; the rest can."""


class NotFound(SandtreeError, LookupError):
    """What was named does not exist."""


class AlreadyExists(SandtreeError):
    """A name, tag or path is in use."""


class Invalid(SandtreeError, ValueError):
    """A value does not fit its rule."""


class Busy(SandtreeError):
    """Something is in use now; try again."""


class WrongState(SandtreeError):
    """The operation is not possible in the present state."""


class Unsupported(SandtreeError):
    """This host, program or image cannot do it."""


class Exhausted(SandtreeError):
    """Memory, disk or another resource is used up."""


class TimedOut(SandtreeError, TimeoutError):
    """No answer came in time."""


class GuestError(SandtreeError):
    """The guest failed or refused."""


class EngineError(SandtreeError):
    """QEMU failed."""


class Corrupt(SandtreeError):
    """Stored data is damaged."""


class IoError(SandtreeError, OSError):
    """A file of the host could not be used."""


class InternalError(SandtreeError):
    """A defect of Sandtree."""


class SandboxNotFound(NotFound):
    """No sandbox has this name or id."""


class StateNotFound(NotFound):
    """The sandbox has no such state."""


class ImageNotFound(NotFound):
    """There is no such image."""


class SnapshotNotFound(NotFound):
    """There is no such snapshot."""


class CommandNotFound(GuestError):
    """The guest has no such program."""


class MountNotFound(NotFound):
    """The sandbox has no mount at this path."""


class DisplayNotFound(NotFound):
    """The sandbox has no screen."""


class FileMissing(NotFound, FileNotFoundError):
    """A file does not exist, on the host or in the guest."""


class FileExists(AlreadyExists, FileExistsError):
    """A file exists that was to be created."""


class NameTaken(AlreadyExists):
    """The name of a sandbox, image or snapshot is in use."""


class TagTaken(AlreadyExists):
    """Another state of the sandbox has the tag."""


class QemuNotFound(NotFound):
    """No QEMU is installed."""


class ApplyConflict(WrongState):
    """Files changed on the host and in the sandbox; `arguments["paths"]` lists them."""


class LinkEnded(WrongState):
    """The guest or its sandbox ended while it was used."""


class OutputLimit(Exhausted):
    """A command printed more than the caller allowed."""


def output_limit(limit: int) -> OutputLimit:
    message = f"the output has more than {limit} bytes"
    return OutputLimit(message, code="output_limit", kind="exhausted", arguments={"limit_bytes": limit})


class NotEnoughMemory(Exhausted):
    """The host has less memory than the sandbox asks for."""


class DiskFull(Exhausted):
    """A file system is full."""


class BootTimedOut(TimedOut):
    """The guest did not boot in time; `arguments["console"]` has its last lines."""


class BuildFailed(GuestError):
    """A step of a recipe failed."""


class ProgramMismatch(Unsupported):
    """The program `sandtree` is missing or of another version than this package."""


_KINDS: dict[str, type[SandtreeError]] = {
    "not_found": NotFound,
    "already_exists": AlreadyExists,
    "invalid": Invalid,
    "busy": Busy,
    "wrong_state": WrongState,
    "unsupported": Unsupported,
    "exhausted": Exhausted,
    "timeout": TimedOut,
    "guest": GuestError,
    "engine": EngineError,
    "corrupt": Corrupt,
    "io": IoError,
    "internal": InternalError,
}

_CODES: dict[str, type[SandtreeError]] = {
    "no_sandbox": SandboxNotFound,
    "no_state": StateNotFound,
    "no_step": StateNotFound,
    "no_image": ImageNotFound,
    "no_image_or_snapshot": ImageNotFound,
    "not_pulled": ImageNotFound,
    "no_snapshot": SnapshotNotFound,
    "no_mount": MountNotFound,
    "no_display": DisplayNotFound,
    "no_qemu": QemuNotFound,
    "file_not_found": FileMissing,
    "file_exists": FileExists,
    "sandbox_name_taken": NameTaken,
    "name_taken": NameTaken,
    "tag_taken": TagTaken,
    "apply_conflicts": ApplyConflict,
    "link_ended": LinkEnded,
    "output_limit": OutputLimit,
    "not_enough_memory": NotEnoughMemory,
    "disk_full": DiskFull,
    "not_enough_space": DiskFull,
    "guest_disk_full": DiskFull,
    "boot_timeout": BootTimedOut,
    "command_not_found": CommandNotFound,
    "build_step_failed": BuildFailed,
}


def class_of(code: str, kind: str) -> type[SandtreeError]:
    """The class of a code; that of its kind, for a code without one or of a newer program."""
    return _CODES.get(code) or _KINDS.get(kind, SandtreeError)


def from_report(report: Mapping[str, Any]) -> SandtreeError:
    """The exception for a report of the library."""
    code, kind = report["code"], report["kind"]
    return class_of(code, kind)(
        report["message"],
        code=code,
        kind=kind,
        causes=report.get("causes", ()),
        arguments=report.get("arguments", {}),
    )


def from_json(text: str) -> SandtreeError:
    return from_report(json.loads(text))
