"""The native API below /api/v1, by plain requests and by a client that was generated from its OpenAPI document."""

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import pytest
import requests
from openapi_spec_validator import validate

from conftest import STORE, Running, eventually, sandboxes, sandtree


class Api:
    """Plain requests to the native API, with one key."""

    def __init__(self, key=None):
        self.headers = {"X-API-KEY": key or os.environ["E2B_API_KEY"]}

    def __call__(self, method, path, **options):
        headers = {**self.headers, **options.pop("headers", {})}
        return requests.request(method, f"{Running.server.url}/api/v1{path}", headers=headers, timeout=120, **options)

    def ok(self, method, path, **options):
        """The JSON of an answer, which must be a success."""
        answer = self(method, path, **options)
        assert answer.status_code in (200, 201, 204), answer.text
        return answer.json() if answer.content else None

    def refused(self, method, path, **options):
        """Status and code of a refusal, which has the form of all."""
        answer = self(method, path, **options)
        problem = answer.json()
        assert set(problem) == {"code", "kind", "message", "causes", "arguments"}, problem
        assert problem["message"]
        return answer.status_code, problem["code"]

    @contextmanager
    def events(self, path, **options):
        """The events of a stream, as pairs of name and data."""
        method = options.pop("method", "GET")
        headers = {"Accept": "text/event-stream"}
        with self(method, path, stream=True, headers=headers, **options) as answer:
            assert answer.status_code == 200, answer.text
            assert answer.headers["content-type"] == "text/event-stream"
            yield parsed(answer.iter_lines(chunk_size=1))


def parsed(lines):
    name = None
    for line in lines:
        line = line.decode()
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def key_with(*scopes):
    return json.loads(sandtree("--json", "key", "create", "--scope", ",".join(scopes)))["key"]


@pytest.fixture(scope="module")
def api():
    return Api()


@pytest.fixture(scope="module")
def box(api):
    """The path of a sandbox that the tests of this file share."""
    expiry = {"after_ms": 900_000, "action": "remove"}
    made = api.ok("POST", "/sandboxes", json={"image": "debian", "name": "native", "env": {"FOO": "bar"}, "expiry": expiry})
    assert made["state"] == "running" and made["network"] == "isolated"
    yield "/sandboxes/native"
    api.ok("DELETE", "/sandboxes/native")


@pytest.fixture(scope="module")
def document():
    answer = requests.get(f"{Running.server.url}/openapi.json")
    assert answer.status_code == 200
    return answer.json()


def run(api, box, line, **options):
    return api.ok("POST", f"{box}/exec", json={"shell": line, **options})


def test_the_document_is_valid_and_needs_no_key(document):
    validate(document)
    assert document["openapi"].startswith("3.1")
    assert document["components"]["securitySchemes"]["key"]["name"] == "X-API-KEY"


def test_every_operation_of_the_document_is_served_and_no_other(api, document):
    for path, item in document["paths"].items():
        path = path.removeprefix("/api/v1")
        for name in ("sandbox", "snapshot", "image", "state", "command"):
            path = path.replace("{%s}" % name, "absent")
        for method in ("GET", "PUT", "POST", "DELETE", "PATCH"):
            with api(method, path, stream=True) as answer:
                if method.lower() not in item:
                    assert (answer.status_code, answer.json()["code"]) == (405, "no_method"), (method, path)
                elif answer.status_code >= 400:
                    assert answer.json()["code"] not in ("no_route", "no_method"), (method, path)
                    assert answer.status_code < 500, answer.text
    assert api.refused("GET", "/no/such") == (404, "no_route")


