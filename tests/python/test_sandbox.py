"""What a sandbox can do, with real guests. `test_sync.py` runs the same tests without `async`."""

import os
import pathlib
import shutil
import signal

import pytest

from sandtree import (
    ApplyConflict,
    CommandFailed,
    CommandNotFound,
    FileMissing,
    Host,
    Invalid,
    LinkEnded,
    Mount,
    NameTaken,
    NetworkMode,
    OutputLimit,
    Progress,
    Sandbox,
    SandboxNotFound,
    SandtreeError,
    StateNotFound,
    TagTaken,
    WrongState,
)

MISSING = "no-such-program-anywhere"


async def test_a_command_returns_its_output_and_exit_code():
    async with Sandbox("tiny", name="commands", env={"COLOUR": "red"}, workdir="/tmp") as sb:
        result = await sb.execute("echo out; echo err >&2; exit 3")
        assert (result.stdout, result.stderr, result.exit_code, result.ok) == ("out\n", "err\n", 3, False)
        with pytest.raises(CommandFailed, match="err"):
            result.check()
        assert (await sb.execute("printf %s $COLOUR; pwd")).stdout == "red/tmp\n"
        assert (await sb.execute("printf %s $COLOUR", env={"COLOUR": "blue"})).stdout == "blue"
        assert (await sb.execute("pwd", cwd="/srv")).stdout == "/srv\n"
        assert (await sb.execute("id -u", user="65534")).stdout == "65534\n"
        assert (await sb.execute("printf '\\377'")).stdout_bytes == b"\xff"
        killed = await sb.execute("kill -9 $$")
        assert (killed.exit_code, killed.signal) == (137, 9)
        late = await sb.execute("echo begun; sleep 600", timeout=3)
        assert (late.exit_code, late.timed_out, late.stdout) == (124, True, "begun\n")
        with pytest.raises(OutputLimit):
            await sb.execute("head -c 100000 /dev/zero", limit=1000)
        with pytest.raises(OutputLimit):
            await sb.execute("yes", limit=100_000, on_stdout=lambda text: None)
        longest = [line async for line in sb.exec("head", "-c", "3000000", "/dev/zero").lines()]
        assert sum(len(line) for line in longest) == 3_000_000 and len(longest) > 1
        with pytest.raises(CommandNotFound) as missing:
            await sb.exec(MISSING).wait()
        assert missing.value.arguments["command"] == MISSING


async def test_stdin_and_callbacks():
    async with Sandbox("tiny") as sb:
        assert (await sb.execute("cat", stdin="text\n")).stdout == "text\n"
        assert (await sb.execute("wc -c", stdin=b"\0" * 3_000_000)).stdout.strip() == "3000000"
        pieces, errors = [], []
        result = await sb.execute(
            "echo one; echo two >&2; cat", stdin="three", on_stdout=pieces.append, on_stderr=errors.append
        )
        assert "".join(pieces) == result.stdout == "one\nthree"
        assert "".join(errors) == result.stderr == "two\n"
        # A command that ends without reading its input is no error.
        assert (await sb.execute("true", stdin=b"x" * 3_000_000, on_stdout=pieces.append)).ok


async def test_a_source_that_fails_ends_its_command():
    def source():
        yield b"begun"
        raise RuntimeError("the source is broken")

    async with Sandbox("tiny") as sb:
        with pytest.raises(RuntimeError, match="broken"):
            await sb.execute("cat", stdin=both(source()))
        assert (await sb.execute("cat", stdin=both(iter([b"a", b"b"])))).stdout == "ab"
        async with sb.exec("sleep", "600", stdin=b"x" * 5_000_000) as unread:
            pid = unread.pid
        gone = await sb.execute(f"for i in $(seq 100); do kill -0 {pid} 2>/dev/null || exit 0; sleep 0.1; done; exit 1")
        assert gone.ok


async def both(source):
    """An iterable of the flavour that is tested."""
    for piece in source:
        yield piece


