"""The screen of a sandbox, with a real desktop and an independent VNC client.

All tests share one guest.
"""

import ast
import asyncio
import functools
import io
import os
import pathlib
import re
import shutil
import time

import pytest
from PIL import Image
from vncdotool import api as vnc
from vncdotool.client import AuthenticationError

import sandtree
import sandtree.sync
from conftest import eventually
from sandtree import DisplayNotFound, Host, Invalid, Sandbox, Screenshot, TimedOut, WrongState

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# The warm state of the store has this shape.
SHAPE = {"cpus": 1, "memory": "1G"}
# A program on a desktop under emulation may take this long to appear.
PATIENCE = 240.0
EVENTS = "/tmp/events"
PANEL_LINES = 60


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A store with the image `desktop` and its warm state."""
    base = os.environ.get("SANDTREE_TEST_DESKTOP_BASE", "")
    if not os.path.isdir(base):
        pytest.fail(f"no store with the image desktop at {base!r}: make vm ONLY=desktop:: makes it")
    copy = tmp_path_factory.mktemp("desktop") / "store"
    shutil.copytree(base, copy, copy_function=os.link, ignore=shutil.ignore_patterns("lock"))
    yield copy
    shutil.rmtree(copy)


@pytest.fixture(scope="module")
def desktop(home):
    sandbox = Sandbox("desktop", name="desk", host=Host(home), **SHAPE)
    asyncio.run(sandbox.start())
    yield sandbox
    asyncio.run(sandbox.close())
    eventually(lambda: not list((home / "sandboxes").iterdir()))


async def until(condition, about):
    """Repeats a coroutine until it returns something, and returns that."""
    end = time.monotonic() + PATIENCE
    while True:
        found = await condition()
        if found:
            return found
        assert time.monotonic() < end, about
        await asyncio.sleep(0.1)


async def test_pictures(desktop, scratch):
    display = desktop.display
    first = await display.screenshot()
    assert (first.width, first.height) == (1280, 800)
    assert len(first.rgb) == 1280 * 800 * 3
    decoded = Image.open(io.BytesIO(first.png))
    assert (decoded.format, decoded.mode, decoded.size) == ("PNG", "RGB", (1280, 800))
    assert decoded.tobytes() == first.rgb
    assert len(decoded.getcolors(1 << 24)) > 100
    first.save(scratch / "shot.png")
    assert (scratch / "shot.png").read_bytes() == first.png == first._repr_png_()
    assert (await desktop.info()).display == "1280x800"

    await display.move(300, 300)
    before = await display.wait_still(0.5)
    again = await display.screenshot()
    assert before == again and hash(before) == hash(again)
    waiting = asyncio.ensure_future(display.wait_change(before, timeout=60))
    await display.move(700, 500)
    after = await waiting
    assert isinstance(after, Screenshot) and after != before and after != before.png
    info = await display.info()
    assert (info.width, info.height, info.x, info.y, info.ready) == (1280, 800, 700, 500, True)


async def test_waiting_has_an_end(desktop):
    display = desktop.display
    still = await display.wait_still(0.5)
    with pytest.raises(TimedOut) as late:
        await display.wait_change(still, timeout=0.2)
    assert late.value.code == "screen_timeout" and "timeout=" in late.value.hint
    with pytest.raises(TimedOut):
        await display.wait_still(1000, timeout=0.2)
    for timeout in (-1, float("nan"), float("inf")):
        with pytest.raises(Invalid, match="timeout"):
            await display.wait_still(0.1, timeout)
    # A wait that is longer than the clock counts ends when it is cancelled.
    waiting = asyncio.ensure_future(display.wait_still(1000, timeout=1e19))
    await asyncio.wait({waiting}, timeout=0.5)
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_keys_and_mouse_reach_the_guest(desktop):
    """`xev` prints every event of its window."""
    display = desktop.display
    window = f"exec stdbuf -oL xev -geometry 400x300+300+200 >{EVENTS}"
    await desktop.exec("sh", "-c", window, detach=True).start()

    async def events():
        return (await desktop.execute(f"cat {EVENTS}")).check().stdout

    async def seen(pattern):
        return await until(lambda: _found(events, pattern), f"the window has no event {pattern}")

    await seen("MapNotify")
    await display.wait_still(1.0, timeout=PATIENCE)
    await display.click(500, 400)
    await seen(r"ButtonPress event(?s:.{,200}?)root:\(500,400\),\s*state \S+, button 1,")

    await display.type("aß日")
    for keysym in ("0x61", "0xdf", "0x10065e5"):
        await seen(rf"KeyPress event(?s:.{{,200}}?)keysym {keysym},")
    await display.press("ctrl+j", "F9", hold=0.05)
    await seen(r"state 0x4, keycode \d+ \(keysym \S+, j\)")
    await seen(r"keysym \S+, F9\)")

    def at(event, x, y, number):
        return rf"{event} event(?s:.{{,200}}?)root:\({x},{y}\),\s*state \S+, button {number},"

    await display.click(button="right", count=2)
    await seen(at("ButtonRelease", 500, 400, 3))
    await display.scroll(-1, 510, 410)
    await seen(at("ButtonPress", 510, 410, 4))
    await display.scroll(0, right=1)
    await seen(at("ButtonPress", 510, 410, 7))
    await display.drag(510, 410, 560, 430, button="middle")
    await seen(at("ButtonPress", 510, 410, 2))
    await seen(at("ButtonRelease", 560, 430, 2))
    await display.down("left")
    await seen(at("ButtonPress", 560, 430, 1))
    await display.up("left")
    await seen(at("ButtonRelease", 560, 430, 1))
    await desktop.execute("pkill -x xev")


async def _found(events, pattern):
    return re.search(pattern, await events())


async def test_the_clipboard(desktop):
    display = desktop.display
    for text in ("one", "zwei\n日本 🙂"):
        await display.set_clipboard(text)
        assert await display.clipboard() == text


async def test_the_size(desktop):
    display = desktop.display
    await display.set_size(1024, 768)
    info = await display.info()
    assert (info.width, info.height) == (1024, 768)
    picture = await display.screenshot()
    assert (picture.width, picture.height) == (1024, 768)
    await display.set_size(1280, 800)
    assert (await display.screenshot()).width == 1280


async def test_what_cannot_be_done_is_refused(desktop, home):
    display = desktop.display
    refused = [
        lambda: display.press("nokey"),
        lambda: display.press("a", hold=11),
        lambda: display.type("a\x1bb"),
        lambda: display.type("\ud800"),
        lambda: display.move(1280, 0),
        lambda: display.move(-1, 0),
        lambda: display.move(70000, 0),
        lambda: display.click(button="fourth"),
        lambda: display.click(count=11),
        lambda: display.scroll(101),
        lambda: display.set_size(64, 64),
        lambda: display.set_size(100_000, 800),
    ]
    for number, call in enumerate(refused):
        with pytest.raises(Invalid):
            await call()
            pytest.fail(f"call {number} was accepted")
    for call in (lambda: display.press(), lambda: display.click(1), lambda: display.move(1.5, 2)):
        with pytest.raises(TypeError):
            await call()
    with pytest.raises(Invalid, match="2560x1600"):
        await Sandbox("desktop", display="2561x800", host=Host(home)).start()
    with pytest.raises(WrongState, match="view is not started"):
        display.view().port


async def test_a_sandbox_without_a_screen_says_so():
    async with Sandbox("tiny") as sb:
        with pytest.raises(DisplayNotFound) as missing:
            sb.display
        assert missing.value.code == "no_display" and "desktop" in missing.value.hint
    with pytest.raises(Invalid, match='kernel = "full"'):
        await Sandbox("tiny", display="640x480").start()


def test_the_same_without_async(desktop, home):
    sb = sandtree.sync.Sandbox.attach("desk", host=sandtree.sync.Host(home))
    sb.display.move(100, 100)
    assert sb.display.info().x == 100
    still = sb.display.wait_still(0.5)
    sb.display.move(200, 200)
    assert sb.display.wait_change(still, timeout=PATIENCE) != still
    with sb.display.view() as view:
        assert view.host == "127.0.0.1" and view.port > 0


async def test_a_viewer_stays_over_a_revert_and_a_pause(desktop):
    """An independent client sees what the screen shows, on one connection."""
    display = desktop.display
    await display.move(200, 600)
    before = await display.wait_still(1.0)
    await desktop.checkpoint("seen")
    async with display.view() as view:
        client = await asyncio.to_thread(connect, view, view.password)
        assert await asyncio.to_thread(captured, client) == scene(before.rgb)

        await display.move(900, 300)
        after = await until(lambda: other_scene(display, before), "the pointer does not move")
        await until(lambda: shows(client, after), "the viewer does not show the change")

        await desktop.revert("seen")
        assert scene((await display.screenshot()).rgb) == scene(before.rgb)
        await until(lambda: shows(client, before), "the viewer does not show the checkpoint")
        # Its keys and pointer reach the machine of the new moment.
        await asyncio.to_thread(client.mouseMove, 640, 400)
        await until(lambda: pointer_is(display, 640, 400), "the viewer's pointer does not arrive")

        await desktop.pause()
        await desktop.resume()
        await until(lambda: points(client, display, 200, 600), "the pointer does not arrive after a resume")
        window = f"exec stdbuf -oL xev -geometry 400x300+300+200 >{EVENTS}"
        await desktop.exec("sh", "-c", window, detach=True).start()
        await until(lambda: has_event(desktop, "MapNotify"), "the window does not appear")
        await display.wait_still(1.0, timeout=PATIENCE)
        await display.click(500, 400)
        await asyncio.to_thread(client.keyPress, "k")
        await until(lambda: has_event(desktop, r"keysym \S+, k\)"), "the viewer's key does not arrive")
        await desktop.execute("pkill -x xev")
        await asyncio.to_thread(client.disconnect)
        port = view.port
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    await desktop.forget("seen")


async def test_a_viewer_needs_the_password(desktop):
    async with desktop.display.view() as view:
        client = await asyncio.to_thread(connect, view, "guessed")
        with pytest.raises(AuthenticationError):
            await asyncio.to_thread(captured, client)


async def points(client, display, x, y):
    """Moves a viewer's pointer. What a viewer sends while there is no machine is lost."""
    await asyncio.to_thread(client.mouseMove, x, y)
    return await pointer_is(display, x, y)