def test_refusals_have_one_form(api, box):
    assert Api("e2b_" + "0" * 40).refused("GET", "/sandboxes") == (401, "unauthorized")
    assert api.refused("GET", "/sandboxes/absent") == (404, "no_sandbox")
    assert api.refused("POST", "/sandboxes", json={"image": "absent"}) == (404, "no_image")
    assert api.refused("POST", "/sandboxes", json={"image": "debian", "name": "native"}) == (409, "sandbox_name_taken")
    assert api.refused("POST", "/sandboxes", json={"image": "debian", "memroy_bytes": 1}) == (400, "invalid_request")
    assert api.refused("POST", "/sandboxes", json={"image": "debian", "labels": {"e2b/key": "x"}}) == (400, "invalid_request")
    assert api.refused("POST", "/sandboxes", data=b"{]") == (400, "invalid_request")
    assert api.refused("POST", "/sandboxes", data=b" " * (5 << 20)) == (413, "request_too_large")
    assert api.refused("POST", f"{box}/expire", json={}) == (400, "invalid_request")
    assert api.refused("POST", f"{box}/resume") == (409, "wrong_state")
    assert api.refused("POST", f"{box}/revert", json={"state": "absent"}) == (404, "no_state")
    assert api.refused("POST", f"{box}/exec", json={"argv": ["/absent"]})[1] == "command_not_found"
    assert api.refused("GET", f"{box}/files", params={"path": "/absent"}) == (404, "file_not_found")
    assert api.refused("GET", f"{box}/files", params={"path": "relative"}) == (400, "invalid_request")
    assert api.refused("GET", "/sandboxes", params={"limit": 0}) == (400, "invalid_request")
    assert api.refused("PUT", "/snapshots/rubbish", data=b"rubbish")[0] in (400, 422)
    # A sandbox of the server's clients is the same sandbox.
    refusal = requests.get(f"{Running.server.url}/sandboxes/absent", headers=api.headers)
    assert refusal.json()["code"] == 404


def test_a_create_that_is_sent_again_makes_one_sandbox(api):
    again = lambda: api.ok("POST", "/sandboxes", json={"image": "debian"}, headers={"Idempotency-Key": "native"})
    first = again()
    try:
        assert again()["id"] == first["id"]
    finally:
        api.ok("DELETE", f"/sandboxes/{first['id']}")


def test_commands(api, box):
    done = run(api, box, "echo $FOO; cat; echo bad >&2; exit 3", stdin="typed")
    assert (done["exit_code"], done["stdout"], done["stderr"]) == (3, "bar\ntyped", "bad\n")
    assert not done["timed_out"]
    slow = run(api, box, "sleep 60", timeout_ms=300)
    assert (slow["exit_code"], slow["timed_out"]) == (124, True)
    large = run(api, box, "head -c 300000 /dev/zero | tr '\\0' x", output_max_bytes=1000)
    assert (large["stdout"], large["stdout_truncated"]) == ("x" * 1000, True)
    raw = run(api, box, "printf '\\377'")
    assert raw["stdout_base64"] == "/w==" and "stdout" not in raw
    user = api.ok("POST", f"{box}/exec", json={"argv": ["id", "-un"], "user": "user", "workdir": "/", "env": {"A": "b"}})
    assert user["stdout"] == "user\n"


def test_detached_commands_are_followed_and_signalled(api, box):
    line = "printf 'a\\303'; sleep 0.2; printf '\\244'; echo b >&2; trap 'exit 7' TERM; while :; do sleep 0.1; done"
    started = api.ok("POST", f"{box}/commands", json={"shell": line})
    command = f"{box}/commands/{started['id']}"
    seen = {"stdout": "", "stderr": ""}
    with api.events(f"{command}/output") as events:
        for name, data in events:
            if name == "exit":
                break
            seen[name] += data["text"]
            if seen == {"stdout": "aä", "stderr": "b\n"}:
                api.ok("POST", f"{command}/signal", json={"signal": 15})
    assert data == {"exit_code": 7}
    listed = api.ok("GET", f"{box}/commands")["commands"]
    assert [entry["pid"] for entry in listed if entry["id"] == started["id"]] == [started["pid"]]
    # A second reader gets all of it again.
    with api.events(f"{command}/output") as events:
        assert "".join(data["text"] for name, data in events if name == "stdout") == "aä"
    api.ok("DELETE", command)
    assert api.refused("GET", f"{command}/output") == (404, "no_command")


