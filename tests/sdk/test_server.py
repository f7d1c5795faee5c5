"""The server itself: restarts, keys, limits, ports, hostile clients."""

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from e2b import AsyncSandbox, CommandExitException, RateLimitException, Sandbox

from conftest import PROGRAM, Running, Server, eventually, sandboxes, sandtree, use


def test_a_killed_server_harms_nothing(own):
    made = own(timeout=600)
    command = made.commands.run("read line; echo got $line", background=True, stdin=True)
    expiring = own(timeout=4)
    address = Running.server.address
    Running.server.kill()
    # The keeper ends it, without any server.
    eventually(lambda: expiring.sandbox_id not in sandboxes())
    use(Server(address))
    assert made.commands.run("echo alive").stdout == "alive\n"
    assert command.pid in {process.pid for process in made.commands.list()}
    joined = made.commands.connect(command.pid)
    made.commands.send_stdin(command.pid, "it\n")
    assert joined.wait().stdout == "got it\n"


def test_a_stopped_server_ends_well(own):
    made = own()
    address = Running.server.address
    assert Running.server.stop() == 0
    use(Server(address))
    assert made.commands.run("echo alive").stdout == "alive\n"


def test_a_stopped_server_delivers_what_is_under_way(own):
    made = own()
    begun = threading.Event()
    script = "echo begun; sleep 2; head -c 3000000 /dev/zero | tr '\\0' x; echo end; exit 3"
    command = made.commands.run(script, background=True)
    address = Running.server.address
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(command.wait, on_stdout=lambda _: begun.set())
        assert begun.wait(60)
        assert Running.server.stop() == 0
        use(Server(address))
        ended = waiting.exception(60)
    assert isinstance(ended, CommandExitException), ended
    assert (ended.exit_code, ended.stdout) == (3, "begun\n" + "x" * 3_000_000 + "end\n")


@contextlib.contextmanager
def announced(home):
    """The lines that a server prints for people when it starts."""
    words = [PROGRAM, "--home", str(home), "serve", "--listen", "127.0.0.1:0", "--no-base"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield [server.stdout.readline().strip() for _ in range(3)]
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=30) == 0
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def test_the_first_start_says_what_to_set_and_shows_a_key(tmp_path):
    home = tmp_path / "home"
    with announced(home) as [listening, addresses, key]:
        url = listening.removeprefix("listening on ")
        names = ["E2B_API_URL", "E2B_SANDBOX_URL", "E2B_VOLUME_API_URL"]
        assert addresses == "export " + " ".join(f"{name}={url}" for name in names)
        assert re.fullmatch("export E2B_API_KEY=e2b_[0-9a-f]{40}", key), key
        key = key.split("=")[1]
        list_with = lambda url, key: requests.get(f"{url}/v2/sandboxes", headers={"X-API-KEY": key})
        assert (list_with(url, key).status_code, list_with(url, key).json()) == (200, [])
        assert list_with(url, os.environ["E2B_API_KEY"]).status_code == 401
    assert key.encode() not in b"".join(path.read_bytes() for path in home.rglob("*") if path.is_file())
    # Later ones do not know it any more, and take it.
    with announced(home) as [listening, _, hint]:
        assert "e2b_" not in hint and "sandtree key create" in hint
        assert list_with(listening.removeprefix("listening on "), key).status_code == 200


def test_units_for_systemd_are_valid(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze to check the units with")

    def complaints(name, text):
        # The program is elsewhere here.
        unit = tmp_path / name
        unit.write_text(re.sub("(?m)^ExecStart=[^ ]*", f"ExecStart={PROGRAM}", text))
        return subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True).stderr

    for path in (Path(__file__).parents[2] / "docs/systemd").glob("*.service"):
        assert complaints(path.name, path.read_text()) == ""
        assert "nonsense" in complaints("broken.service", path.read_text().replace("KillMode=process", "KillMode=nonsense"))


def test_keys_are_shown_once_and_can_be_removed(server):
    new = json.loads(sandtree("--json", "key", "create", "--name", "short-lived"))
    list_with = lambda key: requests.get(f"{server.url}/v2/sandboxes", headers={"X-API-KEY": key})
    assert list_with(new["key"]).status_code == 200
    assert new["key"] not in sandtree("--json", "key", "ls")
    sandtree("key", "rm", new["id"])
    refused = list_with(new["key"])
    assert refused.status_code == 401
    assert refused.json() == {"code": 401, "message": "invalid API key"}
    assert requests.get(f"{server.url}/v2/sandboxes").status_code == 401


def test_a_key_has_limits():
    new = json.loads(sandtree("--json", "key", "create", "--max-sandboxes", "1"))
    first = Sandbox.create(timeout=60, api_key=new["key"])
    try:
        with pytest.raises(RateLimitException, match="may run 1 sandboxes"):
            Sandbox.create(timeout=60, api_key=new["key"])
    finally:
        first.kill()
    Sandbox.create(timeout=60, api_key=new["key"]).kill()