async def test_a_command_streams_and_obeys():
    async with Sandbox("tiny") as sb:
        seen = [(line.stream, str(line)) async for line in sb.exec("sh", "-c", "printf 'a\\nb'; printf 'c\\n' >&2").lines()]
        assert sorted(seen) == [("stderr", "c"), ("stdout", "a"), ("stdout", "b")]

        async with sb.exec("cat", stdin=True) as cat:
            assert cat.pid > 1
            await cat.write("hello ")
            await cat.write(b"world")
            await cat.close_stdin()
            assert (await cat.wait()).stdout == "hello world"

        async with sb.exec("sleep", "600") as sleeping:
            assert sleeping.signal("TERM")
            assert (await sleeping.wait()).signal == signal.SIGTERM

        async with sb.exec("sh", "-c", "stty size; read line; stty size", tty=(30, 100), stdin=True) as shell:
            sizes = []
            async for line in shell.lines():
                sizes.append(line)
                if sizes == ["30 100"]:
                    shell.resize(40, 120)
                    await shell.write("go\n")
            assert sizes[-1] == "40 120"
        # A terminal ends its lines by "\r\n".
        assert [line async for line in sb.exec("printf", "a\\nb\\n\\nc", tty=True).lines()] == ["a", "b", "", "c"]

        # A command without a reader gets signals, too.
        async with sb.exec("yes") as unread:
            await sb.execute("sleep 1")
            assert unread.kill()
            gone = await sb.execute(f"for i in $(seq 100); do kill -0 {unread.pid} 2>/dev/null || exit 0; sleep 0.1; done; exit 1")
            assert gone.ok
            with pytest.raises(Invalid):
                unread.signal("NOTHING")

        # A reader that stops continues with the next line.
        counting = sb.exec("seq", "4")
        async for line in counting.lines():
            break
        assert [str(line) async for line in counting.lines()] == ["2", "3", "4"]

        async with sb.exec("sleep", "600") as abandoned:
            pid = abandoned.pid
        with pytest.raises(WrongState, match="closed"):
            await abandoned.wait()
        gone = await sb.execute(f"for i in $(seq 100); do kill -0 {pid} 2>/dev/null || exit 0; sleep 0.1; done; exit 1")
        assert gone.ok


async def test_a_detached_command_is_found_again():
    async with Sandbox("tiny") as sb:
        command = sb.exec("sh", "-c", "echo begun; cat /tmp/go 2>/dev/null; until test -e /tmp/go; do sleep 0.1; done; echo ended", detach=True)
        identity = (await command.start()).id
        del command
        assert [each.id for each in await sb.commands()] == [identity]
        await sb.files.write("/tmp/go", "")
        result = await sb.command(identity).wait()
        assert (result.stdout, result.exit_code) == ("begun\nended\n", 0)


async def test_files_of_the_guest(scratch):
    async with Sandbox("tiny") as sb:
        files = sb.files
        assert await files.write("/srv/a", "text", mode=0o600, uid=7, gid=8) == 4
        assert await files.read("/srv/a") == b"text"
        assert await files.read_text("/srv/a") == "text"
        info = await files.stat("/srv/a")
        assert (info.name, info.kind, info.mode, info.uid, info.gid, info.size) == ("a", "file", 0o600, 7, 8, 4)
        await files.mkdir("/srv/d/e")
        await files.rename("/srv/a", "/srv/d/b")
        # A name that is not UTF-8.
        await files.write(b"/srv/d/\xff", b"1")
        names = [entry.name for entry in await files.list("/srv/d")]
        assert names == ["b", "e", os.fsdecode(b"\xff")]
        await files.remove(b"/srv/d/\xff")
        assert not await files.exists(b"/srv/d/\xff")
        with pytest.raises(FileMissing):
            await files.read("/srv/nothing")
        with pytest.raises(FileNotFoundError):
            await files.list("/srv/nothing")

        tree = scratch / "tree"
        (tree / "inner").mkdir(parents=True)
        (tree / "inner/x").write_bytes(b"x" * 100_000)
        await files.upload(tree, "/srv/tree")
        assert (await sb.execute("wc -c < /srv/tree/inner/x")).stdout.strip() == "100000"
        transfer = await files.download("/srv/tree", scratch / "back")
        assert (scratch / "back/inner/x").read_bytes() == b"x" * 100_000
        assert not transfer.skipped


