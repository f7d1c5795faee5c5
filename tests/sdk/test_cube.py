"""CubeSandbox's Python client."""

import json
import time

import pytest
import requests
from cubesandbox import (
    NEVER_TIMEOUT,
    ApiError,
    Config,
    CubeSandboxError,
    FilesystemNotFoundError,
    PartialWriteError,
    PtySize,
    Sandbox,
    SandboxNotFoundError,
    TemplateNotFoundError,
)
from cubesandbox._exceptions import AuthenticationError

from conftest import Running, eventually, sandboxes, sandtree

MISSING = "0123456789abcdef"


@pytest.fixture
def cube():
    made = Sandbox.create("base", timeout=300, metadata={"by": "cube"}, env_vars={"FOO": "bar"})
    yield made
    if made.sandbox_id in sandboxes():
        made.kill()


@pytest.fixture(scope="module")
def shared():
    """A sandbox that tests share which leave it as it is."""
    with Sandbox.create("base", timeout=900, metadata={"by": "cube"}, env_vars={"FOO": "bar"}) as made:
        yield made


def missing():
    """A client's sandbox that the server does not have."""
    return Sandbox({"sandboxID": MISSING, "templateID": "base"}, Config())


def test_commands_and_files(shared):
    done = shared.commands.run("echo $FOO; whoami; exit 3")
    assert (done.stdout, done.exit_code) == ("bar\nroot\n", 3)
    there = shared.commands.run("pwd; echo $A; whoami", cwd="/tmp", envs={"A": "b"}, user="user")
    assert there.stdout == "/tmp\nb\nuser\n"
    with pytest.raises(RuntimeError, match="deadline"):
        shared.commands.run("sleep 600", timeout=1)
    shared.files.write("/srv/a", "text")
    assert shared.files.read("/srv/a") == "text"
    assert shared.files.exists("/srv/a") and not shared.files.exists("/srv/b")
    info = shared.get_info()
    assert (info.state, info.template_id, info["metadata"]) == ("running", "base", {"by": "cube"})


def test_every_operation_on_files(shared):
    files = shared.files
    assert files.write_files([("/srv/tree/one", "1"), ("/srv/tree/sub/two", b"22")]) == 2
    assert {(entry["name"], entry["type"]) for entry in files.list("/srv/tree")} == {
        ("one", "FILE_TYPE_FILE"),
        ("sub", "FILE_TYPE_DIRECTORY"),
    }
    stat = files.stat("/srv/tree/sub/two")
    assert (stat["path"], stat["size"], stat["owner"]) == ("/srv/tree/sub/two", "2", "root")
    assert files.make_dir("/srv/tree/new", user="root")["path"] == "/srv/tree/new"
    assert files.rename("/srv/tree/one", "/srv/tree/new/moved")["path"] == "/srv/tree/new/moved"
    assert files.read("/srv/tree/new/moved") == "1"
    with pytest.raises(IOError, match="already_exists"):
        files.make_dir("/srv/tree/new")
    with pytest.raises(IOError, match="invalid_argument"):
        files.list("/srv/tree/new/moved")
    with pytest.raises(PartialWriteError) as partly:
        files.write_files([("/srv/tree/third", "3"), ("/srv/tree/new", "a directory"), ("/srv/tree/fourth", "4")])
    assert partly.value.written == 1 and not files.exists("/srv/tree/fourth")
    files.remove("/srv/tree")
    for refused in [files.list, files.stat, lambda path: files.rename(path, "/srv/other")]:
        with pytest.raises(FilesystemNotFoundError):
            refused("/srv/tree")
    with pytest.raises(IOError, match="does not exist"):
        files.read("/srv/tree")


def test_a_directory_is_watched(shared):
    shared.files.make_dir("/srv/watched", user="root")
    with shared.files.watch_dir("/srv/watched") as watch:
        shared.files.write("/srv/watched/new", "x")
        shared.files.remove("/srv/watched/new")
        seen = []
        while ("EVENT_TYPE_REMOVE", "new") not in seen:
            event = next(watch)
            seen.append((event.type, event.name))
    assert ("EVENT_TYPE_CREATE", "new") in seen
    with pytest.raises(IOError, match="not.there"):
        next(shared.files.watch_dir("/srv/not-there"))


