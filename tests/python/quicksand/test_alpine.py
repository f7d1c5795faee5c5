"""Quicksand's own package of Alpine, from PyPI."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from quicksand import AlpineSandbox, Sandbox

pytestmark = pytest.mark.asyncio

SAVE = Path(".quicksand/sandboxes/env")


async def test_it_boots_and_all_states_work(store: str, alpine_package: Path) -> None:
    async with AlpineSandbox(boot_timeout=300) as sandbox:
        release = await sandbox.execute("cat /etc/os-release; cat /proc/1/comm")
        assert "Alpine Linux v3.23" in release.stdout and "init" in release.stdout
        as_user = await sandbox.execute("sudo id -u; pwd", user="quicksand")
        assert as_user.stdout.split() == ["0", "/home/quicksand"]
        await sandbox.checkpoint("one")
        await sandbox.execute("rm -rf /home/quicksand; echo lost >/root/file")
        await sandbox.revert("one")
        assert (await sandbox.execute("ls /home /root")).stdout.split() == ["/home:", "quicksand", "/root:"]
        await sandbox.execute("echo kept >/root/file")
        manifest = await sandbox.save("env", delete_checkpoints=True)
        assert manifest.config.image == "alpine"
    _forget_the_base()
    async with Sandbox(image="env", boot_timeout=300) as loaded:
        assert (await loaded.execute("cat /root/file")).stdout == "kept\n"


def _forget_the_base() -> None:
    """Makes the save one as Quicksand itself writes it: only the name leads to the base."""
    manifest = json.loads((SAVE / "manifest.json").read_text())
    del manifest["sandtree"]
    (SAVE / "manifest.json").write_text(json.dumps(manifest))
    overlay = SAVE / "overlays" / "0.qcow2"
    name = b"/tmp/quicksand-x/alpine.qcow2"
    data = bytearray(overlay.read_bytes())
    data[8:20] = struct.pack(">QI", 512, len(name))
    data[512 : 512 + len(name)] = name
    overlay.write_bytes(data)
