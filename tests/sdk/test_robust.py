"""The server under hostile and unlucky conditions: slow clients, many of them, broken requests, and processes that die."""

import asyncio
import json
import os
import random
import resource
import signal
import socket
import ssl
import subprocess
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
import urllib3
from e2b import CommandExitException, Sandbox

from conftest import STORE, Running, Server, eventually, sandboxes, sandtree, use
from test_observed import api, figures

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
    files = [str(directory / name) for name in ["cert.pem", "key.pem"]]
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    words += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,DNS:*.sandboxes.test,IP:127.0.0.1"]
    subprocess.run([*words, "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
    return files


def test_tls(made, tmp_path):
    cert, key = certificate(tmp_path)
    secure = Server("127.0.0.1:0", "--tls-cert", cert, "--tls-key", key)
    try:
        assert secure.url.startswith("https://")
        found = requests.get(f"{secure.url}/sandboxes/{made.sandbox_id}", headers={"X-API-KEY": os.environ["E2B_API_KEY"]}, verify=cert)
        assert found.json()["sandboxID"] == made.sandbox_id
        headers = {"E2b-Sandbox-Id": made.sandbox_id, "X-Access-Token": made._envd_access_token}
        stored = requests.post(f"{secure.url}/files?path=over-tls", files={"file": b"x" * 100_000}, headers=headers, verify=cert)
        assert stored.status_code == 200
        assert made.files.read("over-tls") == "x" * 100_000
        with pytest.raises(requests.exceptions.SSLError):
            requests.get(secure.url + "/health")
        host, port = secure.address.split(":")
        made.commands.run("python3 -m http.server 8456 --bind 127.0.0.1 --directory /home/user", background=True)
        name = f"8456-{made.sandbox_id}.sandboxes.test"
        names = {"server_hostname": name, "assert_hostname": name, "ca_certs": cert}
        with urllib3.HTTPSConnectionPool(host, int(port), **names) as pool:
            there = {"Host": f"{name}:{port}"}
            # The service answers when it has started.
            eventually(lambda: pool.request("GET", "/", headers=there).status == 200)
            assert pool.request("GET", "/over-tls", headers=there).data == b"x" * 100_000
        with socket.create_connection((host, int(port)), timeout=30) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" not in plain.recv(4096)
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.load_verify_locations(cert)
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
    directories = {path.name for path in Path(STORE, "sandboxes").iterdir()}
    left = [f"directory {name}" for name in directories - set(listed)]
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


def kill_of(victim, sandbox_id):
    """Kills the server, or the keeper or the QEMU of a sandbox, as a crash would."""
    if victim == "server":
        Running.server.kill()
        return
    if victim == "stopped server":
        assert Running.server.stop() == 0
        return
    wanted = "qemu" if victim == "qemu" else "sandtree"
    for pid, (program, ids) in processes().items():
        if program.startswith(wanted) and sandbox_id in ids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def operation(name, sandbox):
    """What a client does, as a function."""
    return {
        "create": lambda: Sandbox.create(timeout=300),
        "connect": lambda: sandbox.connect(timeout=300),
        "command": lambda: sandbox.commands.run("head -c 3000000 /dev/zero | wc -c"),
        "upload": lambda: sandbox.files.write("upload", "x" * 3_000_000),
        "pause": lambda: sandbox.pause(),
        "resume": lambda: sandbox.connect(timeout=300),
        "snapshot": lambda: sandbox.create_snapshot(name=f"killed-{uuid.uuid4().hex[:8]}"),
        "fork": lambda: sandbox.fork(timeout=300),
        "kill": lambda: sandbox.kill(),
    }[name]


OPERATIONS = ["create", "connect", "command", "upload", "pause", "resume", "snapshot", "fork", "kill"]


SERVERS = ["server", "stopped server"]


@pytest.mark.parametrize("victim", [*SERVERS, "keeper", "qemu"])
def test_processes_die_during_every_operation(victim):
    print(f"SANDTREE_TEST_SEED={SEED}")
    address = Running.server.address
    sandbox = None
    with ThreadPoolExecutor(1) as pool:
        for name in OPERATIONS:
            known = sandboxes()
            if sandbox is None or sandbox.sandbox_id not in known:
                sandbox = Sandbox.create(timeout=600)
                known = sandboxes()
            if name == "resume":
                sandbox.pause()
            began = pool.submit(operation(name, sandbox))
            target = sandbox.sandbox_id
            if name in ("create", "fork") and victim not in SERVERS:
                made = lambda: {path.name for path in Path(STORE, "sandboxes").iterdir()} - known
                target = eventually(lambda: began.done() or made())
                target = sandbox.sandbox_id if target is True else target.pop()
            wait_for(RANDOM.random() * 0.3)
            kill_of(victim, target)
            # It succeeds or it fails; it does not hang.
            began.exception(timeout=120)
            if victim in SERVERS:
                use(Server(address))
            nothing_is_left(name)
            works(sandbox, victim, known, name)
            if sandbox.sandbox_id in sandboxes() and victim not in SERVERS:
                sandbox.kill()
            for other in sandboxes() - known:
                Sandbox.kill(other)
    if sandbox.sandbox_id in sandboxes():
        sandbox.kill()
    for snapshot in json.loads(sandtree("--json", "snapshot", "ls")):
        for called in snapshot["names"]:
            if called.startswith("killed-"):
                sandtree("snapshot", "rm", called)


def works(sandbox, victim, known, name):
    """After the death of a server, its sandboxes go on. Those of other processes are listed as they are."""
    listed = {one.sandbox_id: one for one in Sandbox.list().next_items()}
    if victim in SERVERS and sandbox.sandbox_id in sandboxes():
        assert sandbox.sandbox_id in listed, name
        sandbox.connect(timeout=600)
        assert sandbox.commands.run("echo alive").stdout == "alive\n", name
    if victim in SERVERS and name != "kill":
        assert sandbox.sandbox_id in sandboxes(), name


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