async def test_states_branch_and_return():
    async with Sandbox("tiny", name="states") as sb:
        await sb.execute("echo 1 > /srv/n; sleep 600 & echo $! > /srv/pid")
        taken = await sb.checkpoint("one")
        assert (taken.tag, taken.mode) == ("one", "write-protect")
        with pytest.raises(TagTaken):
            await sb.checkpoint("one")
        await sb.execute("echo 2 > /srv/n; kill $(cat /srv/pid)")
        assert "/srv/n" in [change.path for change in (await sb.diff("one")).changes]
        reverted = await sb.revert("one")
        assert reverted.tag == "one" and reverted.left
        assert (await sb.execute("cat /srv/n; kill -0 $(cat /srv/pid) && echo alive")).stdout == "1\nalive\n"
        await sb.undo()
        assert (await sb.execute("cat /srv/n")).stdout == "2\n"
        await sb.redo()
        assert (await sb.execute("cat /srv/n")).stdout == "1\n"
        tree = await sb.states()
        assert tree.current is not None and "one" in tree and tree["one"].kind == "checkpoint"
        assert str(tree).startswith("states\n└─ one")
        assert "<svg" in tree._repr_svg_() and "one" in tree._repr_svg_()
        with pytest.raises(StateNotFound) as missing:
            await sb.revert("two")
        assert missing.value.arguments == {"sandbox": "states", "state": "two"}
        assert missing.value.hint
        await sb.checkpoint("one", replace=True)
        newest = await sb.checkpoint()
        await sb.forget(keep=1)
        assert [state.tag for state in await sb.states() if state.kind == "checkpoint"] == [newest.tag]
        with pytest.raises(TypeError):
            await sb.forget()
        assert newest.id in (await sb.forget(all=True)).states
        assert len(await sb.states()) == 0


async def test_forks_are_copies_of_one_moment():
    async with Sandbox("tiny", name="source") as sb:
        await sb.execute("echo 6 > /srv/n")
        copies, report = await sb.fork_with_report(3, name="try")
        try:
            assert [copy.name for copy in copies] == ["try-1", "try-2", "try-3"]
            assert report.pause_ms < report.total_ms
            for number, copy in enumerate(copies):
                await copy.execute(f"echo {number} > /srv/n")
            read = [(await copy.execute("cat /srv/n; hostname")).stdout for copy in copies]
            assert read == ["0\ntry-1\n", "1\ntry-2\n", "2\ntry-3\n"]
            assert (await sb.execute("cat /srv/n")).stdout == "6\n"
            with pytest.raises(NameTaken):
                await sb.fork(1, name="try")
        finally:
            for copy in copies:
                await copy.close()
        with pytest.raises(Invalid):
            await sb.fork(0)


async def test_a_sandbox_rests_and_continues():
    async with Sandbox("tiny") as sb:
        await sb.execute("echo kept > /tmp/memory; echo kept > /srv/disk; sync")
        paused = await sb.pause()
        assert paused.total_ms > 0
        assert (await sb.info()).state == "paused"
        with pytest.raises(WrongState) as refused:
            await sb.execute("true")
        assert refused.value.arguments["phase"] == "paused" and "resume" in str(refused.value)
        await sb.resume()
        assert (await sb.execute("cat /tmp/memory")).stdout == "kept\n"
        await sb.stop()
        assert (await sb.info()).state == "stopped"
        await sb.start()
        assert (await sb.execute("cat /srv/disk")).stdout == "kept\n"
        await sb.kill()
        assert (await sb.info()).state == "stopped"
        await sb.start()
        assert (await sb.execute("true")).ok
        # A guest that powers itself off can be started, too.
        try:
            await sb.execute("poweroff; sleep 60")
        except LinkEnded:
            pass
        async for state in sb.watch():
            if state.phase == "stopped":
                break
        await sb.start()
        assert (await sb.execute("true")).ok


