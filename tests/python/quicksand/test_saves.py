"""Save directories without guests: validation, names, look-up, replacement."""

from __future__ import annotations

import json
import os
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

from quicksand import Sandbox
from quicksand_core import _bundle
from quicksand_core.qemu import save as saves
from quicksand_core.qemu.image_resolver import SAVE_VERSION, ImageResolver


def make_save(directory: Path, overlays: int = 1, **fields: Any) -> Path:
    (directory / "overlays").mkdir(parents=True)
    for number in range(overlays):
        (directory / "overlays" / f"{number}.qcow2").write_bytes(b"QFI\xfb")
    manifest = {"version": 6, "config": {"image": "tiny"}, "arch": "x86_64", "unknown": 1, **fields}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


def test_a_valid_save(place: Path) -> None:
    manifest = Sandbox.validate_save(make_save(place / "s"))
    assert SAVE_VERSION == 6
    assert (manifest.version, manifest.config.image, manifest.arch) == (6, "tiny", "x86_64")
    assert Sandbox.validate_save(str(make_save(place / "old", version=5))).version == 5


def test_wrong_saves(place: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Save not found"):
        Sandbox.validate_save(place / "none")
    (place / "file").touch()
    with pytest.raises(ValueError, match="not a directory"):
        Sandbox.validate_save(place / "file")
    (place / "empty").mkdir()
    with pytest.raises(ValueError, match="Missing manifest.json"):
        Sandbox.validate_save(place / "empty")
    with pytest.raises(ValueError, match="newer than supported"):
        Sandbox.validate_save(make_save(place / "new", version=7))
    with pytest.raises(ValueError, match="No overlay files found"):
        Sandbox.validate_save(make_save(place / "bare", overlays=0))
    os.rmdir(place / "bare" / "overlays")
    with pytest.raises(ValueError, match="Missing overlays"):
        Sandbox.validate_save(place / "bare")


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", '{"version": "x", "config": {}}', "9" * (2 << 20)])
def test_wrong_manifests(place: Path, text: str) -> None:
    (make_save(place / "s") / "manifest.json").write_text(text)
    with pytest.raises(ValueError):
        Sandbox.validate_save(place / "s")


def test_overlays_are_ordered_by_number(place: Path) -> None:
    save = make_save(place / "s", overlays=12)
    assert [path.name for path in saves.overlay_files(save)] == [f"{n}.qcow2" for n in range(12)]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/tmp/x", "../x", ".hidden", "a\0b"])
def test_a_name_stays_in_its_workspace(name: str) -> None:
    with pytest.raises(ValueError, match="Invalid save name"):
        Sandbox(image="tiny", save=name)


def test_look_up(place: Path) -> None:
    find = ImageResolver._find_save_dir
    everywhere = make_save(place / "home" / ".quicksand" / "sandboxes" / "s")
    assert find("s") == everywhere
    local = make_save(place / ".quicksand" / "sandboxes" / "s")
    assert find("s") == local
    make_save(place / "s")
    assert find("s") == Path("s") and find("other") is None
    (place / "x.tar.gz").touch()
    with pytest.raises(RuntimeError, match="no longer supported"):
        find("x.tar.gz")


def test_an_existing_save_is_replaced_and_nothing_else(place: Path) -> None:
    target = make_save(place / "s", overlays=3)
    saves.publish(make_save(place / ".new"), target)
    assert len(saves.overlay_files(target)) == 1
    assert sorted(path.name for path in place.iterdir()) == ["s"]
    (place / "work").mkdir()
    (place / "work" / "notes").touch()
    with pytest.raises(ValueError, match="is not a save"):
        saves.publish(make_save(place / ".new"), place / "work")
    assert (place / "work" / "notes").exists()


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_save_is_at_its_place_while_it_is_replaced(
    place: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(saves, "_exchange", lambda one, other: False)
    target = make_save(place / "s")
    seen = {"present": 0, "missing": 0}
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            seen["present" if target.is_dir() else "missing"] += 1

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for number in range(100):
            saves.publish(make_save(place / ".new", unknown=number), target)
            assert saves.read_manifest(target)["unknown"] == number
    finally:
        ended.set()
        looking.join()
    assert seen["present"] > 0
    assert not can_exchange or seen["missing"] == 0
    assert sorted(path.name for path in place.iterdir()) == ["s"]


def test_a_link_to_a_save_is_replaced_and_the_save_stays(place: Path) -> None:
    kept = make_save(place / "kept")
    (place / "s").symlink_to(kept)
    saves.publish(make_save(place / ".new", overlays=2), place / "s")
    assert len(saves.overlay_files(place / "s")) == 2 and len(saves.overlay_files(kept)) == 1
    assert sorted(path.name for path in place.iterdir()) == ["kept", "s"]


def test_a_bundle_is_unpacked_without_anything_else(place: Path) -> None:
    save = make_save(place / "s", overlays=2)
    (save / "overlays" / "link.qcow2").symlink_to("/etc/passwd")
    with tarfile.open("s.quicksand", "w:gz") as bundle:
        bundle.add(save, "s")
        bundle.add(save / "manifest.json", "../manifest.json")
        bundle.add(save / "manifest.json", "s/overlays/../../x")
        bundle.add(save / "manifest.json", "/etc/evil")
    with _bundle.unpacked(place / "s.quicksand") as directory:
        files = sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))
        assert files == ["manifest.json", "overlays", "overlays/0.qcow2", "overlays/1.qcow2"]
    assert not directory.exists()


def test_wrong_bundles(place: Path) -> None:
    save = make_save(place / "s")
    with tarfile.open("twice.quicksand", "w") as bundle:
        bundle.add(save, "a")
        bundle.add(save, "b")
    (place / "junk.quicksand").write_bytes(b"junk" * 1000)
    for name in ("twice", "junk"):
        with pytest.raises(ValueError, match="not a bundle"):
            with _bundle.unpacked(place / f"{name}.quicksand"):
                pass


def test_the_extension_of_a_manifest_may_have_any_form(place: Path) -> None:
    for number, extension in enumerate([None, [], "x", {}, {"rootfs": 7}]):
        assert saves.base_digest(make_save(place / str(number), sandtree=extension)) is None
    assert saves.base_digest(make_save(place / "s", sandtree={"rootfs": "ab"})) == "ab"