def test_terminals(shared):
    shown = []
    begun = shared.pty.create(PtySize(rows=24, cols=80), user="user", cwd="/tmp", envs={"MINE": "variable"})
    begun.disconnect()
    joined = shared.pty.connect(begun.pid)
    joined.resize(PtySize(rows=33, cols=99))
    shared.pty.send_stdin(begun.pid, "stty size; pwd; whoami; ")
    joined.send_stdin("echo $MINE; exit\n")
    assert joined.wait(on_data=shown.append) == 0
    for text in [b"33 99", b"/tmp", b"user", b"variable"]:
        assert text in b"".join(shown)
    failing = shared.pty.create(PtySize(rows=24, cols=80))
    failing.send_stdin("exit 5\n")
    with pytest.raises(CubeSandboxError, match="exit status 5"):
        failing.wait()
    killed = shared.pty.create(PtySize(rows=24, cols=80))
    assert killed.kill() is True
    with pytest.raises(CubeSandboxError, match="killed"):
        killed.wait()
    assert shared.pty.kill(killed.pid) is False
    with pytest.raises(RuntimeError, match="process with pid 999999 not found"):
        shared.pty.connect(999_999)
    with pytest.raises(CubeSandboxError, match="404"):
        shared.pty.resize(999_999, PtySize(rows=1, cols=1))


def test_ports_have_names(shared):
    host = shared.get_host(8457)
    assert host == f"8457-{shared.sandbox_id}.{shared.domain}"
    closed = requests.get(Running.server.url, headers={"Host": host}).json()
    assert (closed["sandboxId"], closed["port"], closed["code"]) == (shared.sandbox_id, 8457, 502)
    assert shared.get_mcp_url() == f"http://{shared.get_host(50005)}/mcp"
    assert shared.get_mcp_token() is None
    with pytest.raises(TemplateNotFoundError):
        Sandbox.create(mcp={"duckduckgo": {}})


def test_lists_and_health(shared):
    assert Sandbox.health()["status"] == "ok"
    for found in [Sandbox.list(), Sandbox.list_v2()]:
        mine = next(one for one in found if one["sandboxID"] == shared.sandbox_id)
        assert (mine["state"], mine["templateID"], mine["metadata"]) == ("running", "base", {"by": "cube"})
    wrong = Config(api_key="e2b_" + "0" * 40)
    for refused in [Sandbox.list, Sandbox.list_v2, lambda config: Sandbox.create("base", config=config)]:
        with pytest.raises(AuthenticationError, match="invalid API key"):
            refused(config=wrong)


def test_rollback_and_clone(cube):
    cube.files.write("/dev/shm/x", "before")
    snapshot = cube.create_snapshot()
    cube.files.write("/dev/shm/x", "after")
    assert cube.rollback(snapshot.snapshot_id)["snapshotID"] == snapshot.snapshot_id
    assert cube.files.read("/dev/shm/x") == "before"
    copies = cube.clone(3, concurrency=3)
    assert [copy.files.read("/dev/shm/x") for copy in copies] == ["before"] * 3
    assert [copy.get_info()["metadata"] for copy in copies] == [{"by": "cube"}] * 3
    assert len({copy.sandbox_id for copy in copies} | {cube.sandbox_id}) == 4
    for copy in copies:
        copy.kill()
    with pytest.raises(TemplateNotFoundError):
        cube.rollback("snap-000000000000000000000000")
    # The last clone has taken the snapshot of the cloning with it.
    first, second = cube.create_snapshot("cube-first"), cube.create_snapshot()
    page, token = Sandbox.list_snapshots(sandbox_id=cube.sandbox_id, limit=2)
    rest, end = Sandbox.list_snapshots(sandbox_id=cube.sandbox_id, limit=2, next_token=token)
    assert [one.snapshot_id for one in page + rest] == [second.snapshot_id, first.snapshot_id, snapshot.snapshot_id]
    assert (first.snapshot_id, end) == ("cube-first", None)
    for one in [first, second, snapshot]:
        Sandbox.delete_snapshot(one.snapshot_id)
    assert Sandbox.list_snapshots(sandbox_id=cube.sandbox_id) == ([], None)
    with pytest.raises(TemplateNotFoundError):
        Sandbox.delete_snapshot(first.snapshot_id)


def test_clones_are_all_made_or_none(cube):
    key = json.loads(sandtree("--json", "key", "create", "--max-sandboxes", "1"))
    before = sandboxes()
    limited = Sandbox(cube._data, Config(api_key=key["key"]))
    with pytest.raises(ApiError, match="may run 1 sandboxes") as refused:
        limited.clone(2)
    assert refused.value.status_code == 429
    assert sandboxes() == before
    assert Sandbox.list_snapshots(sandbox_id=cube.sandbox_id) == ([], None)
    sandtree("key", "rm", key["id"])