async def test_snapshots_save_move_and_start(scratch):
    host = Host()
    async with Sandbox("tiny") as sb:
        await sb.execute("echo disk > /srv/d; echo memory > /tmp/m; sync")
        saved = await sb.save("py-disk", labels={"made": "by-a-test"})
        assert saved.name == "py-disk" and not saved.memory
        with pytest.raises(NameTaken):
            await sb.save("py-disk")
        await sb.save("py-disk", replace=True)
        live = await sb.save("py-live", memory=True)
        assert live.memory
        await sb.save("local", workspace=scratch)
        exported = await sb.export(scratch / "py.tar.zst", memory=True)
        assert exported.file_bytes == (scratch / "py.tar.zst").stat().st_size
    try:
        assert {"py-disk", "py-live"} <= {name for each in await host.snapshots() for name in each.names}
        async with Sandbox(snapshot="py-live") as again:
            assert (await again.execute("cat /tmp/m")).stdout == "memory\n"
        async with Sandbox("local", workspace=scratch) as again:
            assert (await again.execute("cat /srv/d")).stdout == "disk\n"
        imported = await host.import_(scratch / "py.tar.zst", "py-moved")
        assert imported.memory
        assert (await host.verify("py-moved")).whole
        async with Sandbox("py-moved", host=host) as again:
            assert (await again.execute("cat /tmp/m")).stdout == "memory\n"
    finally:
        for name in ("py-disk", "py-live", "py-moved"):
            await host.remove_snapshot(name)


async def test_a_sandbox_is_saved_when_it_ends():
    host = Host()
    sb = await Sandbox("tiny", save="py-end").start()
    await sb.execute("echo end > /srv/e")
    digest = await sb.close()
    try:
        assert digest
        async with Sandbox("py-end") as again:
            assert (await again.execute("cat /srv/e")).stdout == "end\n"
    finally:
        await host.remove_snapshot("py-end")


async def test_a_save_that_fails_at_the_end_is_reported(scratch):
    workspace = scratch / "workspace"
    sb = await Sandbox("tiny", name="unsaved", save="end", workspace=workspace).start()
    shutil.rmtree(workspace)
    with pytest.raises(SandtreeError) as failed:
        await sb.close()
    assert failed.value.code == "not_saved"
    # Nothing else holds its data.
    kept = await Sandbox.attach("unsaved")
    assert (await kept.info()).save_failed
    await kept.remove()


async def test_a_sandbox_with_rm_is_gone_when_it_stops():
    sb = await Sandbox("tiny", name="short", rm=True).start()
    await sb.stop()
    with pytest.raises(SandboxNotFound):
        await Sandbox.attach("short")
    await sb.close()


async def test_detached_sandboxes_are_found_by_name():
    sb = await Sandbox("tiny", name="alone").start()
    assert sb.is_owned
    await sb.detach()
    assert not sb.is_owned
    await sb.close()
    found = await Sandbox.attach("alone")
    assert (await found.execute("echo here")).stdout == "here\n"
    assert [each.name for each in await Host().list()] == ["alone"]
    # A sandbox without an owner stays when its handle is closed.
    async with await Host().sandbox("alone") as same:
        await same.execute("true")
    assert (await found.info()).state == "running"
    await found.remove()
    with pytest.raises(SandboxNotFound):
        await Sandbox.attach("alone")


async def test_a_sandbox_at_rest_can_be_detached():
    sb = await Sandbox("tiny", name="resting").start()
    await sb.execute("echo kept > /tmp/memory")
    await sb.pause()
    await sb.detach()
    await sb.close()
    found = await Sandbox.attach("resting")
    assert (await found.info()).state == "paused"
    await found.resume()
    assert (await found.execute("cat /tmp/memory")).stdout == "kept\n"
    await found.remove()


async def test_directories_of_the_host(scratch):
    shared = scratch / "shared"
    shared.mkdir()
    (shared / "f").write_text("host\n")
    async with Sandbox("tiny", mounts=[Mount(shared, "/work"), f"{shared}:/copy:cow"]) as sb:
        assert (await sb.execute("cat /work/f; echo guest > /work/g")).stdout == "host\n"
        assert (shared / "g").read_text() == "guest\n"
        await sb.execute("echo changed > /copy/f")
        changes = await sb.changes("/copy")
        assert [(each.path, each.change) for each in changes.changes] == [("/f", "changed")]
        assert "+changed" in await sb.patch("/copy")
        (shared / "f").write_text("host again\n")
        with pytest.raises(ApplyConflict):
            await sb.apply("/copy")
        await sb.apply("/copy", force=True)
        assert (shared / "f").read_text() == "changed\n"
        handle = await sb.mount(shared, "/more", readonly=True)
        assert not (await sb.execute("touch /more/x")).ok
        await sb.unmount(handle)
        assert {mount.guest for mount in (await sb.info()).mounts} == {"/work", "/copy"}


