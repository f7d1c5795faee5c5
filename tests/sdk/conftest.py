"""A real server with real guests for the real clients.

`SANDTREE_PROGRAM` is the program, `SANDTREE_TEST_BASE` a store that has the image `debian`; each run works on a copy of it,
made of hard links.
"""

import asyncio
import contextlib
import inspect
import json
import os
import signal
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests

_home = tempfile.mkdtemp(prefix="sandtree-sdk-")
STORE = os.path.join(_home, "store")
PROGRAM = os.environ["SANDTREE_PROGRAM"]


def sandtree(*arguments, check=True):
    """Runs the program on the server's store, and returns its output."""
    done = subprocess.run([PROGRAM, "--home", STORE, *arguments], capture_output=True, text=True, timeout=120)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


class Server:
    """`sandtree serve` as a process of its own."""

    def __init__(self, listen="127.0.0.1:0", *options):
        self.log = open(os.path.join(_home, "server.log"), "ab")
        self.process = subprocess.Popen(
            [PROGRAM, "--home", STORE, "--json", "serve", "--listen", listen, *options],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        line = self.process.stdout.readline()
        assert line, Path(self.log.name).read_text()
        self.url = json.loads(line)["url"]

    @property
    def address(self):
        return self.url.split("://")[1]

    def kill(self):
        """As a crash would."""
        self.process.kill()
        self.process.wait()
        self.log.close()

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=30)
        self.log.close()
        return code


class Running:
    """The server of this run, which tests may replace."""

    server = None


def pytest_configure(config):
    subprocess.run(["cp", "-al", os.environ["SANDTREE_TEST_BASE"], STORE], check=True)
    # `cp -al` shares the lock's inode with the store that was copied.
    lock = Path(STORE, "lock")
    lock.unlink()
    lock.touch(mode=0o600)
    Running.server = Server()
    os.environ["E2B_API_KEY"] = json.loads(sandtree("--json", "key", "create", "--name", "tests"))["key"]
    use(Running.server)


def use(server):
    """Points the clients to a server."""
    Running.server = server
    os.environ["E2B_API_URL"] = server.url
    os.environ["E2B_SANDBOX_URL"] = server.url
    os.environ["E2B_VOLUME_API_URL"] = server.url
    host, port = server.address.split(":")
    os.environ["CUBE_API_URL"] = server.url
    os.environ["CUBE_API_KEY"] = os.environ["E2B_API_KEY"]
    os.environ["CUBE_PROXY_NODE_IP"] = host
    os.environ["CUBE_PROXY_PORT_HTTP"] = port


def pytest_unconfigure(config):
    if Running.server is not None:
        if Running.server.process.poll() is None:
            Running.server.kill()
        for sandbox in json.loads(sandtree("--json", "ps", "-a")):
            sandtree("rm", "-f", sandbox["id"], check=False)
    shutil.rmtree(_home, ignore_errors=True)


def eventually(condition, seconds=60.0):
    """Waits for a visible event."""
    end = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.05)


def sandboxes():
    """The ids of all sandboxes of the store, whatever their state."""
    return {sandbox["id"] for sandbox in json.loads(sandtree("--json", "ps", "-a"))}


@pytest.fixture(scope="module")
def sandbox():
    """A sandbox that the tests of a module share."""
    from e2b import Sandbox

    made = Sandbox.create(timeout=600, metadata={"made": "for a module"}, envs={"FOO": "from create"})
    yield made
    made.kill()


@pytest.fixture
def own():
    """Makes sandboxes for one test."""
    from e2b import Sandbox

    made = []

    def make(*arguments, **options):
        options.setdefault("timeout", 300)
        made.append(Sandbox.create(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.kill()


class Loop:
    """The event loop of the asynchronous clients, in a thread: their own tasks run between two calls of a test."""

    _running = None

    @classmethod
    def run(cls, work, *arguments, **options):
        """Calls a function on the loop, and waits for what it returns."""
        if cls._running is None:
            cls._running = asyncio.new_event_loop()
            threading.Thread(target=cls._running.run_forever, daemon=True).start()

        async def call():
            result = work(*arguments, **options)
            return await result if inspect.isawaitable(result) else result

        return asyncio.run_coroutine_threadsafe(call(), cls._running).result(280)


class Blocking:
    """A class or an object of the asynchronous client, called like the synchronous one: one test holds for both."""

    def __init__(self, target):
        self._target = target

    def __getattr__(self, name):
        return blocking(getattr(self._target, name))

    def __call__(self, *arguments, **options):
        return blocking(self._target)(*arguments, **options)


def blocking(value):
    """What a test sees of a value of the asynchronous client."""
    if isinstance(value, list):
        return [blocking(one) for one in value]
    if inspect.isroutine(value):
        return lambda *arguments, **options: blocking(Loop.run(value, *plain(arguments), **plain(options)))
    kind = value if isinstance(value, type) else type(value)
    parts = [getattr(kind, name, None) for name in dir(kind) if not name.startswith("_")]
    if kind.__module__.startswith("e2b") and any(map(inspect.iscoroutinefunction, parts)):
        return Blocking(value)
    return value


def plain(value):
    """The other way round: what the client gets from a test."""
    if isinstance(value, Blocking):
        return value._target
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(one) for one in value)
    return value


@pytest.fixture(scope="module", params=["sync", "async"])
def client(request):
    """Each flavour of E2B's Python client, with the addresses of the server given to it."""
    from e2b import E2B

    url = Running.server.url
    bound = E2B(api_key=os.environ["E2B_API_KEY"], api_url=url, sandbox_url=url)
    is_async = request.param == "async"
    wrap, prefix = (blocking, "Async") if is_async else (lambda value: value, "")
    parts = {name: wrap(getattr(bound, prefix + name)) for name in ["Sandbox", "Secret"]}
    return SimpleNamespace(is_async=is_async, **parts)


@pytest.fixture(scope="module")
def box(client):
    """A sandbox of either flavour, which the tests of a module share."""
    made = client.Sandbox.create(timeout=900, metadata={"made": "for both"}, envs={"FOO": "from create"})
    yield made
    made.kill()


@pytest.fixture
def server():
    return Running.server


@contextlib.contextmanager
def serving(directory, users=()):
    """A registry on this machine, which asks for a name and a password if there are users."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    lines = ["version: 0.1", "log: {level: error}"]
    lines.append(f"storage: {{filesystem: {{rootdirectory: {directory}/storage}}}}")
    lines.append(f"http: {{addr: '{address}'}}")
    if users:
        known = [subprocess.check_output(["htpasswd", "-Bbn", *user], text=True) for user in users]
        (directory / "users").write_text("".join(known))
        lines.append(f"auth: {{htpasswd: {{realm: tests, path: {directory}/users}}}}")
    config = directory / "config.yml"
    config.write_text("\n".join(lines) + "\n")
    process = subprocess.Popen(["docker-registry", "serve", str(config)], stderr=subprocess.DEVNULL)

    def answers():
        assert process.poll() is None, "the registry ended"
        try:
            return requests.get(f"http://{address}/v2/").status_code in (200, 401)
        except requests.ConnectionError:
            return False

    try:
        eventually(answers)
        yield address
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def registry(tmp_path):
    """A registry on this machine."""
    with serving(tmp_path) as address:
        yield address
