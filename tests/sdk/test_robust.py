"""The server under hostile and unlucky conditions: slow clients, many of them, broken requests, and processes that die."""

import asyncio
import json
import os
import random
import re
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import e2b_code_interpreter
import pytest
import requests
import urllib3
from e2b import CommandExitException, PtySize, Sandbox, SandboxNotRunningException, Volume

from conftest import STORE, Running, Server, eventually, sandboxes, sandtree, use
from test_observed import api, figures, lines_of_log

SEED = int(os.environ.get("SANDTREE_TEST_SEED", random.randrange(1 << 32)))
RANDOM = random.Random(SEED)


def connection():
    host, port = Running.server.address.split(":")
    return socket.create_connection((host, int(port)), timeout=120)


class Dripping(threading.Thread):
    """A client that sends a byte now and then, and notes when it is cut off."""

    def __init__(self, begin):
        super().__init__(daemon=True)
        self.begin = begin
        self.seconds = None
        self.answer = b""
        self.start()

    def run(self):
        began = time.monotonic()
        with connection() as client:
            client.sendall(self.begin)
            client.settimeout(2)
            while self.seconds is None:
                try:
                    client.sendall(b"x")
                    received = client.recv(4096)
                    self.answer += received
                    if not received:
                        self.seconds = time.monotonic() - began
                except TimeoutError:
                    pass
                except OSError:
                    self.seconds = time.monotonic() - began