def test_files(api, box):
    path = {"path": "/srv/new/große datei"}
    content = os.urandom(3_000_000)
    assert api.ok("PUT", f"{box}/files", params={**path, "parents": "true", "mode": "640"}, data=content) == {"bytes": len(content)}
    assert api("GET", f"{box}/files", params=path).content == content
    stat = api.ok("GET", f"{box}/files/stat", params=path)
    assert (stat["kind"], stat["size"], oct(stat["mode"])) == ("file", len(content), "0o640")
    api.ok("POST", f"{box}/files/directory", json={"path": "/srv/new/dir"})
    api.ok("POST", f"{box}/files/rename", json={"from": path["path"], "to": "/srv/new/b"})
    api.ok("PUT", f"{box}/files", params={"path": "/srv/new/empty"}, data=b"")
    assert api("GET", f"{box}/files", params={"path": "/srv/new/empty"}).content == b""
    first = api.ok("GET", f"{box}/files/list", params={"path": "/srv/new", "limit": 2})
    second = api.ok("GET", f"{box}/files/list", params={"path": "/srv/new", "limit": 2, "after": first["next"]})
    assert [entry["name"] for entry in first["entries"] + second["entries"]] == ["b", "dir", "empty"]
    assert second["next"] is None
    api.ok("DELETE", f"{box}/files", params={"path": "/srv/new"})
    assert api.refused("GET", f"{box}/files/stat", params={"path": "/srv/new"}) == (404, "file_not_found")


def test_an_upload_that_breaks_off_changes_no_file(api, box):
    api.ok("PUT", f"{box}/files", params={"path": "/srv/kept"}, data=b"before")
    with broken_upload(api, f"{box}/files?path=/srv/kept", b"after, and cut", 1000):
        eventually(lambda: run(api, box, "ls -A /srv | wc -l")["stdout"] == "2\n")
    eventually(lambda: run(api, box, "ls -A /srv | wc -l")["stdout"] == "1\n")
    assert run(api, box, "cat /srv/kept")["stdout"] == "before"


@contextmanager
def broken_upload(api, path, sent, announced):
    """Sends a part of a body, and leaves at the end."""
    host, port = Running.server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = f"PUT /api/v1{path} HTTP/1.1\r\nHost: x\r\nX-API-KEY: {api.headers['X-API-KEY']}\r\nContent-Length: {announced}\r\n\r\n"
        connection.sendall(head.encode() + sent)
        yield


def test_states_are_a_tree(api, box):
    run(api, box, "echo one > /root/file; sync")
    first = api.ok("POST", f"{box}/states", json={"tag": "one"})
    assert first["tag"] == "one" and first["degraded"] == []
    assert api.refused("POST", f"{box}/states", json={"tag": "one"}) == (409, "tag_taken")
    run(api, box, "echo two > /root/file; mkdir /root/d; touch /root/d/1 /root/d/2")
    query = {"before": "native@one", "after": "native"}
    changes, offset = [], 0
    while offset is not None:
        page = api.ok("GET", "/diff", params={**query, "limit": 2, "offset": offset})
        assert page["incomplete"] is None and len(page["changes"]) <= 2
        changes, offset = changes + page["changes"], page["next_offset"]
    assert changes == api.ok("GET", "/diff", params=query)["changes"]
    assert {"/root/file", "/root/d", "/root/d/1", "/root/d/2"} <= {change["path"] for change in changes}
    text = api.ok("GET", "/diff/content", params={**query, "path": "/root/file"})
    assert text["kind"] == "text" and "-one\n+two\n" in text["diff"]
    left = api.ok("POST", f"{box}/revert", json={"state": "one"})["left"]
    assert run(api, box, "cat /root/file")["stdout"] == "one\n"
    api.ok("POST", f"{box}/revert", json={"state": left})
    assert run(api, box, "cat /root/file")["stdout"] == "two\n"
    api.ok("POST", f"{box}/undo", json={"steps": 1})
    assert run(api, box, "cat /root/file")["stdout"] == "one\n"
    api.ok("POST", f"{box}/redo")
    assert run(api, box, "cat /root/file")["stdout"] == "two\n"
    states = {state["id"]: state for state in api.ok("GET", f"{box}/states")["states"]}
    assert states[left]["parent"] == first["id"]
    nodes = api.ok("GET", "/tree")["nodes"]
    assert first["id"] in {node["id"] for node in nodes if node["kind"] == "state"}
    assert api.ok("DELETE", f"{box}/states/one")["states"] == [first["id"]]
    api.ok("DELETE", f"{box}/states")
    assert api.ok("GET", f"{box}/states")["states"] == []