def test_a_create_that_is_sent_again_makes_one_sandbox(server):
    headers = {"X-API-KEY": os.environ["E2B_API_KEY"], "Idempotency-Key": "once"}
    create = lambda: requests.post(f"{server.url}/v2/sandboxes", json={"timeout": 60}, headers=headers)
    with ThreadPoolExecutor(3) as pool:
        answers = [sent.result() for sent in [pool.submit(create) for _ in range(3)]]
    assert [answer.status_code for answer in answers] == [201] * 3
    made = {answer.json()["sandboxID"] for answer in answers}
    assert len(made) == 1
    Sandbox.kill(made.pop())


def test_tokens_guard_the_data_plane(own, server):
    made, other = own(), own()
    url = f"{server.url}/filesystem.Filesystem/ListDir"

    def ask(token=None):
        headers = {"E2b-Sandbox-Id": made.sandbox_id}
        if token is not None:
            headers["X-Access-Token"] = token
        return requests.post(url, json={"path": "/"}, headers=headers).status_code

    assert ask(made._envd_access_token) == 200
    assert [ask(), ask(""), ask(other._envd_access_token), ask(os.environ["E2B_API_KEY"])] == [401] * 4


def through(server, sandbox, port, path="/", **options):
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(port), **options.pop("headers", {})}
    return requests.request(options.pop("method", "GET"), server.url + path, headers=headers, **options)


ECHO = """
import http.server, hashlib, base64
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(201)
        self.send_header("content-length", str(len(body)))
        self.send_header("x-seen-host", self.headers["host"])
        self.send_header("x-seen-key", str(self.headers["x-api-key"]))
        self.end_headers()
        self.wfile.write(body[::-1])
    def do_GET(self):
        # A WebSocket that echoes one frame.
        key = self.headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self.send_response(101)
        self.send_header("upgrade", "websocket")
        self.send_header("connection", "upgrade")
        self.send_header("sec-websocket-accept", accept)
        self.end_headers()
        self.wfile.flush()
        head = self.rfile.read(6)
        mask, length = head[2:6], head[1] & 127
        text = bytes(byte ^ mask[i % 4] for i, byte in enumerate(self.rfile.read(length)))
        self.wfile.write(bytes([0x81, length]) + text.upper())
        self.wfile.flush()
        self.close_connection = True
http.server.ThreadingHTTPServer(("127.0.0.1", 8123), Handler).serve_forever()
"""


def test_ports_of_the_guest(own, server):
    made = own(network={"allow_public_traffic": True}, allow_internet_access=False)
    closed = through(server, made, 8123)
    assert (closed.status_code, closed.json()["message"]) == (502, "The sandbox is running but port is not open")
    made.files.write("echo.py", ECHO)
    made.commands.run("python3 echo.py", background=True)
    answer = eventually(lambda: (a := through(server, made, 8123, method="POST", data=b"abc")).status_code == 201 and a)
    assert answer.content == b"cba"
    secret = through(server, made, 8123, method="POST", data=b"", headers={"X-API-KEY": "mine"})
    assert secret.headers["x-seen-key"] == "None"
    by_name = requests.post(server.url, data=b"xyz", headers={"Host": made.get_host(8123)})
    assert (by_name.status_code, by_name.content) == (201, b"zyx")
    large = os.urandom(3_000_000)
    assert through(server, made, 8123, method="POST", data=large).content == large[::-1]
    assert websocket(server, made, 8123, b"hello") == b"HELLO"


def websocket(server, sandbox, port, text):
    host, number = server.address.split(":")
    with socket.create_connection((host, int(number)), timeout=60) as connection:
        key = base64.b64encode(os.urandom(16)).decode()
        connection.sendall(
            f"GET /ws HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: {sandbox.sandbox_id}\r\nE2b-Sandbox-Port: {port}\r\n"
            f"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
        )
        stream = connection.makefile("rb")
        assert b"101" in stream.readline()
        lines = iter(stream.readline, b"\r\n")
        headers = {line.split(b":")[0].lower(): line.split(b":", 1)[1].strip() for line in lines}
        wanted = hashlib.sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()
        assert headers[b"sec-websocket-accept"] == base64.b64encode(wanted)
        mask = b"\1\2\3\4"
        masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(text))
        connection.sendall(bytes([0x81, 0x80 | len(text)]) + mask + masked)
        head = stream.read(2)
        return stream.read(head[1])


def test_private_ports_need_their_token(own, server):
    made = own(network={"allow_public_traffic": False})
    assert through(server, made, 8123).status_code == 403
    token = made.traffic_access_token
    with_token = through(server, made, 8123, headers={"e2b-traffic-access-token": token})
    assert with_token.status_code == 502
    assert through(server, made, 8123, headers={"e2b-traffic-access-token": token[:-1]}).status_code == 403