async def test_ports_of_the_guest():
    import urllib.request

    serve = "while true; do printf 'HTTP/1.0 200 OK\\r\\n\\r\\nhello' | nc -l -p 8080; done"
    async with Sandbox("tiny", publish=[8080], network=NetworkMode.ISOLATED) as sb:
        published = (await sb.info()).ports[0]
        assert published.guest == 8080 and published.host > 0
        await sb.exec("sh", "-c", serve, detach=True).start()
        async with await sb.forward(8080) as forward:
            for port in (forward.port, published.host):
                for _ in range(200):
                    try:
                        with urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=5) as answer:
                            assert answer.read() == b"hello"
                        break
                    except OSError:
                        await sb.execute("sleep 0.1")
                else:
                    pytest.fail("the port never answered")


async def test_options_are_checked_before_anything_starts():
    with pytest.raises(TypeError, match="did you mean 'memory'"):
        Sandbox("tiny", memry="1G")
    with pytest.raises(TypeError, match="image or a snapshot"):
        Sandbox()
    with pytest.raises(Invalid, match="512M or 2G"):
        Sandbox("tiny", memory="a lot")
    with pytest.raises(ValueError):
        Sandbox("tiny", network="partly")
    with pytest.raises(Invalid):
        async with Sandbox("tiny", cpus=0):
            pass
    sb = Sandbox("tiny", memory="128M", cpus=2)
    with pytest.raises(WrongState, match="not started"):
        await sb.execute("true")
    async with sb:
        info = await sb.info()
        assert (info.memory_bytes, info.cpus) == (128 << 20, 2)
    with pytest.raises(WrongState, match="closed"):
        await sb.execute("true")


async def test_a_sandbox_expires():
    with pytest.raises(Invalid, match="remove, pause or stop"):
        Sandbox("tiny", expire_after=1, on_expiry="vanish")
    async with Sandbox("tiny", expire_after=2, on_expiry="pause") as sb:
        assert (await sb.info()).expires_at
        async for state in sb.watch():
            if state.phase == "paused":
                break
        await sb.resume()


async def test_progress_is_reported(scratch):
    steps = []
    async with Sandbox("tiny") as sb:
        await sb.save("py-progress", progress=steps.append)
    host = Host()
    try:
        await host.export("py-progress", scratch / "x.tar.zst", progress=steps.append)
        assert all(isinstance(step, Progress) for step in steps)
        last = [step for step in steps if step.stage == "exporting"][-1]
        assert last.total_bytes and last.done_bytes <= last.total_bytes
    finally:
        await host.remove_snapshot("py-progress")


async def test_an_image_is_imported_with_its_own_init(scratch):
    host = Host()
    async with Sandbox("tiny") as sb:
        root = "$(ls -A / | grep -vE '^(proc|sys|dev|run|tmp|srv|mnt|lost.found)$')"
        (await sb.execute(f"tar -C / -cf /srv/root.tar {root}")).check()
        await sb.files.download("/srv/root.tar", scratch / "root.tar")
        tiny = await host.image("tiny")
    kernel = pathlib.Path(os.environ["SANDTREE_HOME"], "kernels", tiny.kernel)
    with pytest.raises(Invalid):
        await host.import_image(scratch / "root.tar", init="systemd")
    with pytest.raises(TypeError, match="modules= means nothing"):
        await host.import_image(scratch / "root.tar", kernel="full", modules=kernel / "modules")
    # Not a directory of modules as the kernel's build makes it.
    with pytest.raises(FileMissing, match="modules.builtin"):
        await host.import_image(scratch / "root.tar", kernel=kernel / "kernel", modules=kernel / "modules")
    image = await host.import_image(
        scratch / "root.tar", name="py-own", kernel="cloud", init="image", disk="1G"
    )
    try:
        assert (image.kernel, image.disk_bytes) == (tiny.kernel, 1 << 30)
        async with Sandbox("py-own") as sb:
            assert (await sb.execute("tr -d '\\0' < /proc/1/cmdline")).stdout == "init"
    finally:
        await host.remove_image("py-own")


async def test_a_host_describes_itself():
    host = Host()
    doctor = await host.doctor()
    assert "qemu" in doctor
    assert "tiny" in {name for image in await host.images() for name in image.names}
    assert (await host.image("tiny")).disk_bytes_used > 0
    assert (await host.gc(dry_run=True)).bytes >= 0
    assert await host.usage() and await host.tree()