async def has_event(desktop, pattern):
    return re.search(pattern, (await desktop.execute(f"cat {EVENTS}")).check().stdout)


async def other_scene(display, before):
    """The picture, once it differs."""
    picture = await display.screenshot()
    return picture if scene(picture.rgb) != scene(before.rgb) else None


async def shows(client, picture):
    return await asyncio.to_thread(captured, client) == scene(picture.rgb)


def scene(rgb):
    """A picture without the panel at its top, whose clock changes."""
    return rgb[1280 * 3 * PANEL_LINES :]


async def pointer_is(display, x, y):
    info = await display.info()
    return abs(info.x - x) <= 1 and abs(info.y - y) <= 1


def connect(view, password):
    client = vnc.connect(f"{view.host}::{view.port}", password=password)
    client.timeout = 60
    return client


def captured(client):
    """The scene that the client shows, as red, green and blue."""
    file = io.BytesIO()
    client.captureScreen(file, format="png")
    return scene(Image.open(file).convert("RGB").tobytes())


def guide():
    text = (ROOT / "docs/guide/python.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return [block for block in blocks if '"desktop"' in block]


@pytest.mark.parametrize("text", guide(), ids=lambda _: "screens")
def test_the_guide_runs(text, home, scratch, monkeypatch):
    """The examples with a desktop, with the shape of the store's warm state."""
    monkeypatch.chdir(scratch)
    names = {name: getattr(sandtree, name) for name in sandtree.__all__}
    names["Sandbox"] = functools.partial(Sandbox, host=Host(home), **SHAPE)
    code = compile(text, "<guide>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    asyncio.run(eval(code, names))
    assert (scratch / "shot.png").read_bytes().startswith(b"\x89PNG")