@pytest.mark.parametrize("network", ["none", "isolated"])
def test_ports_are_reached_without_a_network(server, network):
    key = {"X-API-KEY": os.environ["E2B_API_KEY"]}
    expiry = {"after_ms": 300_000, "action": "remove"}
    new = {"image": "debian", "network": network, "expiry": expiry}
    created = requests.post(f"{server.url}/api/v1/sandboxes", json=new, headers=key)
    assert created.status_code == 201, created.text
    made = Sandbox.connect(created.json()["id"])
    try:
        assert made.get_info().allow_internet_access is False
        made.files.write("echo.py", ECHO)
        made.commands.run("python3 echo.py", background=True)
        answer = eventually(lambda: (a := through(server, made, 8123, method="POST", data=b"abc")).status_code == 201 and a)
        assert answer.content == b"cba"
        assert websocket(server, made, 8123, b"hello") == b"HELLO"
    finally:
        made.kill()


def test_traffic_of_a_port_resumes_a_paused_sandbox(own, server):
    made = own(timeout=60, lifecycle={"on_timeout": "pause", "auto_resume": True})
    made.files.write("echo.py", ECHO)
    made.commands.run("python3 echo.py", background=True)
    ask = lambda body: through(server, made, 8123, method="POST", data=body)
    eventually(lambda: ask(b"abc").status_code == 201)
    made.pause()
    # It is resumed once, for all that ask.
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(ask, [b"abc"] * 5))
    assert [answer.content for answer in answers] == [b"cba"] * 5
    info = made.get_info()
    assert info.state == "running"
    assert 290 < info.end_at.timestamp() - time.time() < 301, "at least five minutes"
    made.pause()
    assert websocket(server, made, 8123, b"hello") == b"HELLO"
    made.pause()
    assert requests.post(server.url, data=b"xyz", headers={"Host": made.get_host(8123)}).content == b"zyx"


def test_traffic_resumes_a_paused_sandbox(own, server):
    made = own(lifecycle={"on_timeout": "pause", "auto_resume": True})
    made.pause()
    assert made.commands.run("echo resumed").stdout == "resumed\n"
    asleep = own()
    asleep.pause()
    assert through(server, asleep, 8123).status_code == 502


def test_hostile_requests_are_refused_and_the_server_lives(own, server):
    made = own()
    headers = {
        "E2b-Sandbox-Id": made.sandbox_id,
        "X-Access-Token": made._envd_access_token,
        "Content-Type": "application/connect+json",
    }
    start = f"{server.url}/process.Process/Start"
    for frame in [b"", b"\0", b"\0\xff\xff\xff\xff", struct.pack(">BI", 1, 2) + b"{}", struct.pack(">BI", 0, 2) + b"{]"]:
        answer = requests.post(start, data=frame, headers=headers)
        assert answer.status_code == 200
        assert json.loads(answer.content[5:])["error"]["code"] == "invalid_argument"
    api = {"X-API-KEY": os.environ["E2B_API_KEY"]}
    for body in [b"{", b"[]", b'{"timeout": 1e300}', b'{"timeout": -7}', b'{"metadata": {"a": "' + b"x" * 5000 + b'"}}']:
        answer = requests.post(f"{server.url}/v2/sandboxes", data=body, headers=api)
        assert answer.status_code == 400, answer.text
        assert answer.json()["code"] == 400
    unknown = requests.get(f"{server.url}/no/such", headers=api)
    assert (unknown.status_code, unknown.json()["code"]) == (404, 404)
    host, number = server.address.split(":")
    raw = [
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 5000 + b"\r\n",
        b"POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"\x16\x03\x01 not HTTP",
        b"GET /files?path=%00&signature=v1_x HTTP/1.1\r\nHost: x\r\n\r\n",
    ]
    for request in raw:
        with socket.create_connection((host, int(number)), timeout=20) as connection:
            connection.sendall(request)
            answer = connection.recv(65536)
            assert b" 200 " not in answer.split(b"\r\n")[0] and b" 201 " not in answer.split(b"\r\n")[0], answer
    assert requests.get(f"{server.url}/health").json()["status"] == "ok"


def test_many_idle_connections_cost_nothing(server):
    host, number = server.address.split(":")
    idle = [socket.create_connection((host, int(number))) for _ in range(500)]
    assert requests.get(f"{server.url}/healthz").status_code == 200
    for connection in idle:
        connection.close()


def test_the_asynchronous_client():
    async def work():
        sandbox = await AsyncSandbox.create(timeout=120)
        try:
            done, text = await asyncio.gather(
                sandbox.commands.run("echo asynchronous"), sandbox.files.write("a", "b")
            )
            assert done.stdout == "asynchronous\n"
            seen = []
            watch = await sandbox.files.watch_dir("/home/user", on_event=lambda event: seen.append(event.name))
            await sandbox.files.write("watched", "x")
            for _ in range(600):
                if "watched" in seen:
                    break
                await asyncio.sleep(0.05)
            assert "watched" in seen
            await watch.stop()
            with pytest.raises(CommandExitException):
                await sandbox.commands.run("exit 4")
            command = await sandbox.commands.run("cat", background=True, stdin=True)
            await sandbox.commands.send_stdin(command.pid, "typed")
            await sandbox.commands.close_stdin(command.pid)
            assert (await command.wait()).stdout == "typed"
        finally:
            await sandbox.kill()

    asyncio.run(work())
