"""Names that the store lacks start `debian`, with a real guest."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio
import warnings

from quicksand import Sandbox, UbuntuSandbox


async def main():
    async with UbuntuSandbox(save="env") as sandbox:
        print((await sandbox.execute(". /etc/os-release; echo $ID; echo kept >/home/quicksand/file")).stdout, end="")
        # Quicksand's images have this user.
        print((await sandbox.execute("pwd; sudo -n id -u", user="quicksand")).stdout, end="")
    async with Sandbox(image="ubuntu") as again:
        print((await again.execute("ls /home/quicksand")).stdout, end="")
    async with Sandbox(image="env") as saved:
        print((await saved.execute("cat /home/quicksand/file")).stdout, end="")


with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    asyncio.run(main())
for warning in seen:
    if issubclass(warning.category, UserWarning):
        print(warning.message)
"""


def test_published_names_start_debian_with_one_warning(place: Path) -> None:
    base = os.environ.get("SANDTREE_TEST_DEBIAN", "")
    if not os.path.isdir(base):
        pytest.skip("no store with the image debian: make vm ONLY=debian makes one")
    home = place / "store"
    shutil.copytree(base, home, copy_function=os.link, ignore=shutil.ignore_patterns("lock"))
    environment = {**os.environ, "SANDTREE_HOME": str(home)}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=280)
    lines = ran.stdout.splitlines()
    assert lines[:4] == ["debian", "/home/quicksand", "0", "kept"], (ran.stdout, ran.stderr)
    assert len(lines) == 5 and "there is no image 'ubuntu'; 'debian' is used instead" in lines[4]
