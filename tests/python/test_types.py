"""The types of the package, checked by mypy and pyright as a user's editor does. Runs where both are installed."""

import pathlib
import subprocess
import sys

import pytest

import sandtree

PACKAGE = pathlib.Path(sandtree.__file__).parent
USES = """
import asyncio
from sandtree import ExecuteResult, Mount, NetworkMode, Sandbox, ScreenInfo, Screenshot, StateTree
from sandtree import sync


async def main() -> None:
    async with Sandbox(image="debian", memory="1G", cpus=2, network=NetworkMode.FULL, mounts=[Mount(".", "/w")]) as sb:
        result: ExecuteResult = await sb.execute("true", on_stdout=print)
        code: int = result.exit_code
        copies: list[Sandbox] = await sb.fork(3)
        tree: StateTree = await sb.states()
        async for line in sb.exec("make", "-j2").lines():
            text: str = line
        data: bytes = await sb.files.read("/x")
        picture: Screenshot = await sb.display.screenshot()
        png: bytes = picture.png
        info: ScreenInfo = await sb.display.info()
        await sb.display.click(info.x, info.y, button="right")
        await sb.display.press("ctrl+l", hold=0.5)
        async with sb.display.view() as view:
            address: tuple[str, int, str] = (view.host, view.port, view.password)


def waits() -> None:
    with sync.Sandbox("tiny") as sb:
        result: ExecuteResult = sb.execute("true")
        shown: Screenshot = sb.display.wait_change(sb.display.screenshot(), timeout=5)
        for line in sb.exec("make").lines():
            text: str = line


asyncio.run(main())
"""
WRONG = """
from sandtree import Sandbox

Sandbox("tiny", memory=[1])
Sandbox("tiny", memry="1G")
Sandbox("tiny").display.screenshot().width
"""


def check(tool, *arguments):
    if subprocess.run([sys.executable, "-m", tool, "--version"], capture_output=True).returncode:
        pytest.skip(f"{tool} is not installed")
    return subprocess.run([sys.executable, "-m", tool, *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.parametrize("tool, options", [("mypy", ["--strict", "--no-error-summary"]), ("pyright", ["--pythonpath", sys.executable])])
def test_uses_of_the_package_are_typed(tool, options, tmp_path):
    (tmp_path / "uses.py").write_text(USES)
    (tmp_path / "wrong.py").write_text(WRONG)
    right = check(tool, *options, tmp_path / "uses.py")
    assert right.returncode == 0, right.stdout + right.stderr
    wrong = check(tool, *options, tmp_path / "wrong.py")
    assert wrong.returncode != 0
    for line in (4, 5, 6):
        assert f"wrong.py:{line}" in wrong.stdout, wrong.stdout


def test_the_package_itself_is_typed():
    found = check("mypy", "--strict", "-p", "sandtree")
    assert found.returncode == 0, found.stdout