def test_a_clone_is_as_the_sandbox_was_created():
    chosen = {"allow_internet_access": False, "lifecycle": {"on_timeout": "pause"}, "env_vars": {"FOO": "inherited"}}
    with Sandbox.create("base", timeout=1000, **chosen) as original, original.clone()[0] as clone:
        info = clone.get_info()
        assert clone.commands.run("echo $FOO").stdout == "inherited\n"
        assert (info["lifecycle"]["onTimeout"], info["allowInternetAccess"]) == ("pause", False)
        assert 900 < info.end_at.timestamp() - time.time() < 1001
        snapshot = original.create_snapshot()
        with Sandbox.create(snapshot.snapshot_id, env_vars={"FOO": "own"}, timeout=100) as other:
            assert other.commands.run("echo $FOO").stdout == "own\n"
            assert other.get_info().end_at.timestamp() - time.time() < 101
        Sandbox.delete_snapshot(snapshot.snapshot_id)


def test_a_clone_of_a_sandbox_without_an_end_has_none():
    with Sandbox.create("base", timeout=NEVER_TIMEOUT) as original, original.clone()[0] as clone:
        assert original.get_info().end_at.year == clone.get_info().end_at.year == 9999


def test_a_lifetime_that_is_set_later_ends_as_its_creator_chose():
    with Sandbox.create("base", timeout=NEVER_TIMEOUT, lifecycle={"on_timeout": "pause"}) as made:
        info = made.get_info()
        assert (info.end_at.year, info["lifecycle"]["onTimeout"]) == (9999, "pause")
        made.set_timeout(1)
        eventually(lambda: made.get_info().state == "paused")


def test_pause_and_lifetimes(cube):
    cube.set_timeout(NEVER_TIMEOUT)
    assert cube.get_info().end_at.year == 9999
    inspected = sandtree("--json", "inspect", cube.sandbox_id)
    assert '"expires_at":null' in inspected.replace(" ", ""), inspected
    # One that never ends is not given an end by those who want it longer.
    Sandbox.connect(cube.sandbox_id, timeout=10)
    assert cube.get_info().end_at.year == 9999
    cube.files.write("/dev/shm/x", "kept")
    cube.pause()
    again = Sandbox.connect(cube.sandbox_id)
    assert again.files.read("/dev/shm/x") == "kept"
    again.pause()
    again.resume(timeout=100)
    assert 90 < again.get_info().end_at.timestamp() - time.time() < 101
    assert again.files.read("/dev/shm/x") == "kept"
    with pytest.raises(ApiError, match="is running"):
        again.resume()
    for timeout in [0, -2]:
        with pytest.raises(ApiError, match="invalid timeout"):
            Sandbox.connect(cube.sandbox_id, timeout=timeout)
    with pytest.raises(ApiError, match="invalid timeout"):
        cube.set_timeout(-2)
    cube.set_timeout(0)
    eventually(lambda: cube.sandbox_id not in sandboxes())


def test_a_sandbox_that_rests_at_its_end_is_woken_by_traffic():
    with Sandbox.create("base", timeout=300, lifecycle={"on_timeout": "pause", "auto_resume": True}) as resting:
        resting.set_timeout(1)
        eventually(lambda: resting.get_info().state == "paused")
        assert resting.commands.run("echo awake").stdout == "awake\n"
        assert resting.get_info().state == "running"


def test_networks_are_changed_only_to_what_they_are(shared):
    shared.update_network()
    shared.update_network({"allow_internet_access": True})
    for network in [
        {"allow_internet_access": False},
        {"deny_out": ["0.0.0.0/0"]},
        {"deny_out": ["1.1.1.1/32"]},
        {"rules": {"api.example.org": [{"transform": {"headers": {"K": "V"}}}]}},
    ]:
        with pytest.raises(ApiError) as refused:
            shared.update_network(network)
        assert refused.value.status_code == 501 and str(refused.value)
    assert shared.get_info()["allowInternetAccess"] is True


def test_what_is_missing_is_reported_as_missing():
    gone = missing()
    for refused in [
        gone.get_info,
        gone.pause,
        gone.resume,
        gone.kill,
        gone.update_network,
        gone.create_snapshot,
        lambda: gone.set_timeout(10),
        lambda: gone.rollback("snap-000000000000000000000000"),
        lambda: Sandbox.connect(MISSING),
    ]:
        with pytest.raises(SandboxNotFoundError, match=MISSING):
            refused()
    with pytest.raises(TemplateNotFoundError, match="no-such"):
        Sandbox.create("no-such")
