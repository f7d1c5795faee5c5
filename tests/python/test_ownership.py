"""Who a sandbox belongs to, and what is left when its owner is gone: nothing."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings

import pytest
from conftest import LONG, eventually, keepers, sandboxes

import sandtree.sync
from sandtree import NameTaken, Sandbox, SandtreeError


def run(program, **options):
    """Runs a program in another interpreter, which prints a line when it has sandboxes."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


async def test_garbage_is_removed():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        sb = await Sandbox("tiny").start()
        await sb.pause()
        del sb
        gc.collect()
    assert any(issubclass(warning.category, ResourceWarning) for warning in seen)
    eventually(lambda: not sandboxes() and not keepers())


# Where the tests run in the background, the interpreter inherits a SIGINT that is ignored.
HOLDS = """
    import asyncio, signal
    from sandtree import Sandbox
    signal.signal(signal.SIGINT, signal.default_int_handler)
    async def main():
        sb = await Sandbox("tiny", name="held").start()
        copies = await sb.fork(2)
        await copies[0].pause()
        await copies[1].stop()
        print("ready", flush=True)
        {then}
    asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_interpreter_leaves_nothing(number):
    child = run(HOLDS.format(then="await asyncio.sleep(600)"))
    assert child.stdout.readline() == "ready\n", child.stderr.read()
    assert len(sandboxes()) == 3
    child.send_signal(number)
    child.communicate(timeout=60)
    eventually(lambda: not sandboxes() and not keepers())


def test_an_interpreter_that_ends_waits_for_the_removal():
    child = run(HOLDS.format(then="return"))
    _, error = child.communicate(timeout=60)
    assert child.returncode == 0, error
    assert not sandboxes()


def test_a_call_at_the_end_of_the_interpreter_fails():
    child = run(
        """
        import atexit
        def late():
            try:
                Host().list()
            except RuntimeError as error:
                print(error, flush=True)
        atexit.register(late)
        from sandtree.sync import Host
        Host().list()
        """
    )
    out, error = child.communicate(timeout=60)
    assert "interpreter ends" in out, error


async def test_a_command_and_a_sandbox_start_once():
    sb = Sandbox("tiny", name="once")
    await asyncio.gather(sb.start(), sb.__aenter__())
    command = sb.exec("sh", "-c", "echo x >> /srv/starts; cat", stdin=True)
    await asyncio.gather(command.write("typed"), command.start())
    await command.close_stdin()
    assert (await command.wait()).stdout == "typed"
    assert await sb.files.read("/srv/starts") == b"x\n"
    await sb.close()


def test_a_forked_child_is_refused_and_keeps_nothing():
    sb = sandtree.sync.Sandbox("tiny").start()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                sandtree.sync.Sandbox("tiny").start()
            except SandtreeError as error:
                os.write(writing, f"{error.code}: {error}".encode())
            # It outlives the sandbox, and holds none of its descriptors.
            signal.pause()
        finally:
            os._exit(0)
    os.close(writing)
    try:
        said = os.read(reading, 4096).decode()
        assert said.startswith("forked: ") and "spawn" in said
        assert sb.execute("echo parent").stdout == "parent\n"
        name = sb.id
        sb._native = None
        del sb
        eventually(lambda: name not in sandboxes())
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


async def test_a_taken_name_leaves_the_first():
    async with Sandbox("tiny", name="one") as first:
        with pytest.raises(NameTaken):
            await Sandbox("tiny", name="one").start()
        assert (await first.execute("true")).ok


@pytest.mark.parametrize("delay_ms", [0, 5, 20, 60, 120, 200, 400])
async def test_a_cancelled_creation_leaves_nothing(delay_ms):
    task = asyncio.ensure_future(Sandbox("tiny", name="never").start())
    await asyncio.sleep(delay_ms / 1000)
    task.cancel()
    try:
        sb = await task
    except asyncio.CancelledError:
        # Nothing is left when the cancellation has returned.
        assert sandboxes() == []
    else:
        await sb.close()


async def cancelled(work, delay_ms):
    """Cancels work after a while. Returns its result if it was faster."""
    task = asyncio.ensure_future(work)
    await asyncio.sleep(delay_ms / 1000)
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None


async def test_a_cancelled_checkpoint_is_forgotten():
    async with Sandbox("tiny") as sb:
        await sb.checkpoint("base")
        for delay_ms in (0, 1, 2, 5, 10, 20, 40):
            if await cancelled(sb.checkpoint("never"), delay_ms):
                await sb.forget("never")
            # One that replaces another is not taken back.
            await cancelled(sb.checkpoint("base", replace=True), delay_ms)
            assert [state.tag for state in await sb.states()] == ["base"]


async def test_a_cancelled_fork_leaves_no_copy():
    async with Sandbox("tiny", name="source") as sb:
        for delay_ms in (0, 10, 50, 100, 200, 400):
            for copy in await cancelled(sb.fork(2, name="never"), delay_ms) or ():
                await copy.close()
            assert len(sandboxes()) == 1
            assert (await sb.execute("true")).ok


async def test_other_cancelled_verbs_are_undone():
    async with Sandbox("tiny") as sb:
        await sb.checkpoint("base")
        await sb.execute("echo 1 > /srv/n")
        for delay_ms in (0, 30, 80):
            if await cancelled(sb.revert("base"), delay_ms):
                await sb.undo()
            assert (await sb.execute("cat /srv/n")).stdout == "1\n"
            if await cancelled(sb.pause(), delay_ms):
                await sb.resume()
            assert (await sb.info()).state == "running"
            saved = await cancelled(sb.save("never"), delay_ms)
            names = [name for each in await sb.host.snapshots() for name in each.names]
            assert ("never" in names) == (saved is not None)
            if saved:
                await sb.host.remove_snapshot("never")
        assert await cancelled(sb.execute("sleep 6000"), 200) is None
        still = "ps | grep -c '[s]leep 6000'"
        for _ in range(100):
            if (await sb.execute(still)).stdout.strip() == "0":
                break
        else:
            pytest.fail("the command of a cancelled task still runs")


def test_several_loops_and_threads():
    sb = sandtree.sync.Sandbox("tiny").start()
    try:
        results = []

        def work(number):
            async def main():
                same = await Sandbox.attach(sb.name)
                results.append((await same.execute(f"echo {number}")).stdout)

            asyncio.run(main())

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(results) == [f"{number}\n" for number in range(6)]
    finally:
        sb.close()


def test_another_event_loop():
    uvloop = pytest.importorskip("uvloop")

    async def main():
        async with Sandbox("tiny") as sb:
            await cancelled(sb.checkpoint("never"), 1)
            lines = [line async for line in sb.exec("seq", "1000").lines()]
            assert lines == [str(number) for number in range(1, 1001)]

    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def test_waiting_releases_the_interpreter():
    sb = sandtree.sync.Sandbox("tiny").start()
    try:
        waiting = threading.Thread(target=lambda: sb.execute("sleep 1"))
        waiting.start()
        count = 0
        while waiting.is_alive():
            count += 1
        assert count > 10_000
    finally:
        sb.close()


def test_ctrl_c_cancels_a_call():
    child = run(
        """
        from sandtree.sync import Sandbox
        with Sandbox("tiny") as sb:
            print("ready", flush=True)
            try:
                sb.execute("sleep 600")
            except KeyboardInterrupt:
                print(sb.execute("echo usable").stdout, flush=True)
        """
    )
    assert child.stdout.readline() == "ready\n", child.stderr.read()
    # The call follows the line; a signal before it would end the program by itself.
    threading.Event().wait(1)
    child.send_signal(signal.SIGINT)
    out, error = child.communicate(timeout=60)
    assert out.strip() == "usable", error


def used():
    descriptors = len(os.listdir("/proc/self/fd"))
    threads = len(os.listdir("/proc/self/task"))
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * 4096
    return descriptors, threads, resident


async def test_creations_leak_nothing():
    count = 1000 if LONG else 25
    async with Sandbox("tiny") as sb:
        await sb.execute("true")
    before = used()
    for _ in range(count):
        async with Sandbox("tiny") as sb:
            await sb.execute("true")
    gc.collect()
    after = used()
    assert after[0] <= before[0] + 2, (before, after)
    assert after[1] <= before[1] + 4, (before, after)
    assert after[2] <= before[2] + (16 << 20), (before, after)


async def test_many_sandboxes_in_one_process():
    count = 100 if LONG else 10
    async with Sandbox("tiny", memory="128M") as sb:
        copies = await sb.fork(count - 1)
        try:
            said = await asyncio.gather(*(copy.execute("hostname") for copy in copies))
            assert [each.stdout.strip() for each in said] == [copy.name for copy in copies]
        finally:
            await asyncio.gather(*(copy.close() for copy in copies))
