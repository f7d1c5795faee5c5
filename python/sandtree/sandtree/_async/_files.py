"""Files in a guest."""

from __future__ import annotations

import os
from os import fsdecode
from typing import Any, List, Union

from .. import _native
from .._errors import FileMissing
from .._types import FileInfo, GuestPath, PathLike, Transfer
from ._wait import run

LIMIT = 1 << 30
"""The most bytes that `read` returns, unless the caller allows more."""


class Files:
    """The files of a sandbox's guest.

    Example:
        async with Sandbox("tiny") as sb:
            await sb.files.write("/srv/note", "kept")
            assert await sb.files.read("/srv/note") == b"kept"
    """

    def __init__(self, files: _native.Files) -> None:
        self._files = files

    async def read(self, path: GuestPath, limit: int = LIMIT) -> bytes:
        """The bytes of a file. Raises `OutputLimit` if there are more than `limit`."""
        return await run(lambda done: self._files.read(fsdecode(path), limit, done))  # type: ignore[no-any-return]

    async def read_text(self, path: GuestPath, encoding: str = "utf-8", limit: int = LIMIT) -> str:
        """The text of a file."""
        return (await self.read(path, limit)).decode(encoding)

    async def write(
        self, path: GuestPath, data: Union[bytes, str], mode: int = 0o644, uid: int = 0, gid: int = 0
    ) -> int:
        """Writes a file, as a whole: readers see the old content or the new. Returns the number of bytes."""
        raw = data.encode() if isinstance(data, str) else bytes(data)
        return await run(lambda done: self._files.write(fsdecode(path), raw, (mode, uid, gid), done))  # type: ignore[no-any-return]

    async def stat(self, path: GuestPath) -> FileInfo:
        """The attributes of a file; symbolic links are followed."""
        found = await run(lambda done: self._files.stat(fsdecode(path), done))
        return FileInfo(os.path.basename(fsdecode(path)), *found)

    async def exists(self, path: GuestPath) -> bool:
        """Whether a file exists."""
        try:
            await self.stat(path)
        except FileMissing:
            return False
        return True

    async def list(self, path: GuestPath) -> List[FileInfo]:
        """The entries of a directory, by name."""
        found = await run(lambda done: self._files.list(fsdecode(path), done))
        return sorted((FileInfo(name, *stat) for name, stat in found), key=_name)

    async def mkdir(self, path: GuestPath, mode: int = 0o755) -> None:
        """Makes a directory and its parents."""
        await run(lambda done: self._files.make_dir(fsdecode(path), mode, done))

    async def rename(self, path: GuestPath, to: GuestPath) -> None:
        """Renames a file or directory."""
        await run(lambda done: self._files.rename(fsdecode(path), fsdecode(to), done))

    async def remove(self, path: GuestPath) -> None:
        """Removes a file, or a directory with everything in it."""
        await run(lambda done: self._files.remove(fsdecode(path), done))

    async def upload(self, host: PathLike, guest: GuestPath) -> Transfer:
        """Copies a file or directory of the host into the guest; into `guest`, if that is a directory."""
        return _transfer(await run(lambda done: self._files.upload(fsdecode(host), fsdecode(guest), done)))

    async def download(self, guest: GuestPath, host: PathLike) -> Transfer:
        """Copies a file or directory of the guest to the host; into `host`, if that is a directory."""
        return _transfer(await run(lambda done: self._files.download(fsdecode(guest), fsdecode(host), done)))


def _name(info: FileInfo) -> str:
    return info.name


def _transfer(found: Any) -> Transfer:
    count, skipped = found
    return Transfer(count, tuple(skipped))