def test_sandboxes_rest_and_continue(api, box):
    run(api, box, "echo kept > /dev/shm/memory")
    assert api.ok("POST", f"{box}/pause")["degraded"] == []
    assert api.refused("POST", f"{box}/exec", json={"shell": "true"}) == (409, "wrong_state")
    assert api.ok("GET", "/sandboxes", params={"state": "paused"})["sandboxes"][0]["name"] == "native"
    api.ok("POST", f"{box}/resume")
    assert run(api, box, "cat /dev/shm/memory")["stdout"] == "kept\n"
    assert api.ok("POST", f"{box}/expire", json={"after_ms": None})["expires_at"] is None
    assert api.ok("POST", f"{box}/expire", json={"after_ms": 900_000})["expires_at"]
    assert api.ok("GET", f"{box}/stats")["guest"]["memory_total_bytes"] > 0
    assert set(api.ok("GET", f"{box}/logs", params={"tail_bytes": 100})) == {"console"}
    assert api.ok("GET", "/key")["scopes"] == ["sandboxes"]


def test_forks_are_all_or_none(api, box):
    run(api, box, "echo source > /root/fork")
    before = sandboxes()
    assert api.refused("POST", f"{box}/fork", json={"count": 0}) == (400, "invalid")
    taken = api.ok("POST", f"{box}/fork", json={"count": 1, "name": "copy"})
    try:
        assert api.refused("POST", f"{box}/fork", json={"count": 2, "name": "copy"}) == (409, "sandbox_name_taken")
        assert sandboxes() == before | {taken["forks"][0]["id"]}
        assert run(api, "/sandboxes/copy-1", "cat /root/fork")["stdout"] == "source\n"
        pages = [api.ok("GET", "/sandboxes", params={"limit": 1})]
        while pages[-1]["next"]:
            pages.append(api.ok("GET", "/sandboxes", params={"limit": 1, "after": pages[-1]["next"]}))
        assert {info["id"] for page in pages for info in page["sandboxes"]} == sandboxes()
        assert all(len(page["sandboxes"]) == 1 for page in pages)
    finally:
        api.ok("DELETE", "/sandboxes/copy-1")


def test_events(api, box):
    with api.events("/events") as everything, api.events(f"{box}/events") as one:
        name, data = next(one)
        assert (name, data["name"], data["phase"]) == ("state", "native", "running")
        while next(everything)[1]["name"] != "native":
            pass
        api.ok("POST", f"{box}/stop", json={"grace_ms": 1000})
        assert phases(one, "native", "stopped")
        assert phases(everything, "native", "stopped")
        made = api.ok("POST", f"{box}/start")
        assert made["state"] == "running"
        assert phases(one, "native", "running")
        copy = api.ok("POST", f"{box}/fork", json={"name": "gone"})["forks"][0]
        assert phases(everything, "gone-1", "running")
        with api.events(f"/sandboxes/{copy['id']}/events") as last:
            api.ok("DELETE", f"/sandboxes/{copy['id']}")
            # The stream ends by itself.
            assert list(last)[-1][1]["phase"] is None
        assert phases(everything, "gone-1", None)


