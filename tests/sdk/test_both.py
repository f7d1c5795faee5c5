"""What E2B's Python client can do, by both of its flavours: one text, run by the synchronous and the asynchronous one."""

import io
import os
import time

import pytest
import requests
from e2b import (
    AuthenticationException,
    CommandExitException,
    FileNotFoundException,
    FileType,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    SandboxException,
    SandboxNotFoundException,
    SandboxQuery,
    SandboxState,
    SecretException,
)

from conftest import Loop, Running, eventually, plain

MISSING = "0123456789abcdef"


@pytest.fixture
def own(client):
    """Makes sandboxes for one test."""
    made = []

    def make(*arguments, **options):
        options.setdefault("timeout", 300)
        made.append(client.Sandbox.create(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.kill()


def end_of(command, **options):
    """The result of a command, also of one that fails."""
    try:
        return command.wait(**options)
    except CommandExitException as failed:
        return failed


def stream_input(client, channel, pid, pieces):
    """Sends input on one stream, in the way of each flavour."""
    if not client.is_async:
        return channel.stream_input(pid, pieces)
    stream = channel.stream_input(pid)
    for piece in pieces:
        stream.send(piece)
    stream.close()


def test_input_reaches_commands(client, box):
    commands = box.commands
    command = commands.run("cat; echo end", background=True, stdin=True)
    command.send_stdin("by its handle, ")
    commands.send_stdin(command.pid, b"as bytes, ")
    stream_input(client, commands, command.pid, ["in a ", b"stream\n"])
    command.close_stdin()
    assert command.wait().stdout == "by its handle, as bytes, in a stream\nend\n"
    other = commands.run("wc -c", background=True, stdin=True)
    stream_input(client, commands, other.pid, ["x" * 100_000] * 5)
    commands.close_stdin(other.pid)
    assert other.wait().stdout == "500000\n"


def test_input_that_nothing_reads_is_refused(client, box):
    commands = box.commands
    deaf = commands.run("sleep 600", background=True)
    with pytest.raises(SandboxException):
        commands.send_stdin(deaf.pid, "x")
    for refused in [
        lambda: commands.send_stdin(999_999, "x"),
        lambda: commands.close_stdin(999_999),
        lambda: stream_input(client, commands, 999_999, ["x"]),
        lambda: box.pty.send_stdin(999_999, b"x"),
        lambda: box.pty.resize(999_999, PtySize(rows=1, cols=1)),
    ]:
        with pytest.raises(NotFoundException, match="999999"):
            refused()
    # It had no input, and continues without.
    assert deaf.kill() is True
    assert end_of(deaf).exit_code == -1
    assert deaf.kill() is False


def test_a_handle_is_left_and_taken_up_again(box):
    begun = box.commands.run("read line; echo out $line; echo err >&2; exit 3", background=True, stdin=True)
    listed = {process.pid: process for process in box.commands.list()}
    assert listed[begun.pid].cmd == "/bin/bash" and "read line" in listed[begun.pid].args[-1]
    begun.disconnect()
    joined = box.commands.connect(begun.pid)
    joined.send_stdin("typed\n")
    ended = end_of(joined)
    assert (ended.stdout, ended.stderr, ended.exit_code) == ("out typed\n", "err\n", 3)
    lines = []
    done = box.commands.run("echo seen; echo too >&2", on_stdout=lines.append, on_stderr=lines.append, retain_output=False)
    assert (done.stdout, sorted(lines)) == (None, ["seen\n", "too\n"])
    killed = box.commands.run("sleep 600", background=True)
    assert killed.kill() is True
    assert end_of(killed).exit_code == -1
    with pytest.raises(NotFoundException):
        box.commands.connect(999_999)


class Terminal:
    """A terminal of either flavour, and what it has shown."""

    def __init__(self, client, open):
        self.shown = b""
        self.is_async = client.is_async
        self.handle = open(on_data=self.show) if client.is_async else open()
        self.pid = self.handle.pid

    def show(self, piece):
        self.shown += piece

    def wait(self):
        return end_of(self.handle) if self.is_async else end_of(self.handle, on_pty=self.show)


def test_terminals_are_made_left_joined_and_ended(client, box):
    pty = box.pty
    size = PtySize(rows=24, cols=80)
    make = lambda **options: pty.create(size, cwd="/tmp", envs={"MINE": "variable"}, user="root", **options)
    begun = Terminal(client, make)
    begun.handle.disconnect()
    joined = Terminal(client, lambda **options: pty.connect(begun.pid, **options))
    pty.resize(begun.pid, PtySize(rows=31, cols=97))
    pty.send_stdin(begun.pid, b"stty size; pwd; ")
    stream_input(client, pty, begun.pid, ["echo $MI", b"NE; whoami; exit 5\n"])
    assert joined.wait().exit_code == 5
    for shown in [b"31 97", b"/tmp", b"variable", b"root"]:
        assert shown in joined.shown
    other = Terminal(client, lambda **options: pty.create(size, **options))
    assert pty.kill(other.pid) is True
    assert other.wait().exit_code != 0
    assert pty.kill(other.pid) is False


def whole(client, files, path):
    """A file that is read as a stream, in the way of each flavour."""
    if not client.is_async:
        return b"".join(files.read(path, format="stream"))

    async def joined():
        return b"".join([piece async for piece in await plain(files).read(path, format="stream")])

    return Loop.run(joined)


def test_files_are_written_in_every_way(client, box):
    files = box.files
    content = os.urandom(300_000)
    written = files.write("ways/gzip", content, gzip=True, metadata={"Source": "a test", "n": "1"})
    assert (written.path, written.metadata) == ("/home/user/ways/gzip", {"source": "a test", "n": "1"})
    assert files.get_info("ways/gzip").metadata == {"source": "a test", "n": "1"}
    assert bytes(files.read("ways/gzip", format="bytes", gzip=True)) == content
    assert whole(client, files, "ways/gzip") == content
    files.write("ways/octets", content, use_octet_stream=True)
    files.write("/home/user/ways/stream", io.BytesIO(content), user="root")
    assert files.read("ways/octets", format="bytes") == files.read("ways/stream", format="bytes") == content
    assert (files.get_info("ways/octets").owner, files.get_info("ways/stream").owner) == ("user", "root")
    # A new content has new metadata, and none if none are given.
    files.write("ways/gzip", "plain")
    assert files.read("ways/gzip") == "plain" and not files.get_info("ways/gzip").metadata
    several = [{"path": "ways/ä/1", "data": "one"}, {"path": "ways/ä/2", "data": b"two"}]
    for gzip in [False, True]:
        made = files.write_files(several, gzip=gzip, metadata={"of": "both"})
        assert [one.metadata for one in made] == [{"of": "both"}] * 2
    assert [files.read(one["path"]) for one in several] == ["one", "two"]
    with pytest.raises(InvalidArgumentException):
        files.write("ways/refused", "x", metadata={"no header": "x"})
    with pytest.raises(AuthenticationException, match="invalid username: 'nobody-here'"):
        files.write("ways/refused", "x", user="nobody-here")
    assert not files.exists("ways/refused")


def test_directories_are_made_listed_moved_and_removed(box):
    files = box.files
    assert files.make_dir("place/sub") is True and files.make_dir("place/sub") is False
    files.write("place/file", "12345")
    assert {(entry.name, entry.type) for entry in files.list("place")} == {("sub", FileType.DIR), ("file", FileType.FILE)}
    info = files.get_info("place/file")
    assert (info.size, info.permissions, info.owner, info.path) == (5, "-rw-r--r--", "user", "/home/user/place/file")
    assert files.rename("place/file", "place/sub/moved").path == "/home/user/place/sub/moved"
    assert [entry.path for entry in files.list("place", depth=2)][-1] == "/home/user/place/sub/moved"
    files.remove("place")
    assert not files.exists("place")
    for refused in [files.read, files.list, files.get_info, lambda path: files.rename(path, "other")]:
        with pytest.raises(FileNotFoundException):
            refused("place")


class Watch:
    """A watch of either flavour, and its events."""

    def __init__(self, client, box, path, **options):
        self.seen = []
        if client.is_async:
            self.handle = box.files.watch_dir(path, on_event=self.seen.append, timeout=0, **options)
            self.events = lambda: self.seen
        else:
            self.handle = box.files.watch_dir(path, **options)
            self.events = self.polled

    def polled(self):
        self.seen += self.handle.get_new_events()
        return self.seen

    def has(self, kind, name):
        return [event for event in self.events() if (event.type.value, event.name) == (kind, name)]


def test_watches_tell_what_happens(client, box):
    box.files.make_dir("watched")
    watch = Watch(client, box, "watched", recursive=True, include_entry=True)
    box.files.write("watched/new/file", "1")
    event = eventually(lambda: watch.has("create", "new/file"))[0]
    assert event.entry.path == "/home/user/watched/new/file"
    box.files.rename("watched/new/file", "watched/moved")
    eventually(lambda: watch.has("rename", "new/file") and watch.has("create", "moved"))
    watch.handle.stop()
    with pytest.raises(FileNotFoundException):
        Watch(client, box, "not-there")


def test_a_watch_survives_a_pause(client, own):
    made = own()
    made.files.make_dir("watched")
    watch = Watch(client, made, "watched")
    made.files.write("watched/before", "1")
    made.pause()
    made.connect(timeout=300)
    made.files.write("watched/after", "1")
    eventually(lambda: watch.has("create", "before") and watch.has("create", "after"))
    watch.handle.stop()


def test_addresses_of_files_and_ports(box):
    url = box.upload_url("by-url", user="root", use_signature_expiration=60)
    assert requests.post(url, files={"file": b"uploaded"}).status_code == 200
    assert box.files.get_info("/root/by-url").owner == "root"
    url = box.download_url("by-url", user="root", use_signature_expiration=60)
    assert requests.get(url).text == "uploaded"
    assert requests.get(url.replace("username=root", "username=user")).status_code == 401
    name, domain = box.get_host(8456).split(".", 1)
    assert (name, domain.split(":")) == (f"8456-{box.sandbox_id}", ["localhost", Running.server.address.split(":")[1]])
    closed = requests.get(Running.server.url, headers={"Host": box.get_host(8456)}).json()
    assert (closed["sandboxId"], closed["port"], closed["code"]) == (box.sandbox_id, 8456, 502)
    assert box.get_mcp_url() == f"https://{box.get_host(50005)}/mcp"
    with pytest.raises(FileNotFoundException):
        box.get_mcp_token()


def test_a_sandbox_is_known_and_lives_as_long_as_asked(client, box):
    info = box.get_info()
    assert (info.sandbox_id, info.template_id, info.metadata) == (box.sandbox_id, "base", {"made": "for both"})
    assert client.Sandbox.get_info(box.sandbox_id).started_at == info.started_at
    box.set_timeout(1000)
    client.Sandbox.set_timeout(box.sandbox_id, 900)
    assert 880 < box.get_info().end_at.timestamp() - time.time() < 905
    assert box.is_running()
    samples = eventually(lambda: box.get_metrics())
    assert 0 < samples[-1].mem_used < samples[-1].mem_total
    assert client.Sandbox.get_metrics(box.sandbox_id, start=samples[0].timestamp)[0].timestamp == samples[0].timestamp
    again = client.Sandbox.connect(box.sandbox_id)
    assert again.commands.run("echo $FOO").stdout == "from create\n"


def test_a_sandbox_rests_in_every_way(client, own):
    made = own()
    boot = lambda: made.commands.run("cat /proc/sys/kernel/random/boot_id").stdout
    made.files.write("/dev/shm/memory", "kept")
    made.files.write("disk", "kept")
    first = boot()
    assert made.pause(strict=True) is True
    assert made.pause() is False
    assert made.get_info().state == SandboxState.PAUSED and not made.is_running()
    assert client.Sandbox.connect(made.sandbox_id, timeout=300).files.read("/dev/shm/memory") == "kept"
    assert made.beta_pause() is True
    made.connect(timeout=300)
    assert boot() == first
    assert made.pause(mode="filesystem") is True
    assert made.get_info().state == SandboxState.PAUSED
    made.connect(timeout=300)
    assert boot() != first
    assert made.files.read("disk") == "kept" and not made.files.exists("/dev/shm/memory")


def test_a_sandbox_is_copied_and_saved(client, own):
    made = own(metadata={"copied": "yes"})
    made.files.write("state", "first")
    named = made.create_snapshot(name="both-named")
    of_disk = made.create_snapshot(mode="filesystem")
    made.files.write("state", "second")
    copies = made.fork(count=2, timeout=300)
    try:
        assert [copy.files.read("state") for copy in copies] == ["second"] * 2
        assert [copy.get_info().metadata for copy in copies] == [{"copied": "yes"}] * 2
        pages = made.list_snapshots(limit=1)
        ids = [pages.next_items()[0].snapshot_id, pages.next_items()[0].snapshot_id]
        assert ids == [of_disk.snapshot_id, named.snapshot_id] and not pages.has_next
        found = client.Sandbox.list_snapshots(name="both-named").next_items()
        assert [one.snapshot_id for one in found] == [named.snapshot_id]
        assert [own(one).files.read("state") for one in ids] == ["first"] * 2
    finally:
        assert [copy.kill() for copy in copies] == [True] * 2
        assert [client.Sandbox.delete_snapshot(one.snapshot_id) for one in [named, of_disk, of_disk]] == [True, True, False]


def test_sandboxes_are_found(client, own, box):
    made = [own(metadata={"found": str(client.is_async)}) for _ in range(3)]
    ids = [one.sandbox_id for one in made]
    mine = SandboxQuery(metadata=made[0].get_info().metadata)
    made[1].pause()

    def found(order=None, **query):
        pages = client.Sandbox.list(query=SandboxQuery(metadata=mine.metadata, **query), limit=2, order=order)
        return [one.sandbox_id for one in all_of(pages)]

    assert found() == found(order="desc") == ids[::-1]
    assert found(order="asc") == ids
    assert found(state=[SandboxState.RUNNING]) == [ids[2], ids[0]]
    assert found(state=[SandboxState.PAUSED, SandboxState.RUNNING]) == ids[::-1]
    begun = made[1].get_info().started_at
    assert found(started_after=begun, order="asc") == ids[1:]
    assert found(template="base", order="asc") == ids
    assert found(template="code-interpreter-v1") == []
    # What a page has shown stays shown: a sandbox that ends meanwhile moves no other one out of the next page.
    pages = client.Sandbox.list(query=mine, limit=1, order="asc")
    shown = pages.next_items()
    made[0].kill()
    shown += all_of(pages)
    assert [one.sandbox_id for one in shown] == ids


def all_of(pages):
    listed = []
    while pages.has_next:
        listed += pages.next_items()
    return listed


def test_what_is_missing_is_reported_as_missing(client):
    missing = client.Sandbox
    assert missing.kill(MISSING) is False
    assert missing.delete_snapshot("no-such-snapshot") is False
    for refused in [
        lambda: missing.connect(MISSING),
        lambda: missing.get_info(MISSING),
        lambda: missing.get_metrics(MISSING),
        lambda: missing.set_timeout(MISSING, 10),
        lambda: missing.pause(MISSING),
        lambda: missing.fork(MISSING),
        lambda: missing.create_snapshot(MISSING),
        lambda: missing.update_network(MISSING, {}),
    ]:
        with pytest.raises(SandboxNotFoundException):
            refused()


def test_networks_are_changed_only_to_what_they_are(client, own, box):
    isolated = own(allow_internet_access=False)
    box.update_network({})
    box.update_network({"allow_internet_access": True})
    isolated.update_network({"allow_internet_access": False})
    isolated.update_network({"deny_out": ["0.0.0.0/0"]})
    for sandbox, network in [
        (box, {"allow_internet_access": False}),
        (box, {"deny_out": ["0.0.0.0/0"]}),
        (box, {"deny_out": ["8.8.8.8"]}),
        (box, {"allow_out": ["example.org"], "deny_out": ["0.0.0.0/0"]}),
        (isolated, {"allow_internet_access": True}),
    ]:
        with pytest.raises(SandboxException, match="501: .*network|501: .*traffic"):
            sandbox.update_network(network)
    assert box.get_info().allow_internet_access is True
    assert isolated.get_info().allow_internet_access is False


def test_secrets_and_identities_are_refused_clearly(client):
    secret = client.Secret
    for refused in [
        lambda: secret.create("name", "value"),
        lambda: secret.update("name", "value"),
        lambda: secret.get_info("name"),
        lambda: secret.exists("name"),
        lambda: secret.destroy("name"),
        lambda: secret.list().next_items(),
    ]:
        with pytest.raises(SecretException, match="501: .*(?i:secret)"):
            refused()
    token = secret.iam_token(audience="a", token_type="JWT-SVID")
    with pytest.raises(SandboxException, match="501: workload identity is not implemented"):
        client.Sandbox.create(iam={"tokens": {"t": token}})
    with pytest.raises(SandboxException, match='template "mcp-gateway" not found'):
        client.Sandbox.create(mcp={"duckduckgo": {}})
    assert secret.fill("name") == "${e2b.secrets.name}"
