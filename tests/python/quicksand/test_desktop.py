"""Keyboard, mouse and screen, with a real desktop in place of `ubuntu-desktop`."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from PIL import Image

from quicksand import Key, UbuntuDesktopSandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")

# A program on a desktop under emulation may take this long to appear.
PATIENCE = 240.0
EVENTS = "/tmp/events"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def desktop(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[UbuntuDesktopSandbox]:
    base = os.environ.get("SANDTREE_TEST_DESKTOP_BASE", "")
    if not os.path.isdir(base):
        pytest.fail(f"no store with the image desktop at {base!r}: make vm ONLY=desktop:: makes it")
    home = tmp_path_factory.mktemp("desktop") / "store"
    shutil.copytree(base, home, copy_function=os.link, ignore=shutil.ignore_patterns("lock"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SANDTREE_HOME", str(home))
        # The warm state of the store is of a machine with one processor.
        sandbox = UbuntuDesktopSandbox(cpus=1)
        with pytest.warns(UserWarning, match="'desktop' is used instead"):
            await sandbox.start()
        yield sandbox
        port = sandbox.vnc_port
        await sandbox.stop()
    assert sandbox.vnc_port is None and port is not None
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


async def seen(desktop: UbuntuDesktopSandbox, pattern: str) -> None:
    """Waits for an event of the window."""
    end = time.monotonic() + PATIENCE
    while not re.search(pattern, (await desktop.execute(f"cat {EVENTS}")).stdout):
        assert time.monotonic() < end, f"the window has no event {pattern}"
        await asyncio.sleep(0.1)


async def test_the_screen(desktop: UbuntuDesktopSandbox, place: Path) -> None:
    await desktop.screenshot(place / "new" / "shot.png")
    with Image.open(place / "new" / "shot.png") as picture:
        assert (picture.format, picture.mode, picture.size) == ("PNG", "RGB", (1280, 800))
        assert len(picture.getcolors(1 << 24) or []) > 100
    assert await desktop.query_display_size() == (1280, 800)
    assert (await desktop.execute("id -u")).stdout == "0\n"
    # Images of Quicksand have this user.
    assert (await desktop.execute("sudo -n id -u", user="quicksand")).stdout == "0\n"
    other = await desktop.create_user("other")
    assert (await other.execute("id -un; pwd")).stdout == "other\n/home/other\n"


async def test_keys_and_mouse(desktop: UbuntuDesktopSandbox) -> None:
    window = f"nohup stdbuf -oL xev -geometry 400x300+300+200 >{EVENTS} 2>/dev/null &"
    assert (await desktop.execute(window)).exit_code == 0
    await seen(desktop, "MapNotify")
    await desktop.mouse_move(12800, 16400)
    position = await desktop.query_mouse_position()
    assert position is not None
    assert (position["current"], position["absolute"]) == (True, True)
    assert abs(position["x"] - 12800) <= 26 and abs(position["y"] - 16400) <= 41
    await desktop.mouse_click()
    await seen(desktop, r"ButtonPress event(?s:.{,250}?)root:\(500,400\),\s*state \S+, button 1,")
    for button, number in (("right", 3), ("wheel-up", 4), ("wheel-down", 5)):
        await desktop.mouse_click(button, double=True)
        await seen(desktop, rf"ButtonRelease event(?s:.{{,250}}?)button {number},")
    await desktop.type_text("é")
    await seen(desktop, r"keysym \S+, eacute\)")
    await desktop.press_key(Key.CTRL, Key.KP_ENTER)
    await seen(desktop, r"KeyRelease event(?s:.{,250}?)keysym \S+, Control_L\)")
    events = (await desktop.execute(f"cat {EVENTS}")).stdout
    assert re.search(r"state 0x4, keycode \d+ \(keysym \S+, KP_Enter\)", events)


async def test_every_key_is_known(desktop: UbuntuDesktopSandbox) -> None:
    # Not those that change the machine for others.
    for key in (Key.F1, Key.SHIFT_R, Key.GRAVE_ACCENT, Key.KP_5, Key.PGDN, Key.SPC, Key.KEY_7):
        await desktop.press_key(key)


async def test_what_is_not_there_is_an_error(desktop: UbuntuDesktopSandbox) -> None:
    with pytest.raises(RuntimeError, match="no-such-key"):
        await desktop.press_key("no-such-key")
    with pytest.raises(RuntimeError, match="wheel-down"):
        await desktop.mouse_click("fourth")
    with pytest.raises(ValueError, match="32767"):
        await desktop.mouse_move(0, 32768)


async def test_vnc(desktop: UbuntuDesktopSandbox) -> None:
    assert desktop.vnc_port in range(5900, 6000)
    reader, writer = await asyncio.open_connection("127.0.0.1", desktop.vnc_port)
    greeting = await asyncio.wait_for(reader.readexactly(12), 60)
    assert greeting == b"RFB 003.008\n"
    # One kind of check: none. A shared screen, then its size.
    writer.write(greeting + b"\x01\x01")
    checked = await asyncio.wait_for(reader.readexactly(2 + 4), 60)
    assert checked == b"\x01\x01" + bytes(4)
    size = struct.unpack(">HH", await asyncio.wait_for(reader.readexactly(4), 60))
    assert size == await desktop.query_display_size()
    writer.close()
    await writer.wait_closed()