def phases(events, name, phase):
    """Reads events until a sandbox is in a phase."""
    return any((data["name"], data["phase"]) == (name, phase) for _, data in events)


def test_scopes_guard_the_host(api, box, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "file").write_text("of the host\n")
    mount = {"host": str(shared), "guest": "/mnt/shared", "access": "copy_on_write"}
    denied = (403, "missing_scope")
    assert api.refused("POST", f"{box}/mounts", json=mount) == denied
    assert api.refused("POST", "/sandboxes", json={"image": "debian", "mounts": [mount]}) == denied
    assert api.refused("POST", "/sandboxes", json={"image": "debian", "qemu_args": ["-snapshot"]}) == denied
    assert api.refused("POST", "/sandboxes", json={"image": str(shared)}) == denied
    assert api.refused("POST", f"{box}/save", json={"target": str(shared / "new")}) == denied
    assert api.refused("GET", "/export", params={"reference": str(shared)}) == denied
    assert api.refused("GET", "/diff", params={"before": str(shared), "after": "native"}) == denied
    assert api.refused("GET", f"/snapshots/{str(shared).replace('/', '%2F')}") == denied
    assert api.refused("POST", "/pull", json={"reference": "localhost:1/x"}) == denied
    # A client of E2B names templates, and never a path.
    e2b = requests.post(f"{Running.server.url}/sandboxes", json={"templateID": ".."}, headers=api.headers)
    assert e2b.status_code in (400, 404), e2b.text
    useless = Api(key_with("registries"))
    assert useless.refused("GET", "/sandboxes") == denied
    assert requests.get(f"{Running.server.url}/sandboxes", headers=useless.headers).status_code == 403

    host = Api(key_with("sandboxes", "host-files"))
    assert [entry["guest"] for entry in host.ok("POST", f"{box}/mounts", json=mount)["mounts"]] == ["/mnt/shared"]
    assert run(api, box, "cat /mnt/shared/file; echo changed > /mnt/shared/file")["stdout"] == "of the host\n"
    guest = {"guest": "/mnt/shared"}
    assert api.refused("GET", f"{box}/mounts/changes", params=guest) == denied
    changes = host.ok("GET", f"{box}/mounts/changes", params=guest)["changes"]
    assert [(change["path"], change["change"]) for change in changes] == [("/file", "changed")]
    assert "+changed" in host.ok("GET", f"{box}/mounts/patch", params=guest)["patch"]
    assert (shared / "file").read_text() == "of the host\n"
    host.ok("POST", f"{box}/mounts/apply", json=guest)
    assert (shared / "file").read_text() == "changed\n"
    assert host.ok("DELETE", f"{box}/mounts", params=guest)["mounts"] == []


def test_keys_from_before_scopes_keep_working():
    api = Api(key_with("registries"))
    assert api.refused("GET", "/key") == (403, "missing_scope")
    stored = Path(STORE, "access.json")
    access = json.loads(stored.read_text())
    del access["keys"][-1]["scopes"]
    stored.write_text(json.dumps(access))
    assert api.ok("GET", "/key")["scopes"] == ["sandboxes"]


@pytest.fixture(scope="module")
def saved(api, box):
    """A snapshot of the sandbox."""
    run(api, box, "echo saved > /root/saved; sync")
    made = api.ok("POST", f"{box}/save", json={"target": "native-saved", "labels": {"made": "by a test"}})
    yield made
    api.ok("DELETE", "/snapshots/native-saved")


def stored():
    """What is in the store beside its sandboxes."""
    places = ("snapshots", "layers", "names", "staging", "images", "kernels")
    return {str(path) for place in places for path in Path(STORE, place).rglob("*")}


def is_working():
    """Whether something is being made or held."""
    return any(Path(STORE, "staging").iterdir())


