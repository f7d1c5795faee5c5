"""Real guests for the tests of the Python package.

The package is installed: `make python` runs these tests in fresh environments. `SANDTREE_TEST_BASE` is a store that has the
image `tiny`; each run works on a copy of it, made of hard links.
"""

import asyncio
import gc
import inspect
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

_home = tempfile.mkdtemp(prefix="sandtree-python-")
# Before the package is used: the default host reads it.
os.environ["SANDTREE_HOME"] = os.path.join(_home, "store")
LONG = os.environ.get("SANDTREE_TEST_LONG") == "1"


def pytest_configure(config):
    base = os.environ.get("SANDTREE_TEST_BASE")
    if base and os.path.isdir(base):
        # Stores that shared a lock would wait for each other.
        ignored = shutil.ignore_patterns("lock")
        shutil.copytree(base, os.environ["SANDTREE_HOME"], copy_function=os.link, ignore=ignored)


def pytest_unconfigure(config):
    shutil.rmtree(_home, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Runs a test that is a coroutine, in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def keepers():
    """The processes of this run's store: keepers have it in their environment or in their open files."""
    found = []
    home = os.environ["SANDTREE_HOME"]
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or process.name == str(os.getpid()):
            continue
        try:
            command = (process / "cmdline").read_bytes()
            is_keeper = b"\0keeper\0" in command
            is_machine = b"qemu-system" in command and home.encode() in command
            uses = is_keeper and any(home in os.readlink(fd) for fd in (process / "fd").iterdir())
        except OSError:
            continue
        if uses or is_machine:
            found.append((int(process.name), command))
    return found


def sandboxes():
    """The directories of sandboxes."""
    directory = Path(os.environ["SANDTREE_HOME"]) / "sandboxes"
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


def eventually(condition, seconds=60.0, about=lambda: "it never became true"):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, about()
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def nothing_left():
    """After each test, no sandbox and no process of this run is left."""
    yield
    gc.collect()
    eventually(lambda: not sandboxes())
    eventually(lambda: not keepers())


@pytest.fixture
def scratch(tmp_path):
    return tmp_path
