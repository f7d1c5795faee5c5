"""What belongs to the whole process: its forked children, its end, and the program that keepers run."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Optional

from . import _native
from ._errors import ProgramMismatch, SandtreeError

_forked = False
_program: Optional[str] = None


def _after_fork_in_child() -> None:
    global _forked
    _forked = True
    # The child would keep the sandboxes of its parent after the parent's end.
    for descriptor in _native.after_fork():
        try:
            os.close(descriptor)
        except OSError:
            pass


os.register_at_fork(after_in_child=_after_fork_in_child)


def _at_exit() -> None:
    if not _forked:
        _native.shut_down()


atexit.register(_at_exit)


def check() -> None:
    """Refuses to work in a forked child, which has none of the threads that operations run on."""
    if _forked:
        raise SandtreeError(
            "this process was forked after sandtree was imported",
            code="forked",
            kind="wrong_state",
            hint="start it with multiprocessing's method 'spawn' or with subprocess, or import sandtree in the child only",
        )


def program() -> str:
    """The `sandtree` program of this package, of the same version."""
    if _program is None:
        raise ProgramMismatch(
            "the program sandtree, which runs the sandboxes, is not installed with this package",
            code="no_program",
            kind="unsupported",
            hint="reinstall the package: pip install --force-reinstall sandtree",
        )
    return _program


def _candidates() -> list[str]:
    chosen = os.environ.get("SANDTREE_PROGRAM")
    if chosen:
        return [chosen]
    # Where pip puts programs: beside the package, in an environment, below ~/.local or with `--target`; then where the
    # interpreter is.
    folder = os.path.dirname(os.path.realpath(__file__))
    near = []
    for _ in range(5):
        folder = os.path.dirname(folder)
        near.append(folder)
    return [os.path.join(place, "bin", "sandtree") for place in [*near, sys.prefix]]


def find_program() -> None:
    """Finds the program and compares its version, once, at import."""
    global _program
    for candidate in _candidates():
        if os.access(candidate, os.X_OK) and os.path.isfile(candidate):
            _check_version(candidate)
            _program = candidate
            return


def _check_version(candidate: str) -> None:
    found = _version_of(candidate)
    if found != _native.__version__:
        raise ProgramMismatch(
            f"{candidate} is sandtree {found}, and this package is {_native.__version__}",
            code="program_version",
            kind="unsupported",
            hint="reinstall the package: pip install --force-reinstall sandtree",
        )


def _version_of(candidate: str) -> str:
    reading, writing = os.pipe()
    try:
        actions = [(os.POSIX_SPAWN_DUP2, writing, 1), (os.POSIX_SPAWN_CLOSE, reading)]
        pid = os.posix_spawn(candidate, [candidate, "--version"], os.environ, file_actions=actions)
        os.close(writing)
        writing = -1
        printed = os.read(reading, 256)
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:
            pass  # The program ignores SIGCHLD, so the kernel has reaped it.
    except OSError as error:
        return f"unknown ({error})"
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)
    return printed.decode(errors="replace").strip().rpartition(" ")[2]
