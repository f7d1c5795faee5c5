"""A sandbox with a real guest: commands, users, states, mounts, lifecycle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quicksand import Mount, NetworkMode, Sandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_what_runs(sandbox: Sandbox) -> None:
    assert sandbox.is_running
    assert sandbox.accelerator is not None and sandbox.vnc_port is None
    assert sandbox.qemu_command is not None and "qemu" in sandbox.qemu_command[0]
    timing = sandbox.boot_timing
    assert timing is not None and timing.connect_agent_s > 0 and timing.console_log is not None
    with pytest.raises(RuntimeError, match="already running"):
        await sandbox.start()


async def test_execute(sandbox: Sandbox) -> None:
    result = await sandbox.execute("pwd; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code) == ("/\n", "err\n", 3)
    assert (await sandbox.execute("pwd", 30.0, "/tmp")).stdout == "/tmp\n"
    assert (await sandbox.execute("echo $0", shell="/bin/ash")).stdout == "/bin/ash\n"


async def test_failures_are_results(sandbox: Sandbox) -> None:
    late = await sandbox.execute("echo begun; sleep 60", timeout=0.5)
    assert late.exit_code == -1 and "timed out after 0.5 seconds" in late.stderr
    assert (await sandbox.execute("kill -9 $$")).exit_code == -1
    unknown = await sandbox.execute("true", user="nobody-here")
    assert (unknown.exit_code, unknown.stderr) == (-1, "No such user: nobody-here")
    assert (await sandbox.execute("true", user="0:0")).stderr == "No such user: 0:0"
    lost = await sandbox.execute("true", cwd="/none")
    assert lost.exit_code == -1 and "/none" in lost.stderr
    assert (await sandbox.execute("true", shell="/bin/none")).exit_code == -1


async def test_callbacks_get_the_output_as_it_is(sandbox: Sandbox) -> None:
    out: list[str] = []
    err: list[str] = []
    line = "printf begin; echo err >&2; printf end"
    result = await sandbox.execute(line, on_stdout=out.append, on_stderr=err.append)
    assert "".join(out) == result.stdout == "beginend"
    assert "".join(err) == result.stderr == "err\n"


async def test_an_exception_of_a_callback_ends_the_command(sandbox: Sandbox) -> None:
    def refuse(_: str) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError):
        await sandbox.execute("echo $$ >/tmp/pid; echo x; sleep 600", on_stdout=refuse)
    await _until(sandbox, "! kill -0 $(cat /tmp/pid) 2>/dev/null")


async def test_stdin(sandbox: Sandbox) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"one\n"
        yield b"two\n"

    assert (await sandbox.execute("cat", stdin="text")).stdout == "text"
    assert (await sandbox.execute("wc -c", stdin=b"x" * 200_000)).stdout.strip() == "200000"
    assert (await sandbox.execute("cat", stdin=chunks())).stdout == "one\ntwo\n"
    assert (await sandbox.execute("head -n 1; exec <&-", stdin=chunks())).exit_code == 0
    with pytest.raises(TypeError):
        await sandbox.execute("cat", stdin=7)  # type: ignore[arg-type]


async def test_an_exception_of_the_input_ends_the_command(sandbox: Sandbox) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"x"
        raise KeyError("no more")

    async def text() -> AsyncIterator[bytes]:
        yield "text"  # type: ignore[misc]

    for source, error in ((broken(), KeyError), (text(), TypeError)):
        with pytest.raises(error):
            await asyncio.wait_for(sandbox.execute("echo $$ >/tmp/pid; cat", stdin=source), 60)
        await _until(sandbox, "! kill -0 $(cat /tmp/pid) 2>/dev/null")


async def test_exclusive_commands(sandbox: Sandbox) -> None:
    await sandbox.execute("rm -f /tmp/go; mkfifo /tmp/go")
    alone = asyncio.ensure_future(sandbox.execute("cat /tmp/go", exclusive=True))
    await asyncio.sleep(0)
    refused = await sandbox.execute("echo x >/tmp/go")
    assert (refused.exit_code, refused.stderr) == (-1, "Exclusive command in progress")
    alone.cancel()
    await asyncio.gather(alone, return_exceptions=True)
    assert (await sandbox.execute("echo again")).stdout == "again\n"


async def test_users(sandbox: Sandbox) -> None:
    alice = await sandbox.create_user("alice")
    bob = await sandbox.create_user("bob")
    assert alice.home == "/home/alice" and bob.uid == alice.uid + 1 == alice.gid + 1
    assert repr(alice) == f"SandboxUser(name='alice', uid={alice.uid}, home='/home/alice')"
    shown = await alice.execute("id -un; id -gn; pwd; echo $HOME $USER $LOGNAME; stat -c %a .")
    assert shown.stdout.split() == ["alice", "alice", *["/home/alice"] * 2, "alice", "alice", "700"]
    assert (await alice.execute("cat /etc/shadow")).exit_code != 0
    shadow = await sandbox.execute("stat -c %a /etc/shadow; grep alice /etc/shadow")
    assert shadow.stdout.startswith("600\nalice:!:")
    for wrong in ("alice", "Root", "a b", "x" * 33, "../x", ""):
        with pytest.raises(RuntimeError, match="Failed to create user"):
            await sandbox.create_user(wrong)
    sleeper = asyncio.ensure_future(alice.execute("sleep 600", timeout=600))
    await _until(sandbox, "pgrep -u alice sleep || ps | grep -q '[s]leep 600'")
    await sandbox.delete_user("alice")
    assert (await asyncio.wait_for(sleeper, 60)).exit_code == -1
    assert (await sandbox.execute("true", user="alice")).stderr == "No such user: alice"
    assert (await sandbox.execute("ls /home")).stdout.split() == ["bob", "user"]
    await sandbox.delete_user("bob", remove_home=False)
    assert "bob" in (await sandbox.execute("ls /home")).stdout
    with pytest.raises(RuntimeError, match="Failed to delete user 'bob'"):
        await sandbox.delete_user("bob")


async def test_checkpoints(sandbox: Sandbox) -> None:
    await sandbox.execute("echo before >/root/file")
    await sandbox.checkpoint("one")
    await sandbox.execute("echo after >/root/file")
    await sandbox.checkpoint("two")
    for tag, text in (("one", "before"), ("two", "after"), ("one", "before")):
        await sandbox.revert(tag)
        assert (await sandbox.execute("cat /root/file")).stdout == f"{text}\n"
    await sandbox.execute("echo again >/root/file")
    await sandbox.checkpoint("one")
    await sandbox.execute("rm /root/file")
    await sandbox.revert("one")
    assert (await sandbox.execute("cat /root/file")).stdout == "again\n"
    with pytest.raises(ValueError, match="No checkpoint 'three'.*one, two"):
        await sandbox.revert("three")


async def test_mounts(sandbox: Sandbox, place: Path) -> None:
    handle = await sandbox.mount(str(place / "new"), "/mnt/shared")
    assert (handle.host, handle.guest, handle.readonly) == (str(place / "new"), "/mnt/shared", False)
    assert sandbox.active_mounts == [handle]
    await sandbox.execute("echo guest >/mnt/shared/file")
    assert (place / "new" / "file").read_text() == "guest\n"
    await sandbox.unmount(handle)
    assert sandbox.active_mounts == []
    assert (await sandbox.execute("ls /mnt/shared")).stdout == ""
    readonly = await sandbox.mount(str(place / "new"), "/mnt/read", readonly=True)
    assert (await sandbox.execute("echo x >/mnt/read/other")).exit_code != 0
    await sandbox.unmount(readonly)
    with pytest.raises(RuntimeError, match="Failed to mount"):
        await sandbox.mount("/proc/none/x", "/mnt/x")


async def test_without_a_display_the_desktop_is_refused(sandbox: Sandbox, place: Path) -> None:
    assert sandbox.vnc_port is None
    with pytest.raises(RuntimeError, match="Display is not enabled"):
        await sandbox.screenshot(place / "x.png")
    with pytest.raises(RuntimeError, match="not running"):
        await Sandbox(image="tiny", enable_display=True).type_text("x")


async def test_before_the_start_nothing_works() -> None:
    sandbox = Sandbox(image="tiny")
    await sandbox.stop()
    with pytest.raises(RuntimeError, match="not running"):
        await sandbox.execute("true")
    with pytest.raises(RuntimeError, match="non-running"):
        await sandbox.checkpoint("x")
    with pytest.raises(RuntimeError, match="non-running"):
        await sandbox.revert("x")
    with pytest.raises(RuntimeError, match="non-running"):
        await sandbox.save("x")
    with pytest.raises(RuntimeError, match="not running"):
        await sandbox.mount("/tmp", "/mnt")


async def test_a_restart_has_a_fresh_disk(store: str) -> None:
    sandbox = Sandbox(image="tiny")
    await sandbox.start()
    await sandbox.execute("touch /root/old")
    await sandbox.checkpoint("one")
    await sandbox.stop()
    assert not sandbox.is_running and sandbox.qemu_command is not None
    await sandbox.start()
    try:
        assert (await sandbox.execute("ls /root")).stdout == ""
        with pytest.raises(ValueError, match="No checkpoint 'one'"):
            await sandbox.revert("one")
    finally:
        await sandbox.stop()


async def test_a_guest_that_ends_is_not_running(store: str) -> None:
    async with Sandbox(image="tiny") as sandbox:
        await sandbox.execute("poweroff -f", timeout=60)
        for _ in range(600):
            if not sandbox.is_running:
                break
            await asyncio.sleep(0.1)
        assert not sandbox.is_running
        with pytest.raises(RuntimeError, match="not running"):
            await sandbox.execute("true")


async def test_options_of_a_start(store: str, place: Path) -> None:
    (place / "ro").mkdir()
    (place / "ro" / "file").write_text("host")
    stages: list[str] = []
    async with Sandbox(
        image="tiny",
        memory="256M",
        cpus=2,
        disk_size="1G",
        network_mode=NetworkMode.NONE,
        mounts=[Mount(str(place / "ro"), "/mnt/ro", readonly=True, type="9p")],
        progress_callback=lambda stage, done, total: stages.append(stage),
    ) as sandbox:
        shown = await sandbox.execute("nproc; cat /mnt/ro/file; df -m / | tail -1; ls /sys/class/net")
        words = shown.stdout.split()
        assert words[0] == "2" and words[1].startswith("host") and words[-1] == "lo"
        assert any(word.isdigit() and 800 < int(word) <= 1024 for word in words)
        with pytest.raises(RuntimeError, match="network_mode=FULL or MOUNTS_ONLY"):
            await sandbox.mount(str(place), "/mnt/x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": "no-such-image"}, "Image not found"),
        ({"arch": "arm64"}, "architecture"),
        ({"accel": "hvf"}, "hvf"),
        ({"mounts": [Mount("/tmp", "/mnt")], "network_mode": "none"}, "Failed to mount shares"),
        ({"mounts": [Mount("/tmp", "/mnt", type="nfs")]}, "Failed to mount shares"),  # type: ignore[arg-type]
    ],
)
async def test_starts_that_fail(store: str, options: dict[str, object], message: str) -> None:
    sandbox = Sandbox(**{"image": "tiny", **options})  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=message):
        await sandbox.start()
    assert not sandbox.is_running


async def _until(sandbox: Sandbox, test: str) -> None:
    line = f"for try in $(seq 600); do if {test}; then exit 0; fi; sleep 0.1; done; exit 1"
    assert (await sandbox.execute(line, timeout=120)).exit_code == 0, test
