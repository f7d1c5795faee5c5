"""Sandboxes: life, lists, snapshots, forks, by E2B's Python client."""

import json

import pytest
from e2b import (
    AuthenticationException,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxQuery,
    SandboxState,
)

from conftest import eventually, sandboxes, sandtree


def test_what_is_known_of_a_sandbox(sandbox):
    info = sandbox.get_info()
    assert info.sandbox_id == sandbox.sandbox_id
    assert info.template_id == "base"
    assert info.metadata == {"made": "for a module"}
    assert info.state == SandboxState.RUNNING
    assert (info.cpu_count, info.memory_mb) == (1, 512)
    assert sandbox.is_running()
    sandbox.set_timeout(1000)
    assert 900 < (sandbox.get_info().end_at - info.started_at).total_seconds() < 2000
    sample = sandbox.get_metrics()[0]
    assert 0 < sample.mem_used < sample.mem_total
    past = sandbox.get_metrics(start=info.started_at.replace(year=2000), end=info.started_at.replace(year=2001))
    assert past == []


def test_lists_are_filtered_and_paged(own):
    made = [own(metadata={"test": "lists & more", "number": str(number)}) for number in range(3)]
    ids = [one.sandbox_id for one in made]
    query = SandboxQuery(metadata={"test": "lists & more"})
    pages = Sandbox.list(query=query, limit=2)
    first = [one.sandbox_id for one in pages.next_items()]
    assert pages.has_next
    second = [one.sandbox_id for one in pages.next_items()]
    assert not pages.has_next
    assert first + second == ids[::-1]
    one = Sandbox.list(query=SandboxQuery(metadata={"test": "lists & more", "number": "1"})).next_items()
    assert [info.sandbox_id for info in one] == [ids[1]]
    made[0].pause()
    paused = Sandbox.list(query=SandboxQuery(metadata=query.metadata, state=[SandboxState.PAUSED]))
    assert [info.sandbox_id for info in paused.next_items()] == [ids[0]]


def test_killed_once(own):
    made = own()
    assert made.kill() is True
    assert made.kill() is False
    assert not made.is_running()
    assert made.sandbox_id not in sandboxes()
    with pytest.raises(SandboxNotFoundException):
        Sandbox.connect(made.sandbox_id)


def test_a_pause_keeps_memory_and_commands(own):
    made = own()
    made.files.write("/dev/shm/kept", "in memory")
    command = made.commands.run("sleep 600", background=True)
    made.pause()
    assert Sandbox.get_info(made.sandbox_id).state == SandboxState.PAUSED
    assert not made.is_running()
    again = Sandbox.connect(made.sandbox_id, timeout=120)
    assert again.files.read("/dev/shm/kept") == "in memory"
    assert command.pid in {process.pid for process in again.commands.list()}
    # The token from before the pause is still valid.
    assert made.commands.run("echo still").stdout == "still\n"


def test_expiry_removes_or_pauses(own):
    short = own(timeout=3)
    pausing = own(timeout=600, lifecycle={"on_timeout": "pause"})
    pausing.files.write("kept", "on disk")
    pausing.set_timeout(2)
    eventually(lambda: short.sandbox_id not in sandboxes())
    eventually(lambda: Sandbox.get_info(pausing.sandbox_id).state == SandboxState.PAUSED)
    assert Sandbox.connect(pausing.sandbox_id, timeout=60).files.read("kept") == "on disk"


def test_connect_extends_and_never_shortens(own):
    made = own(timeout=300)
    end = made.get_info().end_at
    Sandbox.connect(made.sandbox_id, timeout=10)
    assert made.get_info().end_at == end
    Sandbox.connect(made.sandbox_id, timeout=3000)
    assert made.get_info().end_at > end


def test_snapshots(own):
    made = own(metadata={"inherited": "yes"})
    made.files.write("state", "before")
    snapshot = made.create_snapshot(name="sdk-test")
    made.files.write("state", "after")
    copy = own(snapshot.snapshot_id)
    assert copy.files.read("state") == "before"
    assert made.files.read("state") == "after"
    listed = Sandbox.list_snapshots(sandbox_id=made.sandbox_id).next_items()
    assert [one.snapshot_id for one in listed] == [snapshot.snapshot_id]
    assert Sandbox.delete_snapshot(snapshot.snapshot_id) is True
    assert Sandbox.delete_snapshot(snapshot.snapshot_id) is False
    assert copy.files.read("state") == "before"


def test_forks_have_their_own_files_and_the_same_past(own):
    made = own()
    made.files.write("past", "shared")
    copies = made.fork(count=2, timeout=60)
    assert len({copy.sandbox_id for copy in copies} | {made.sandbox_id}) == 3
    for number, copy in enumerate(copies):
        assert copy.files.read("past") == "shared"
        copy.files.write("own", str(number))
    assert [copy.files.read("own") for copy in copies] == ["0", "1"]
    assert not made.files.exists("own")
    for copy in copies:
        copy.kill()


def test_refusals_are_clear(server):
    with pytest.raises(AuthenticationException, match="invalid API key"):
        Sandbox.create(api_key="e2b_" + "0" * 40)
    with pytest.raises(SandboxException, match='template "no-such" not found'):
        Sandbox.create("no-such")
    with pytest.raises(SandboxException, match="filtering outgoing traffic is not implemented"):
        Sandbox.create(network={"deny_out": ["8.8.8.8"]})
    with pytest.raises(SandboxNotFoundException):
        Sandbox.get_info("0123456789abcdef")
    for strange in ["..", "a%2Fb", "x" * 500]:
        with pytest.raises(SandboxException):
            Sandbox.get_info(strange)


def test_the_command_line_and_the_server_share_sandboxes(own):
    made = own()
    sandtree("exec", made.sandbox_id, "--", "sh", "-c", "echo by hand > /tmp/shared")
    assert made.files.read("/tmp/shared") == "by hand\n"
    info = json.loads(sandtree("--json", "inspect", made.sandbox_id))
    assert info["labels"]["e2b/template"] == "base"
    sandtree("checkpoint", made.sandbox_id, "c")
    made.files.write("/tmp/shared", "changed")
    sandtree("revert", made.sandbox_id, "c")
    eventually(lambda: made.files.read("/tmp/shared") == "by hand\n")
    before = made.get_info().end_at
    sandtree("expire", made.sandbox_id, "2h")
    assert made.get_info().end_at > before
    by_hand = sandtree("run", "-d", "debian").strip()
    assert by_hand in {one.sandbox_id for one in Sandbox.list().next_items()}
    assert Sandbox.connect(by_hand).commands.run("echo reached").stdout == "reached\n"
    sandtree("rm", "-f", by_hand)


def test_the_network_is_off_if_asked(own):
    made = own(allow_internet_access=False)
    assert made.get_info().allow_internet_access is False
    assert made.commands.run("echo works").stdout == "works\n"
