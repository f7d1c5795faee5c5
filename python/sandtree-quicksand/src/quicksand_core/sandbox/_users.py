"""Users of the guest. Their accounts are written into /etc/passwd, /etc/group and /etc/shadow, on any distribution."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import sandtree

from .._constants import GuestCommands, Timeouts
from .._types import ExecuteResult, StdinSource

if TYPE_CHECKING:
    from ._sandbox import Sandbox

_DEFAULT = "quicksand"
_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_FIRST_ID, _LAST_ID = 1000, 59999
_FILES = {"passwd": 0o644, "group": 0o644, "shadow": 0o600}

# Ends every process of a user: a process may start another one while they are looked at.
_END_PROCESSES = """
for try in 1 2 3 4 5; do
  found=
  for dir in /proc/[0-9]*; do
    [ "$(stat -c %u "$dir" 2>/dev/null)" = "$1" ] && kill -9 "${dir#/proc/}" 2>/dev/null && found=1
  done
  [ -n "$found" ] || exit 0
done
"""


class SandboxUser:
    """A user of the guest. `execute` runs commands as this user, in its home."""

    def __init__(self, sandbox: Sandbox, name: str, *, uid: int, gid: int, home: str) -> None:
        self._sandbox = sandbox
        self.name = name
        self.uid = uid
        self.gid = gid
        self.home = home

    async def execute(
        self,
        command: str,
        timeout: float = Timeouts.GUEST_AGENT_REQUEST,
        cwd: str | None = None,
        shell: str = GuestCommands.SHELL,
        on_stdout: Callable[[str], None] | None = None,
        on_stderr: Callable[[str], None] | None = None,
        exclusive: bool = False,
        *,
        stdin: StdinSource | None = None,
    ) -> ExecuteResult:
        """`Sandbox.execute` as this user."""
        # An image may have another directory for its commands.
        directory = self.home if cwd is None else cwd
        return await self._sandbox.execute(
            command, timeout, directory, shell, on_stdout, on_stderr, exclusive, self.name, stdin=stdin
        )

    def __repr__(self) -> str:
        return f"SandboxUser(name={self.name!r}, uid={self.uid}, home={self.home!r})"


class Accounts:
    """The account files of a guest, as lines of fields."""

    def __init__(self, files: dict[str, list[list[str]]]) -> None:
        self._files = files

    @classmethod
    async def read(cls, sandbox: sandtree.Sandbox) -> Accounts:
        files = {}
        for name in _FILES:
            try:
                text = await sandbox.files.read_text(f"/etc/{name}")
            except sandtree.FileMissing:
                text = ""
            files[name] = [line.split(":") for line in text.splitlines()]
        return cls(files)

    async def write(self, sandbox: sandtree.Sandbox) -> None:
        for name, mode in _FILES.items():
            path = f"/etc/{name}"
            text = "".join(":".join(fields) + "\n" for fields in self._files[name])
            try:
                old = await sandbox.files.stat(path)
                await sandbox.files.write(path, text, old.mode & 0o7777, old.uid, old.gid)
            except sandtree.FileMissing:
                await sandbox.files.write(path, text, mode)

    def has(self, name: str) -> bool:
        return any(line[0] == name for kind in ("passwd", "group") for line in self._files[kind])

    def uid_of(self, name: str) -> int | None:
        for line in self._files["passwd"]:
            if line[0] == name and len(line) > 2 and line[2].isdecimal():
                return int(line[2])
        return None

    def home_of(self, name: str) -> str | None:
        homes = [line[5] for line in self._files["passwd"] if line[0] == name and len(line) > 5]
        return homes[0] if homes else None

    def free_id(self) -> int:
        used = [_FIRST_ID - 1]
        for line in self._files["passwd"] + self._files["group"]:
            if len(line) > 2 and line[2].isdecimal() and _FIRST_ID <= int(line[2]) <= _LAST_ID:
                used.append(int(line[2]))
        if max(used) >= _LAST_ID:
            raise RuntimeError("no free uid")
        return max(used) + 1

    def add(self, name: str, number: int, home: str) -> None:
        text = str(number)
        self._files["passwd"].append([name, "x", text, text, "", home, "/bin/sh"])
        self._files["group"].append([name, "x", text, ""])
        self._files["shadow"].append([name, "!", "0", "0", "99999", "7", "", "", ""])

    def remove(self, name: str) -> None:
        """Removes a user, its group, and its memberships."""
        for kind, lines in self._files.items():
            self._files[kind] = [line for line in lines if line[0] != name]
        for line in self._files["group"]:
            if len(line) > 3:
                line[3] = ",".join(member for member in line[3].split(",") if member != name)


async def create(sandbox: sandtree.Sandbox, name: str) -> tuple[int, str]:
    """Makes a user; returns its id and its home. Raises RuntimeError with the reason."""
    if not _NAME.fullmatch(name):
        raise RuntimeError(f"invalid username {name!r}: must match [a-z_][a-z0-9_-]* (max 32 chars)")
    accounts = await Accounts.read(sandbox)
    if accounts.has(name):
        raise RuntimeError(f"user {name!r} already exists")
    number = accounts.free_id()
    home = f"/home/{name}"
    accounts.add(name, number, home)
    made = await sandbox.execute(
        f"mkdir -p /home && mkdir {home} && chmod 0700 {home} && chown {number}:{number} {home}", cwd="/"
    )
    if made.exit_code != 0:
        raise RuntimeError(made.stderr.strip() or f"cannot make {home}")
    await accounts.write(sandbox)
    return number, home


async def create_default(sandbox: sandtree.Sandbox) -> None:
    """Makes the user that Quicksand's images have: `quicksand`, who may become root."""
    if (await Accounts.read(sandbox)).has(_DEFAULT):
        return
    await create(sandbox, _DEFAULT)
    await sandbox.files.mkdir("/etc/sudoers.d")
    await sandbox.files.write(f"/etc/sudoers.d/{_DEFAULT}", f"{_DEFAULT} ALL=(ALL) NOPASSWD:ALL\n", 0o440)


async def delete(sandbox: sandtree.Sandbox, name: str, *, remove_home: bool) -> None:
    """Ends the processes of a user and removes the user. Raises RuntimeError with the reason."""
    accounts = await Accounts.read(sandbox)
    uid = accounts.uid_of(name)
    if uid is None:
        raise RuntimeError(f"user {name!r} does not exist")
    if uid == 0:
        raise RuntimeError("root cannot be deleted")
    home = accounts.home_of(name)
    accounts.remove(name)
    await accounts.write(sandbox)
    await sandbox.exec("/bin/sh", "-c", _END_PROCESSES, "sh", str(uid), cwd="/")
    if remove_home and home == f"/home/{name}":
        await sandbox.files.remove(home)