def test_snapshots_are_listed_named_and_verified(api, saved):
    listed = api.ok("GET", "/snapshots")["snapshots"]
    assert [info["labels"] for info in listed if info["digest"] == saved["digest"]] == [{"made": "by a test"}]
    assert api.ok("POST", "/snapshots/native-saved/names", json={"name": "native-too"})["digest"] == saved["digest"]
    assert sorted(api.ok("GET", f"/snapshots/{saved['digest']}")["names"]) == ["native-saved", "native-too"]
    assert api.ok("POST", "/snapshots/native-too/verify")["damaged"] == []
    api.ok("DELETE", "/snapshots/native-too")
    assert api.refused("GET", "/snapshots/native-too") == (404, "no_snapshot")
    images = [image["names"] for image in api.ok("GET", "/images")["images"]]
    assert ["debian"] in images
    assert api.ok("GET", "/images/debian")["sandboxes"] >= 1


def test_transfers_that_break_off_leave_nothing(api, saved):
    export = {"reference": "native-saved", "plain": "true"}
    # More than may be under way at a time: those whose client left do not count.
    for _ in range(40):
        with eventually(lambda: begun(api, export)) as answer:
            assert answer.raw.read(10)
    artifact = api("GET", "/export", params={"reference": "native-saved", "without_image": "true"}).content
    # Nothing holds the snapshot any more.
    eventually(lambda: not is_working())
    before = stored()
    with broken_upload(api, "/snapshots/native-broken", artifact[: len(artifact) // 2], len(artifact)):
        eventually(is_working)
    eventually(lambda: stored() == before)
    assert api.refused("GET", "/snapshots/native-broken") == (404, "no_snapshot")
    damaged = artifact[:-200] + bytes(byte ^ 1 for byte in artifact[-200:])
    assert api.refused("PUT", "/snapshots/native-broken", data=damaged)[0] in (400, 422)
    eventually(lambda: stored() == before)


def begun(api, export):
    """A download, if the server has a place for it."""
    answer = api("GET", "/export", params=export, stream=True)
    assert answer.status_code in (200, 503), answer.text
    return answer.status_code == 200 and answer


def test_registries_report_progress(saved, registry):
    api = Api(key_with("sandboxes", "registries"))
    reference = f"{registry}/team/saved:1"
    with api.events("/push", method="POST", json={"what": "native-saved", "reference": reference}) as events:
        events = list(events)
    assert events[-1][0] == "done" and events[-1][1]["digest"] == saved["digest"], events[-1]
    assert {"progress", "done"} == {name for name, _ in events}
    assert events[0][1]["stage"]
    pulled = api.ok("POST", "/pull", json={"reference": reference, "name": "native-pulled"})
    assert (pulled["kind"], pulled["digest"]) == ("snapshot", saved["digest"])
    api.ok("DELETE", "/snapshots/native-pulled")
    with api.events("/pull", method="POST", json={"reference": f"{registry}/team/absent"}) as events:
        assert [(name, data["code"]) for name, data in events] == [("error", "not_in_registry")]
    assert api.refused("POST", "/pull", json={"reference": f"{registry}/team/absent"}) == (404, "not_in_registry")


@pytest.fixture(scope="module")
def generated(document):
    """A client that a generator made from the document."""
    with tempfile.TemporaryDirectory() as place:
        source = Path(place, "openapi.json")
        source.write_text(json.dumps(document))
        config = Path(place, "config.json")
        config.write_text(json.dumps({"post_hooks": []}))
        target = Path(place, "sandtree_client")
        command = ["-m", "openapi_python_client", "generate", "--meta", "none", "--fail-on-warning"]
        options = ["--path", str(source), "--config", str(config), "--output-path", str(target)]
        made = subprocess.run([sys.executable, *command, *options], capture_output=True, text=True)
        assert made.returncode == 0, made.stdout + made.stderr
        sys.path.insert(0, place)
        yield lambda name: importlib.import_module(f"sandtree_client.{name}")
        sys.path.remove(place)


def test_a_generated_client_does_the_main_job(generated):
    models = generated("models")
    client = generated("client").AuthenticatedClient(
        Running.server.url, os.environ["E2B_API_KEY"], prefix="", auth_header_name="X-API-KEY", timeout=120
    )

    def call(name, *arguments, **options):
        answer = generated(f"api.{name}").sync(*arguments, client=client, **options)
        assert not isinstance(answer, models.Error), answer
        return answer

    def said(sandbox, line):
        return call("commands.exec_", sandbox, body=models.ExecOptions(shell=line)).stdout

    expiry = models.Expiry(after_ms=900_000, action=models.ExpiryAction.REMOVE)
    made = call("sandboxes.create_sandbox", body=models.NewSandbox(image="debian", expiry=expiry))
    forks = []
    try:
        assert said(made.id, "echo good > /srv/work; cat /srv/work") == "good\n"
        call("states.checkpoint", made.id, body=models.CheckpointOptions(tag="good"))
        assert said(made.id, "rm -rf /srv /bin/sh; echo broken") == "broken\n"
        assert call("states.revert", made.id, body=models.RevertOptions(state="good")).tag == "good"
        assert said(made.id, "cat /srv/work") == "good\n"
        forks = call("states.fork", made.id, body=models.ForkOptions(count=3, name="worker")).forks
        assert [fork.name for fork in forks] == ["worker-1", "worker-2", "worker-3"]
        assert said(forks[2].id, "cat /srv/work") == "good\n"
        kept = call("snapshots.save", forks[0].id, body=models.SaveOptions(target="worker-kept"))
        exported = call("snapshots.export", reference="worker-kept", without_image=True)
        artifact = exported.payload.read()
        call("snapshots.remove_snapshot", "worker-kept")
        body = generated("types").File(payload=BytesIO(artifact))
        assert call("snapshots.import_", "worker-back", body=body).digest == kept.digest
        again = call("sandboxes.create_sandbox", body=models.NewSandbox(snapshot="worker-back", expiry=expiry))
        forks.append(again)
        assert said(again.id, "cat /srv/work") == "good\n"
        missing = generated("api.sandboxes.get_sandbox").sync("absent", client=client)
        assert (missing.code, missing.kind) == ("no_sandbox", "not_found")
    finally:
        for sandbox in [made, *forks]:
            call("sandboxes.remove_sandbox", sandbox.id)
        Api()("DELETE", "/snapshots/worker-back")


def test_generated_requests_never_break_the_server(tmp_path):
    """Schemathesis sends what the document allows, and what it does not; answers must be as described."""
    new = json.loads(sandtree("--json", "key", "create", "--max-sandboxes", "1"))
    api = Api(new["key"])
    expiry = {"after_ms": 900_000, "action": "remove"}
    api.ok("POST", "/sandboxes", json={"image": "debian", "name": "fuzzed", "expiry": expiry})
    config = tmp_path / "schemathesis.toml"
    config.write_text('[parameters]\n"path.sandbox" = "fuzzed"\n')
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    # Streams do not end; the other verbs would take the sandbox or the images away, or fill the store.
    left_out = "events|/output|/(stop|kill|start|pause|resume|expire|save)$|/images/"
    command = [Path(sys.executable).with_name("schemathesis"), "--config-file", config, "run"]
    options = ["--phases", "examples,coverage,fuzzing", "--max-examples", "3", "--checks", checks, "--no-color"]
    chosen = ["--exclude-path-regex", left_out, "--exclude-operation-id", "remove_sandbox"]
    target = ["--header", f"X-API-KEY: {new['key']}", f"{Running.server.url}/openapi.json"]
    try:
        done = subprocess.run([*command, *options, *chosen, *target], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-5000:]
        assert api.ok("GET", "/sandboxes/fuzzed")["state"] == "running"
    finally:
        api.ok("DELETE", "/sandboxes/fuzzed")
