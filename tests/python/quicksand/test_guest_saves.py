"""Saves of real guests: written, read, replaced, compressed, in bundles, and by the program `sandtree`."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from quicksand import Sandbox
from sandtree import _process

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAVES = Path(".quicksand/sandboxes")


async def _content(image: str) -> str:
    async with Sandbox(image=image) as sandbox:
        return (await sandbox.execute("cat /root/*")).stdout


async def test_a_save_is_written_and_read(sandbox: Sandbox, place: Path) -> None:
    await sandbox.execute("rm -f /root/*; echo one >/root/1")
    manifest = await sandbox.save("first")
    assert (manifest.version, manifest.config.image, manifest.config.mounts) == (6, "tiny", [])
    assert Sandbox.validate_save(SAVES / "first") == manifest
    assert (SAVES / "first" / "overlays" / "0.qcow2").read_bytes()[:4] == b"QFI\xfb"
    assert [path.name for path in SAVES.iterdir()] == ["first"]
    assert (await sandbox.execute("echo two >/root/2; cat /root/1")).stdout == "one\n"
    assert await _content("first") == "one\n"
    assert await _content(str(place / SAVES / "first")) == "one\n"


async def test_checkpoints_and_saves(sandbox: Sandbox) -> None:
    await sandbox.checkpoint("here")
    with pytest.raises(RuntimeError, match="active checkpoint snapshots.*here"):
        await sandbox.save("s")
    assert not SAVES.exists()
    await sandbox.save("s", delete_checkpoints=True)
    with pytest.raises(ValueError):
        await sandbox.revert("here")


async def test_a_save_of_a_save_is_complete(sandbox: Sandbox, place: Path) -> None:
    await sandbox.execute("rm -f /root/*; echo one >/root/1")
    await sandbox.save("env")
    async with Sandbox(image="env", save="env") as second:
        await second.execute("echo two >/root/2")
        await second.save("copy", workspace=place / "other")
        await second.execute("echo three >/root/3")
    assert await _content("env") == "one\ntwo\nthree\n"
    assert await _content(str(place / "other" / "copy")) == "one\ntwo\n"


async def test_a_compressed_save(sandbox: Sandbox) -> None:
    await sandbox.execute("rm -f /root/*; yes text | head -c 3000000 >/root/1; sync")
    await sandbox.save("plain")
    await sandbox.save("small", compress=True)

    def size(name: str) -> int:
        return sum(path.stat().st_size for path in (SAVES / name / "overlays").iterdir())

    assert size("small") < size("plain") - 2_000_000
    async with Sandbox(image="small") as loaded:
        assert (await loaded.execute("md5sum </root/1")) == await sandbox.execute("md5sum </root/1")


async def test_an_automatic_save_has_checkpoints_or_not(store: str, place: Path) -> None:
    async with Sandbox(image="tiny", save="auto", workspace=place / "w") as sandbox:
        await sandbox.checkpoint("one")
        await sandbox.execute("echo kept >/root/1")
    assert await _content(str(place / "w" / "auto")) == "kept\n"


async def test_a_failed_automatic_save_is_an_error(store: str, place: Path) -> None:
    (place / "w").mkdir()
    (place / "w" / "auto").mkdir()
    (place / "w" / "auto" / "notes").touch()
    sandbox = Sandbox(image="tiny", save="auto", workspace=place / "w")
    await sandbox.start()
    with pytest.raises(RuntimeError, match="Auto-save for 'auto' failed"):
        await sandbox.stop()
    assert not sandbox.is_running
    assert [path.name for path in (place / "w").iterdir()] == ["auto"]


async def test_a_bundle(sandbox: Sandbox, place: Path) -> None:
    await sandbox.execute("rm -f /root/*; echo one >/root/1")
    await sandbox.save("env")
    with tarfile.open("env.quicksand", "w:gz") as bundle:
        bundle.add(SAVES / "env", "env")
    async with Sandbox(image="env.quicksand", save="next") as loaded:
        await loaded.execute("echo two >/root/2")
    assert Sandbox.validate_save(SAVES / "next").config.image == "tiny"
    assert await _content("next") == "one\ntwo\n"
    program = str(_process.program())
    run = [program, "run", "--rm", "./env.quicksand", "--", "cat", "/root/1"]
    assert subprocess.run(run, capture_output=True, text=True).stdout == "one\n"


async def test_the_program_reads_a_save(sandbox: Sandbox, place: Path) -> None:
    program = str(_process.program())
    await sandbox.execute("rm -f /root/*; echo one >/root/1")
    await sandbox.save("env")
    run = [program, "run", "--rm", str(place / SAVES / "env"), "--", "cat", "/root/1"]
    assert subprocess.run(run, capture_output=True, text=True).stdout == "one\n"
    imported = [program, "image", "import", str(SAVES / "env"), "--name", "test-save"]
    assert subprocess.run(imported, capture_output=True).returncode == 0
    assert await _content("test-save") == "one\n"
    subprocess.run([program, "image", "rm", "test-save"], check=True, capture_output=True)


async def test_a_save_without_its_base(sandbox: Sandbox, place: Path) -> None:
    await sandbox.save("env")
    manifest = json.loads((SAVES / "env" / "manifest.json").read_text())
    manifest["sandtree"]["rootfs"] = "ab" * 32
    (SAVES / "env" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RuntimeError, match="Base image 'tiny' not installed"):
        await Sandbox(image="env").start()
    del manifest["sandtree"]
    manifest["config"]["image"] = "elsewhere"
    (SAVES / "env" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RuntimeError, match="Base image 'elsewhere' not installed"):
        await Sandbox(image="env").start()


async def test_hostile_overlays(sandbox: Sandbox, place: Path) -> None:
    await sandbox.save("env")
    overlay = SAVES / "env" / "overlays" / "0.qcow2"
    overlay.unlink()
    overlay.symlink_to("/etc/passwd")
    with pytest.raises((RuntimeError, ValueError)):
        await Sandbox(image="env").start()
    overlay.unlink()
    overlay.write_bytes(b"QFI\xfb" + b"\xff" * 4096)
    with pytest.raises(RuntimeError):
        await Sandbox(image="env").start()