@pytest.fixture(scope="module", autouse=True)
def slow():
    """Slow clients that drip while the other tests of this file run."""
    key = os.environ["E2B_API_KEY"]
    server = Running.server
    head = Dripping(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ")
    body = Dripping(f"POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\nX-API-KEY: {key}\r\nContent-Length: 900\r\n\r\n".encode())
    yield server, head, body
    if Running.server is not server and server.process.poll() is None:
        server.kill()


@pytest.fixture(scope="module", autouse=True)
def another_server(slow):
    """The tests of this file kill servers: the slow clients keep theirs."""
    use(Server())
    yield
    Running.server.kill()
    use(slow[0])


@pytest.fixture(scope="module")
def made(another_server):
    sandbox = Sandbox.create(timeout=900)
    yield sandbox
    sandbox.kill()


def certificate(directory):
    """The files of a certificate, its key, and the authority that clients trust for it."""
    cert, key, authority, root = [str(directory / name) for name in ["cert.pem", "key.pem", "authority.pem", "root.pem"]]
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    make = lambda *more: subprocess.run([*words, *more], check=True, capture_output=True)
    make("-subj", "/CN=authority", "-addext", "keyUsage=critical,keyCertSign", "-out", authority, "-keyout", root)
    names = "subjectAltName=DNS:localhost,DNS:*.sandboxes.test,IP:127.0.0.1"
    own = ["-subj", "/CN=localhost", "-addext", names, "-addext", "basicConstraints=critical,CA:FALSE"]
    make(*own, "-CA", authority, "-CAkey", root, "-out", cert, "-keyout", key)
    return cert, key, authority


CREATE = """
import asyncio, sys
from e2b import AsyncSandbox, Sandbox
made = Sandbox.create(timeout=60)
made.files.write("a", "over TLS")
print(made.commands.run("cat a").stdout)
async def same():
    joined = await AsyncSandbox.connect(made.sandbox_id)
    command = await joined.commands.run("cat", background=True, stdin=True)
    await command.send_stdin("both flavours")
    await command.close_stdin()
    print((await command.wait()).stdout)
asyncio.run(same())
made.kill()
"""


def test_the_client_works_over_tls(tmp_path):
    """In a process of its own: the client reads which authorities it trusts when it starts."""
    cert, key, authority = certificate(tmp_path)
    secure = Server("127.0.0.1:0", "--tls-cert", cert, "--tls-key", key)
    url = secure.url.replace("127.0.0.1", "localhost")
    try:
        run = lambda **env: subprocess.run(
            [sys.executable, "-c", CREATE],
            env={**os.environ, "E2B_API_URL": url, "E2B_SANDBOX_URL": url, **env},
            capture_output=True,
            text=True,
            timeout=120,
        )
        done = run(SSL_CERT_FILE=authority)
        assert (done.returncode, done.stdout) == (0, "over TLS\nboth flavours\n"), done.stderr
        before = sandboxes()
        refused = run(E2B_CONNECTION_RETRIES="0")
        assert refused.returncode != 0 and "certificate" in refused.stderr, refused.stderr
        assert sandboxes() == before
    finally:
        assert secure.stop() == 0


def test_tls(made, tmp_path):
    cert, key, authority = certificate(tmp_path)
    secure = Server("127.0.0.1:0", "--tls-cert", cert, "--tls-key", key)
    try:
        assert secure.url.startswith("https://")
        found = requests.get(f"{secure.url}/sandboxes/{made.sandbox_id}", headers={"X-API-KEY": os.environ["E2B_API_KEY"]}, verify=authority)
        assert found.json()["sandboxID"] == made.sandbox_id
        headers = {"E2b-Sandbox-Id": made.sandbox_id, "X-Access-Token": made._envd_access_token}
        stored = requests.post(f"{secure.url}/files?path=over-tls", files={"file": b"x" * 100_000}, headers=headers, verify=authority)
        assert stored.status_code == 200
        assert made.files.read("over-tls") == "x" * 100_000
        with pytest.raises(requests.exceptions.SSLError):
            requests.get(secure.url + "/health")
        host, port = secure.address.split(":")
        made.commands.run("python3 -m http.server 8456 --bind 127.0.0.1 --directory /home/user", background=True)
        name = f"8456-{made.sandbox_id}.sandboxes.test"
        names = {"server_hostname": name, "assert_hostname": name, "ca_certs": authority}
        with urllib3.HTTPSConnectionPool(host, int(port), **names) as pool:
            there = {"Host": f"{name}:{port}"}
            # The service answers when it has started.
            eventually(lambda: pool.request("GET", "/", headers=there).status == 200)
            assert pool.request("GET", "/over-tls", headers=there).data == b"x" * 100_000
        with socket.create_connection((host, int(port)), timeout=30) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" not in plain.recv(4096)
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.load_verify_locations(authority)
        assert old.wrap_socket(socket.create_connection((host, int(port))), server_hostname="localhost").version() in ("TLSv1.2", "TLSv1.3")
    finally:
        assert secure.stop() == 0
    broken = Path(cert).parent / "broken.pem"
    broken.write_text("no certificate")
    arguments = ["serve", "--listen", "127.0.0.1:0", "--tls-cert", str(broken), "--tls-key", key]
    assert sandtree("--json", *arguments, check=False) == ""


def rss(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10


def test_ten_thousand_idle_connections(made):
    wanted = 10_000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    room = min(wanted, hard - 600)
    pid = Running.server.process.pid
    before = rss(pid)
    idle = []
    try:
        idle += [connection() for _ in range(room)]
        eventually(lambda: figures()["sandtree_connections"] >= room)
        assert made.commands.run("echo served").stdout == "served\n"
        assert rss(pid) - before < room * 16_384, "an idle connection costs too much"
    finally:
        for one in idle:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    eventually(lambda: figures()["sandtree_connections"] < 50)
    if room < wanted:
        pytest.skip(f"only {room} connections were tried: the hard limit on descriptors is {hard}")


def test_a_thousand_requests_at_a_time(made):
    host, port = Running.server.address.split(":")
    head = f"Host: x\r\nX-API-KEY: {os.environ['E2B_API_KEY']}\r\nConnection: close\r\n\r\n"

    async def ask():
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET /sandboxes/{made.sandbox_id} HTTP/1.1\r\n{head}".encode())
        answer = await reader.read()
        writer.close()
        return answer

    async def all():
        return await asyncio.gather(*[ask() for _ in range(1000)])

    answers = asyncio.run(all())
    assert {answer.split(b"\r\n")[0] for answer in answers} == {b"HTTP/1.1 200 OK"}
    bodies = [json.loads(answer.split(b"\r\n\r\n", 1)[1]) for answer in answers]
    assert {body["sandboxID"] for body in bodies} == {made.sandbox_id}


def answers_to(raw):
    """All that the server answers on a connection, until it closes it: after a last request at the latest."""
    with connection() as client:
        client.sendall(raw + b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = b""
        try:
            while piece := client.recv(65536):
                received += piece
        except ConnectionResetError:
            pass
        return received


def statuses(raw):
    return [line.split(b" ")[1] for line in answers_to(raw.encode()).split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


def test_requests_are_not_smuggled(made):
    smuggled = f"DELETE /sandboxes/{made.sandbox_id} HTTP/1.1\r\nHost: x\r\nX-API-KEY: {os.environ['E2B_API_KEY']}\r\n\r\n"
    post = "POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\n"
    # What nobody can read in one way only ends the connection.
    for lengths in [
        "Content-Length: 0\r\nContent-Length: 5",
        "Content-Length: +0",
        "Content-Length: 0x0",
        "Transfer-Encoding: xchunked",
        "Transfer-Encoding: chunked, identity",
        "Transfer-Encoding : chunked",
    ]:
        assert statuses(f"{post}{lengths}\r\n\r\n0\r\n\r\n{smuggled}") == [b"400"], lengths
    # A body is never read as a request, whatever else claims its length. This one has no key.
    chunks = f"{len(smuggled):x}\r\n{smuggled}\r\n0\r\n\r\n"
    for head, body in [
        (f"Content-Length: {len(smuggled)}", smuggled),
        ("Transfer-Encoding: chunked", chunks),
        ("Content-Length: 0\r\nTransfer-Encoding: chunked", chunks),
        ("Transfer-Encoding: chunked\r\nContent-Length: 0", chunks),
        ("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", chunks),
    ]:
        answers = statuses(f"{post}{head}\r\n\r\n{body}")
        assert answers and set(answers) <= {b"400", b"401", b"200"} and answers[0] != b"200", (head, answers)
    assert made.commands.run("echo still there").stdout == "still there\n"


# A server in the guest that notes what each connection brings, in bytes. It answers when a request is complete, and
# after a moment in which more might come.
NOTING = """
import os, re, socket, sys
def complete(data):
    head, end, body = data.partition(b"\\r\\n\\r\\n")
    if not end:
        return False
    length = re.search(rb"(?i)\\r\\ncontent-length: *(\\d+)", head)
    if re.search(rb"(?i)\\r\\ntransfer-encoding:", head):
        return body.endswith(b"0\\r\\n\\r\\n")
    return len(body) >= int(length[1] if length else 0)
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
for number in range(1000):
    connection, _ = listener.accept()
    data = b""
    while not complete(data):
        piece = connection.recv(65536)
        if not piece:
            break
        data += piece
    connection.settimeout(0.05)
    try:
        data += connection.recv(65536)
    except TimeoutError:
        pass
    with open("noted.new", "wb") as noted:
        noted.write(data)
    os.rename("noted.new", f"noted/{number:03}")
    answer = b"HTTP/1.1 200 OK\\r\\nContent-Length: 4\\r\\n\\r\\nok\\r\\n"
    if b"/hostile" in data:
        answer += b"HTTP/1.1 200 OK\\r\\nX-Injected: 1\\r\\nContent-Length: 0\\r\\n\\r\\n"
    connection.sendall(answer)
    connection.close()
"""


@pytest.fixture
def noting(made):
    """Returns what the guest's server got of the requests of a function: for each connection its head and its body."""
    made.files.write("noting.py", NOTING)
    made.files.make_dir("noted")
    service = made.commands.run("python3 noting.py 8458", background=True)
    eventually(lambda: ":8458 " in made.commands.run("ss -ltn").stdout)

    def noted(ask):
        for entry in made.files.list("noted"):
            made.files.remove(entry.path)
        answers = ask()
        found = [made.files.read(entry.path, format="bytes") for entry in made.files.list("noted")]
        return answers, [bytes(one).split(b"\r\n\r\n", 1) for one in found]

    yield noted
    service.kill()


def is_whole(request):
    """Whether a request has one length, and its body is that long."""
    head, body = request
    lengths = re.findall(rb"(?i)\r\n(content-length|transfer-encoding): *([^\r]*)", head)
    if not lengths:
        return body == b""
    [(name, value)] = lengths
    if name.lower() == b"content-length":
        return len(body) == int(value)
    sizes = rb"([0-9a-fA-F]+)\r\n"
    rest = body
    while chunk := re.match(sizes, rest):
        size = int(chunk[1], 16)
        rest = rest[chunk.end() + size + 2 :]
        if size == 0:
            return rest == b""
    return False


def test_requests_are_not_smuggled_into_a_guest(made, noting):
    post = f"POST /x HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: {made.sandbox_id}\r\nE2b-Sandbox-Port: 8458\r\n"
    smuggled = "GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
    # What can be read in two ways reaches no guest.
    for lengths in [
        "Content-Length: 0\r\nContent-Length: 5",
        "Content-Length: +0",
        "Transfer-Encoding: xchunked",
        "Transfer-Encoding: chunked, identity",
        "Transfer-Encoding : chunked",
        "X-Bare: a\nTransfer-Encoding: chunked\r\nContent-Length: 0\x00",
        "X-Folded: a\r\n Transfer-Encoding: chunked\r\nContent-Length: x",
    ]:
        answers, arrived = noting(lambda: statuses(f"{post}{lengths}\r\n\r\n0\r\n\r\n{smuggled}"))
        assert (answers, arrived) == ([b"400"], []), lengths
    # All else arrives as one request with one length, and what follows it is for this server.
    chunks = f"{len(smuggled):x}\r\n{smuggled}\r\n0\r\n\r\n"
    plain = f"Content-Length: {len(smuggled)}"
    for head, body in [
        (plain, smuggled),
        ("Transfer-Encoding: chunked", chunks),
        ("Content-Length: 0\r\nTransfer-Encoding: chunked", chunks),
        ("Transfer-Encoding: chunked\r\nContent-Length: 0", chunks),
        (f"Connection: content-length\r\n{plain}", smuggled),
        ("Connection: transfer-encoding\r\nTransfer-Encoding: chunked", chunks),
        ("Connection: Upgrade\r\nUpgrade: websocket", ""),
        ("Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x", ""),
    ]:
        answers, arrived = noting(lambda: statuses(f"{post}{head}\r\n\r\n{body}"))
        # After a request with two lengths the connection ends.
        is_last = "Content-Length: 0" in head
        assert answers == [b"200"] * (1 if is_last else 2), (head, answers)
        assert len(arrived) == 1 and is_whole(arrived[0]), (head, arrived)
        assert (smuggled if body else "").encode() in arrived[0][1]


def test_a_hostile_guest_answers_for_nobody_else(made, noting):
    get = f"GET /hostile HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: {made.sandbox_id}\r\nE2b-Sandbox-Port: 8458\r\n\r\n"
    answers, _ = noting(lambda: answers_to(get.encode()))
    assert answers.count(b"HTTP/1.1 200") == 2 and b"x-injected" not in answers.lower()
    assert answers.endswith(b'{"status":"ok"}')
    for path in ["/%0d%0aX-Injected:%201", "/a%00b", "//evil.test/x", "/..%2f..%2f"]:
        line = get.replace("/hostile", path)
        answers, [(head, body)] = noting(lambda: statuses(line))
        assert answers == [b"200", b"200"] and head.split(b"\r\n")[0] == f"GET {path} HTTP/1.1".encode()
        assert b"\r\nx-injected" not in head.lower() and body == b""


def test_headers_and_paths_are_not_injected(made):
    token = made._envd_access_token
    for place in ["../x", "..", ".", "", "a/b", f"{made.sandbox_id}/../x", f"{made.sandbox_id}%2f", "x" * 5000, "%00"]:
        headers = {"E2b-Sandbox-Id": place, "X-Access-Token": token}
        assert requests.get(f"{Running.server.url}/files?path=/etc/hostname", headers=headers).status_code in (401, 404, 502)
        assert api(f"/sandboxes/{requests.utils.quote(place, safe='')}").status_code in (401, 404, 405)
    both = f"GET /files?path=/etc/hostname HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: {made.sandbox_id}\r\nE2b-Sandbox-Id: other\r\n\r\n"
    assert b" 401 " in answers_to(both.encode()).split(b"\r\n")[0]
    made.files.write("in\r\nX-Injected: 1", "x")
    listed = requests.get(made.download_url("in\r\nX-Injected: 1"))
    assert listed.status_code == 200 and "x-injected" not in listed.headers
    missing = api("/templates/aliases/a%0d%0aX-Injected%3a%201")
    assert missing.status_code in (400, 404) and "x-injected" not in missing.headers


def test_a_slow_reader_slows_only_itself(made):
    message = json.dumps({"process": {"cmd": "/bin/sh", "args": ["-c", "head -c 20000000 /dev/zero"]}, "stdin": False}).encode()
    envelope = b"\0" + len(message).to_bytes(4, "big") + message
    head = (
        f"POST /process.Process/Start HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: {made.sandbox_id}\r\n"
        f"X-Access-Token: {made._envd_access_token}\r\nContent-Type: application/connect+json\r\n"
        f"Connection: close\r\nContent-Length: {len(envelope)}\r\n\r\n"
    )
    before = rss(Running.server.process.pid)
    with connection() as client:
        client.sendall(head.encode() + envelope)
        # The command has written everything, and this client has read nothing.
        eventually(lambda: not made.commands.list())
        assert made.commands.run("echo quick").stdout == "quick\n"
        assert rss(Running.server.process.pid) - before < 50_000_000
        received = b""
        while piece := client.recv(1 << 20):
            received += piece
    assert received.count(b'"data"') >= 20_000_000 // 32_768
    assert b'"exit status 0"' in received


def test_a_client_that_leaves_in_a_stream_does_not_keep_its_end_from_others(made):
    script = "head -c 5000000 /dev/zero; read line; exit 7"
    left = made.commands.run(script, background=True, stdin=True)
    left.disconnect()
    joined = made.commands.connect(left.pid)
    made.commands.send_stdin(left.pid, "\n")
    with pytest.raises(CommandExitException) as ended:
        joined.wait()
    assert ended.value.exit_code == 7
    assert left.pid not in {process.pid for process in made.commands.list()}


def test_users_are_known_as_soon_as_they_are_made(made):
    for uid in ["4321", "4322"]:
        made.commands.run(f"sed -i /^guest:/d /etc/passwd; echo guest:x:{uid}:{uid}::/tmp:/bin/sh >> /etc/passwd", user="root")
        assert made.commands.run("id -u", user="guest").stdout == f"{uid}\n"


def processes():
    """The processes that have files of the store open: their program, and the sandboxes of these files."""
    found = {}
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            names = [os.readlink(fd) for fd in (proc / "fd").iterdir()]
            program = (proc / "comm").read_text().strip()
        except OSError:
            continue
        prefix = STORE + "/sandboxes/"
        ids = {name.removeprefix(prefix).split("/")[0] for name in names if name.startswith(prefix)}
        if ids and int(proc.name) != Running.server.process.pid:
            found[int(proc.name)] = (program, ids)
    return found


def leftovers():
    """What is in the store or runs without belonging to a sandbox."""
    listed = {one["id"]: one["state"] for one in json.loads(sandtree("--json", "ps", "-a"))}
    running = {id for id, state in listed.items() if state == "running"}
    left = [f"directory {name}" for name in directories() - set(listed)]
    left += [f"staging {path.name}" for path in Path(STORE, "staging").iterdir()]
    left += [f"socket of {path.parent.name}" for path in Path(STORE, "sandboxes").glob("*/keeper.sock") if path.parent.name not in running]
    left += [f"{program} {pid} of {ids}" for pid, (program, ids) in processes().items() if not ids <= running]
    return left


def nothing_is_left(after):
    """Keepers and QEMU may take a moment to end."""
    left = None

    def is_clean():
        nonlocal left
        left = leftovers()
        return not left

    try:
        eventually(is_clean, 30)
    except AssertionError:
        pytest.fail(f"after {after}: {left}")


def wait_for(seconds):
    threading.Event().wait(seconds)


def directories():
    """The ids of all sandboxes, also of those that are being made: quicker than to ask the program."""
    return {path.name for path in Path(STORE, "sandboxes").iterdir()}


def processes_of(victim, ids):
    """The keepers or the QEMUs of some sandboxes."""
    program = "qemu" if victim == "qemu" else "sandtree"
    return [pid for pid, (name, theirs) in processes().items() if name.startswith(program) and theirs & ids]


def killed(pids):
    """Kills the first of these processes that is there, as a crash would."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
            return True
        except ProcessLookupError:
            pass
    return False


def watched(sandbox):
    """Watches a directory until it has told of a file."""
    watch = sandbox.files.watch_dir("/home/user")
    sandbox.files.write("watched", "x")
    eventually(watch.get_new_events)
    watch.stop()


def native(method, path, **options):
    """Asks the native API, and reads the whole answer."""
    with api(f"/api/v1{path}", method, stream=True, **options) as answer:
        answer.raise_for_status()
        for _ in answer.iter_content(1 << 16):
            pass


def operation(name, sandbox, volume):
    """What a client does, as a function. What has to be there before is made at once."""
    unique = f"killed-{uuid.uuid4().hex[:8]}"
    place = f"/sandboxes/{sandbox.sandbox_id}"
    if name in ("resume", "auto-resume"):
        sandbox.pause()
    if name in ("rollback", "revert", "undo", "export"):
        sandbox.create_snapshot(name=unique)
        sandbox.files.write("later", "x")
    port = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49999"}
    health = lambda: requests.get(Running.server.url + "/health", headers=port).raise_for_status()
    return {
        "create": lambda: Sandbox.create(timeout=300),
        "connect": lambda: sandbox.connect(timeout=300),
        "set timeout": lambda: sandbox.set_timeout(500),
        "command": lambda: sandbox.commands.run("head -c 3000000 /dev/zero | wc -c"),
        "upload": lambda: sandbox.files.write("upload", "x" * 3_000_000),
        "download": lambda: sandbox.files.read("large", format="bytes"),
        "watch": lambda: watched(sandbox),
        "port": lambda: [health() for _ in range(50)],
        "volume": lambda: sandbox.commands.run("head -c 3000000 /dev/zero > /mnt/volume/file") and volume.read_file("file"),
        "run_code": lambda: sandbox.run_code("sum(range(10_000_000))"),
        "pause": lambda: sandbox.pause(),
        "resume": lambda: sandbox.connect(timeout=300),
        "auto-resume": lambda: sandbox.commands.run("true"),
        "snapshot": lambda: sandbox.create_snapshot(name=unique),
        "rollback": lambda: api(place + "/rollback", "POST", json={"snapshotID": unique}).raise_for_status(),
        "fork": lambda: sandbox.fork(timeout=300),
        "checkpoint": lambda: native("POST", place + "/states", json={"tag": unique}),
        "revert": lambda: native("POST", place + "/revert", json={"state": unique}),
        "undo": lambda: native("POST", place + "/undo", json={"steps": 1}),
        "native fork": lambda: native("POST", place + "/fork", json={"count": 1}),
        "save": lambda: native("POST", place + "/save", json={"target": unique}),
        "export": lambda: native("GET", f"/export?reference={unique}&without_image=true"),
        "kill": lambda: sandbox.kill(),
    }[name]


OPERATIONS = [
    *["create", "connect", "set timeout", "command", "upload", "download", "watch", "pause", "resume", "auto-resume"],
    *["snapshot", "rollback", "fork", "checkpoint", "revert", "undo", "native fork", "save", "export"],
    *["volume", "port", "run_code", "kill"],
]
# What has come to its end by itself has less to lose.
STOPPED = ["create", "connect", "command", "upload", "pause", "resume", "snapshot", "fork", "kill"]
SERVERS = ["server", "stopped server"]


def kind(name):
    """What an operation needs: a service at a port, a volume, or nothing."""
    return {"port": "interpreter", "run_code": "interpreter", "volume": "volume"}.get(name)


def sandbox_for(name, volume):
    """A sandbox with a file that is on its disk, whatever happens to its machine."""
    if kind(name) == "interpreter":
        return e2b_code_interpreter.Sandbox.create(timeout=600)
    mounts = {"/mnt/volume": volume} if kind(name) == "volume" else None
    made = Sandbox.create(timeout=600, lifecycle={"on_timeout": "pause", "auto_resume": True}, volume_mounts=mounts)
    # A keeper rests with its sandbox only when it has forgotten the commands of clients. This is none.
    line = {"shell": "echo kept > /home/user/kept; truncate -s 3000000 /home/user/large; sync"}
    assert api(f"/api/v1/sandboxes/{made.sandbox_id}/exec", "POST", json=line).json()["exit_code"] == 0
    return made


# For how long an operation is certainly under way, in seconds.
UNDER_WAY = {"create": 0.15, "command": 0.05, "resume": 0.05, "auto-resume": 0.1, "fork": 0.1, "native fork": 0.1}
UNDER_WAY |= {"volume": 0.1, "port": 0.1, "run_code": 0.3, "kill": 0.05}


def strike(pool, name, victim, sandbox, volume, seconds):
    """Kills a victim during an operation. Returns whether there was one before the operation was over."""
    known = directories()
    act = operation(name, sandbox, volume)
    aim = [] if victim in SERVERS else processes_of(victim, {sandbox.sandbox_id})
    is_copying = name in ("create", "fork", "native fork")
    began = pool.submit(act)
    wait_for(seconds)
    is_over = began.done()
    if victim in SERVERS:
        address = Running.server.address
        if victim == "server":
            Running.server.kill()
        else:
            assert Running.server.stop() == 0
        use(Server(address))
        struck = True
    else:
        struck = not is_copying and killed(aim)
        while not struck and not is_over:
            is_over = began.done()
            aimed_at = directories() - known if is_copying else {sandbox.sandbox_id}
            struck = killed(processes_of(victim, aimed_at))
    # It succeeds or it fails for this reason; it does not hang.
    failed = began.exception(timeout=120)
    if isinstance(failed, requests.HTTPError):
        assert failed.response.status_code not in (400, 404, 405), failed.response.text
    nothing_is_left(name)
    is_sound(sandbox, victim, name)
    for other in directories() - known:
        Sandbox.kill(other)
    return struck and not is_over


@pytest.mark.parametrize("victim", [*SERVERS, "keeper", "qemu"])
def test_processes_die_during_every_operation(victim):
    print(f"SANDTREE_TEST_SEED={SEED}")
    volume = Volume.create("killed")
    sandbox = None
    operations = STOPPED if victim == "stopped server" else OPERATIONS
    with ThreadPoolExecutor(1) as pool:
        for name, following in zip(operations, [*operations[1:], None]):
            # It may be over before its victim is found. The next time, nobody waits for it.
            for seconds in [RANDOM.random() * UNDER_WAY.get(name, 0.01), 0, 0, 0]:
                sandbox = sandbox or sandbox_for(name, volume)
                was_struck = strike(pool, name, victim, sandbox, volume, seconds)
                is_kept = victim in SERVERS and following is not None and kind(name) == kind(following)
                if not is_kept or sandbox.sandbox_id not in directories():
                    sandbox.kill()
                    sandbox = None
                if was_struck:
                    break
            assert was_struck, f"no {victim} died during {name}"
    Volume.destroy(volume.volume_id)
    for snapshot in json.loads(sandtree("--json", "snapshot", "ls")):
        for called in snapshot["names"]:
            if called.startswith("killed-"):
                sandtree("snapshot", "rm", called)


def is_sound(sandbox, victim, name):
    """A sandbox outlives servers. After the death of its own processes it is listed as it is, and begins again."""

    def is_listed():
        # The death of a process is noticed a moment later.
        states = {one["id"]: one["state"] for one in json.loads(sandtree("--json", "ps", "-a"))}
        state = states.get(sandbox.sandbox_id)
        shown = {one.sandbox_id: one.state.value for one in Sandbox.list().next_items()}.get(sandbox.sandbox_id)
        return shown == (state and ("running" if state == "running" else "paused")) and [state]

    def begins_again():
        try:
            sandbox.connect(timeout=600)
            return sandbox.commands.run("cat kept", cwd="/home/user").stdout == "kept\n"
        except SandboxNotRunningException:
            return False

    [state] = eventually(is_listed)
    assert state or name == "kill", name
    # To boot takes a moment: each time it is done after other operations.
    if state and kind(name) != "interpreter" and (victim in SERVERS or RANDOM.random() < 0.25):
        eventually(begins_again)


def leave(method, path, body, seconds):
    """Sends a request, and leaves a while after it has begun. Returns the status that the server logs: 499 if it noticed."""
    name = uuid.uuid4().hex
    text = json.dumps(body)
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nX-API-KEY: {os.environ['E2B_API_KEY']}\r\nX-Request-Id: {name}\r\n"
    logged = lambda: [line for line in lines_of_log() if line["request"] == name]
    with connection() as client:
        client.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode())
        # The other one is this question.
        eventually(lambda: figures()["sandtree_requests_under_way"] > 1 or logged())
        wait_for(seconds)
    return eventually(logged)[0]["status"]


LEAVING = [0, 0.01, 0.02, 0.05, 0.1]


def test_a_client_that_leaves_during_a_creation_leaves_nothing(made):
    known = sandboxes()
    seen = set()
    for seconds in LEAVING:
        status = leave("POST", "/v2/sandboxes", {"timeout": 300}, seconds)
        seen.add(status)
        if status == 499:
            eventually(lambda: sandboxes() == known)
        # It may have been faster than its client.
        for other in sandboxes() - known:
            Sandbox.kill(other)
        nothing_is_left(f"leaving after {seconds} s")
    assert 499 in seen


def test_a_client_that_leaves_leaves_a_sandbox_that_works(made):
    """It runs or rests, with its memory. Copies that nobody waits for end when they were asked to."""
    known = sandboxes()
    place = f"/sandboxes/{made.sandbox_id}"
    made.files.write("/dev/shm/kept", "in memory")
    for path, body in [("/pause", {}), ("/fork", {"count": 2, "timeout": 1}), ("/snapshots", {"name": "left-behind"})]:
        seen = {leave("POST", place + path, body, seconds) for seconds in LEAVING}
        assert 499 in seen, path
        eventually(lambda: sandboxes() == known)
        made.connect(timeout=900)
        assert made.files.read("/dev/shm/kept") == "in memory"
        nothing_is_left(path)
    saved = Sandbox.list_snapshots(name="left-behind").next_items()
    assert [Sandbox.delete_snapshot(one.snapshot_id) for one in saved] in ([], [True])


def cycle():
    """What a client does with a sandbox, from its creation to its end."""
    one = Sandbox.create(timeout=120)
    one.commands.run("head -c 300000 /dev/zero")
    one.files.write("a", "x" * 300_000)
    one.files.read("a")
    one.files.watch_dir("/home/user").get_new_events()
    one.pty.create(PtySize(rows=24, cols=80)).disconnect()
    closed = {"E2b-Sandbox-Id": one.sandbox_id, "E2b-Sandbox-Port": "9"}
    assert requests.get(Running.server.url, headers=closed).status_code == 502
    one.pause()
    one.connect(timeout=120)
    [copy] = one.fork(timeout=120)
    copy.kill()
    Sandbox.delete_snapshot(one.create_snapshot().snapshot_id)
    one.kill()


def test_many_cycles_leave_the_server_as_it_was(made):
    pid = Running.server.process.pid
    descriptors = lambda: len(os.listdir(f"/proc/{pid}/fd")) - figures()["sandtree_connections"]
    cycle()
    few = descriptors()
    before = rss(pid)
    for _ in range(3):
        cycle()
    eventually(lambda: descriptors() <= few + 1)
    assert rss(pid) - before < 20 << 20


def test_two_hundred_sandboxes_are_listed(made):
    """Stopped ones, made of copies of one record: only the list matters here."""
    made_by_us = f"listed-{uuid.uuid4().hex[:8]}"
    one = Sandbox.create(timeout=600, metadata={"of": made_by_us})
    sandtree("stop", one.sandbox_id)
    source = Path(STORE, "sandboxes", one.sandbox_id)
    record = json.loads((source / "sandbox.json").read_text())
    copies = []
    try:
        for number in range(199):
            copy = Path(STORE, "sandboxes", f"{number:04x}" + one.sandbox_id[4:])
            copies.append(copy)
            subprocess.run(["cp", "-al", source, copy], check=True)
            for own in ["sandbox.json", "lock", "claim"]:
                (copy / own).unlink()
            (copy / "lock").touch(mode=0o600)
            (copy / "claim").write_text(copy.name + "\n")
            (copy / "sandbox.json").write_text(json.dumps({**record, "id": copy.name, "name": copy.name}))
            Path(STORE, "names", "sandboxes", copy.name).hardlink_to(copy / "claim")
        pages = Sandbox.list(limit=70)
        found = []
        while pages.has_next:
            found += [item.sandbox_id for item in pages.next_items()]
        wanted = {copy.name for copy in copies} | {one.sandbox_id}
        assert wanted <= set(found) and len(found) == len(set(found))
        began = time.monotonic()
        assert len(api("/v2/sandboxes?limit=100").json()) == 100
        assert time.monotonic() - began < 5
        assert figures()['sandtree_sandboxes{state="stopped"}'] >= 200
    finally:
        for copy in copies:
            subprocess.run(["rm", "-rf", copy], check=True)
            Path(STORE, "names", "sandboxes", copy.name).unlink(missing_ok=True)
        one.kill()


def test_slow_clients_are_cut_off(slow):
    _, head, body = slow
    eventually(lambda: head.seconds and body.seconds, 100)
    assert 25 < head.seconds < 60, "30 s for a head"
    assert 50 < body.seconds < 100, "60 s for a body that hardly comes"
    assert b" 408 " in body.answer.split(b"\r\n")[0], body.answer
