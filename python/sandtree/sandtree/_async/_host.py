"""A host: the store, its images and snapshots, and the sandboxes that keepers run."""

from __future__ import annotations

import json
import os
import warnings
from typing import TYPE_CHECKING, Any, List, Mapping, Optional

from .. import _native, _process
from .._errors import SandtreeWarning
from .._options import Size, import_spec, placed, suggests
from .._progress import Callback, Shown
from .._types import (
    Collected,
    Diff,
    Exported,
    ImageInfo,
    Imported,
    PathLike,
    Pulled,
    Pushed,
    SandboxInfo,
    SnapshotInfo,
    Verified,
    read,
)
from ._wait import here, run

if TYPE_CHECKING:
    from ._sandbox import Sandbox


class Host:
    """An opened store with its QEMU. Without arguments: that of the command line.

    Args:
        home: the directory of the store [default: SANDTREE_HOME, or ~/.local/share/sandtree]
        qemu: the QEMU to use [default: SANDTREE_QEMU, or the first on PATH]
        machine_user: "auto": as root, a separate user id for each machine; "caller": the calling user
        spares: when QEMU is started ahead of the next revert

    Example:
        host = Host()
        for sandbox in await host.list():
            print(sandbox.name, sandbox.state)
    """

    @suggests
    def __init__(
        self,
        home: Optional[PathLike] = None,
        *,
        qemu: Optional[PathLike] = None,
        machine_user: Optional[str] = None,
        spares: Optional[str] = None,
    ) -> None:
        self._given = {
            "home": None if home is None else os.path.abspath(os.fspath(home)),
            "qemu": None if qemu is None else os.path.abspath(os.fspath(qemu)),
            "machine_user": machine_user,
            "spares": spares,
        }
        self._host: Optional[_native.Host] = None

    async def _opened(self) -> _native.Host:
        if self._host is None:
            given = json.dumps({**self._given, "program": _process.program()})
            self._host = await run(lambda done: _native.open(given, done))
        return self._host

    async def _call(self, verb: str, label: str = "", progress: Optional[Callback] = None, **request: Any) -> Any:
        host = await self._opened()
        text = json.dumps({"verb": verb, **request})
        with Shown(here(progress), label or verb) as shown:
            answer = await run(lambda done: host.call(text, shown.meter, done))
        return json.loads(answer)

    async def list(self) -> List[SandboxInfo]:
        """All sandboxes of the store, oldest first."""
        found = await self._call("list")
        for error in found["errors"]:
            warnings.warn(f"a sandbox cannot be read: {error['message']}", SandtreeWarning, stacklevel=2)
        return [read(SandboxInfo, each) for each in found["sandboxes"]]

    async def sandbox(self, name: str) -> Sandbox:
        """A sandbox by its name or id, whichever process runs it. It does not belong to this process."""
        from ._sandbox import Sandbox

        return await Sandbox.attach(name, host=self)

    async def doctor(self) -> Mapping[str, Any]:
        """What this host can do, and why not more: what `sandtree doctor --json` prints."""
        return await self._call("doctor")  # type: ignore[no-any-return]

    async def images(self) -> List[ImageInfo]:
        """The images of the store."""
        return [_image(each) for each in await self._call("images")]

    async def image(self, name: str) -> ImageInfo:
        """An image by its name or digest."""
        return _image(await self._call("inspect_image", image=name))

    async def ensure_image(
        self, name: str, *, rebuild: bool = False, progress: Optional[Callback] = None
    ) -> ImageInfo:
        """Builds a built-in image, if it is missing."""
        label = f"image {name}"
        return _image(await self._call("ensure_image", label, progress, name=name, rebuild=rebuild))

    async def build_image(
        self,
        recipe: PathLike,
        *,
        name: Optional[str] = None,
        no_cache: bool = False,
        progress: Optional[Callback] = None,
    ) -> ImageInfo:
        """Builds an image from a recipe."""
        path = os.fspath(recipe)
        built = await self._call(
            "build_image", f"building {path}", progress, recipe=path, name=name, anew=no_cache
        )
        return _image(built)

    async def import_image(
        self,
        path: PathLike,
        *,
        name: Optional[str] = None,
        kernel: Optional[PathLike] = None,
        initramfs: Optional[PathLike] = None,
        modules: Optional[PathLike] = None,
        init: Optional[str] = None,
        disk: Optional[Size] = None,
        progress: Optional[Callback] = None,
    ) -> ImageInfo:
        """Imports a root file system, an OCI image or a disk as an image.

        Args:
            kernel: "cloud" or "full", which are Debian's, or a file [default: "cloud"]
            initramfs, modules: with a file as kernel: a cpio archive, and the directory of its modules
            init: process 1 in the guest: "agent", or "image" for the image's own [default: "agent"; a disk's own]
            disk: disk size of its sandboxes [default: at least 4 GiB of free space]
        """
        source = os.fspath(path)
        spec = import_spec(kernel, initramfs, modules, init, disk)
        imported = await self._call(
            "import_image", f"importing {source}", progress, path=source, name=name, spec=spec
        )
        return _image(imported)

    async def remove_image(self, name: str) -> None:
        """Removes the name of an image; its content stays while anything uses it."""
        await self._call("remove_image", image=name)

    async def snapshots(self) -> List[SnapshotInfo]:
        """The snapshots of the store, oldest first."""
        found = await self._call("snapshots")
        if found["trouble"]:
            warnings.warn(f"snapshots may be missing here: {found['trouble']}", SandtreeWarning, stacklevel=2)
        return [read(SnapshotInfo, each) for each in found["snapshots"]]

    async def inspect_snapshot(self, snapshot: str) -> Mapping[str, Any]:
        """A snapshot with its manifest: what `sandtree snapshot inspect --json` prints."""
        return await self._call("inspect_snapshot", snapshot=snapshot)  # type: ignore[no-any-return]

    async def verify(self, snapshot: str, *, progress: Optional[Callback] = None) -> Verified:
        """Reads every byte of a snapshot and compares it with its digest."""
        return read(Verified, await self._call("verify", f"verifying {snapshot}", progress, snapshot=snapshot))

    async def tag_snapshot(self, snapshot: str, name: str, *, replace: bool = False) -> None:
        """Gives a snapshot one more name."""
        await self._call("tag_snapshot", snapshot=snapshot, name=name, replace=replace)

    async def remove_snapshot(self, snapshot: str) -> None:
        """Removes a snapshot by its name, digest or directory."""
        await self._call("remove_snapshot", snapshot=snapshot)

    async def export(
        self,
        what: str,
        path: PathLike,
        *,
        memory: bool = False,
        replace: bool = False,
        plain: bool = False,
        without_image: bool = False,
        since: Optional[str] = None,
        progress: Optional[Callback] = None,
    ) -> Exported:
        """Writes a snapshot, a sandbox or one of its states ("NAME@TAG") into one verified file."""
        target = os.path.abspath(os.fspath(path))
        exported = await self._call(
            "export",
            f"exporting {what}",
            progress,
            reference=what,
            path=target,
            memory=memory,
            replace=replace,
            plain=plain,
            without_image=without_image,
            since=since,
        )
        # Imported where it is used: `import sandtree` stays fast.
        from pathlib import Path

        return read(Exported, exported, path=Path(target))

    async def import_(
        self, path: PathLike, name: str, *, replace: bool = False, progress: Optional[Callback] = None
    ) -> Imported:
        """Reads a file that `export` wrote, verifies it, and names the snapshot."""
        source = os.path.abspath(os.fspath(path))
        imported = await self._call(
            "import", f"importing {source}", progress, path=source, name=name, replace=replace
        )
        return read(Imported, imported)

    async def push(
        self,
        what: str,
        reference: str,
        *,
        username: Optional[str] = None,
        password: Optional[str] = None,
        plain_http: bool = False,
        ca: Optional[PathLike] = None,
        progress: Optional[Callback] = None,
    ) -> Pushed:
        """Uploads an image or a snapshot to a registry."""
        access = _access(username, password, plain_http, ca)
        pushed = await self._call(
            "push", f"pushing {what}", progress, what=what, reference=reference, access=access
        )
        return read(Pushed, pushed)

    async def pull(
        self,
        reference: str,
        *,
        name: Optional[str] = None,
        replace: bool = False,
        username: Optional[str] = None,
        password: Optional[str] = None,
        plain_http: bool = False,
        ca: Optional[PathLike] = None,
        kernel: Optional[PathLike] = None,
        initramfs: Optional[PathLike] = None,
        modules: Optional[PathLike] = None,
        init: Optional[str] = None,
        disk: Optional[Size] = None,
        progress: Optional[Callback] = None,
    ) -> Pulled:
        """Downloads an image or a snapshot from a registry.

        An image is made as `import_image` makes one, with the same options.
        """
        pulled = await self._call(
            "pull",
            f"pulling {reference}",
            progress,
            reference=reference,
            name=name,
            replace=replace,
            access=_access(username, password, plain_http, ca),
            spec=import_spec(kernel, initramfs, modules, init, disk),
        )
        return read(Pulled, pulled)

    async def gc(self, *, dry_run: bool = False) -> Collected:
        """Removes files that nothing uses."""
        return read(Collected, await self._call("gc", dry_run=dry_run))

    async def usage(self) -> Mapping[str, Any]:
        """The disk usage of the store: what `sandtree df --json` prints."""
        return await self._call("usage")  # type: ignore[no-any-return]

    async def tree(self) -> Mapping[str, Any]:
        """All images, snapshots, sandboxes and their states: what `sandtree log --json` prints."""
        return await self._call("tree")  # type: ignore[no-any-return]

    async def diff(self, before: str, after: str, *, times: bool = False) -> Diff:
        """The files that differ between two snapshots, sandboxes or states ("NAME@TAG")."""
        return read(Diff, await self._call("diff", before=before, after=after, times=times))

    async def diff_content(self, before: str, after: str, path: str) -> str:
        """The lines of one file that differ, in the form of `diff -u`; empty for equal and for binary files."""
        found = await self._call("content_diff", before=before, after=after, path=path)
        return str(found["diff"])

    def __repr__(self) -> str:
        home = self._given["home"]
        return f"Host({home!r})" if home else "Host()"


_default: Optional[Host] = None


def default_host() -> Host:
    """The host of sandboxes that are created without one."""
    global _default
    if _default is None:
        _default = Host()
    return _default


def _image(data: Mapping[str, Any]) -> ImageInfo:
    return read(ImageInfo, data, details=data)


def _access(
    username: Optional[str], password: Optional[str], plain_http: bool, ca: Optional[PathLike]
) -> dict[str, Any]:
    return {
        "username": username,
        "password": password,
        "plain_http": plain_http,
        "ca": None if ca is None else placed(os.path.abspath(os.fspath(ca)), None),
    }
