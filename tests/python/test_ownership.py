"""Who a sandbox belongs to, and what is left when its owner is gone: nothing."""

import asyncio
import gc
import itertools
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
from sandtree import NameTaken, Sandbox, SandtreeError, _native


# An interpreter that is started in the background inherits that SIGINT is ignored.
HEARS_SIGINT = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def run(program, **options):
    """Runs a program in another interpreter, which prints a line when it has sandboxes."""
    return subprocess.Popen(
        [sys.executable, "-c", HEARS_SIGINT + textwrap.dedent(program)],
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


HOLDS = """
    import asyncio
    from sandtree import Sandbox
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


def test_a_child_that_was_forked_during_a_creation_keeps_nothing():
    parent = run(
        """
        import os, signal, threading, time
        from sandtree.sync import Sandbox
        directory = os.environ["SANDTREE_HOME"] + "/sandboxes"
        held = []
        def create():
            held.append(Sandbox("tiny").start())
            held.append(held[0].fork(2))
        creating = threading.Thread(target=create)
        creating.start()
        children = []
        # The sandbox and its two copies, each as soon as its keeper has begun.
        for count in (1, 2, 3):
            while not os.path.isdir(directory) or len(os.listdir(directory)) < count:
                time.sleep(0.001)
            child = os.fork()
            if child == 0:
                signal.pause()
            children.append(child)
        creating.join()
        print(*children, flush=True)
        signal.pause()
        """
    )
    children = [int(child) for child in parent.stdout.readline().split()]
    try:
        assert len(children) == 3, parent.stderr.read()
        assert len(sandboxes()) == 3
        parent.kill()
        parent.wait(timeout=60)
        eventually(lambda: not sandboxes())
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        parent.communicate(timeout=60)


async def test_a_taken_name_leaves_the_first():
    async with Sandbox("tiny", name="one") as first:
        with pytest.raises(NameTaken):
            await Sandbox("tiny", name="one").start()
        assert (await first.execute("true")).ok


async def cancelled_at(work, number, is_interrupted):
    """Cancels work where its next operation waits and has waited this number of times.

    Returns whether it waited that often, and its result.
    """
    loop = asyncio.get_running_loop()
    task = None
    then = "hold" if is_interrupted else "continue"
    _native.stop_next(number, then, lambda: loop.call_soon_threadsafe(task.cancel))
    task = asyncio.ensure_future(work)
    try:
        return False, await task
    except asyncio.CancelledError:
        return True, None


async def at_each_await(start, check, *, is_interrupted):
    """Cancels work at its first await, at its second, and so on, and checks after each. Returns the result of the first
    that ended before it was cancelled.

    An operation that cannot be interrupted continues after the cancellation, and is then undone.
    """
    for number in itertools.count():
        was_cancelled, result = await cancelled_at(start(), number, is_interrupted)
        if not was_cancelled:
            assert number > 0, "it has no await"
            return result
        await check()


async def test_a_cancelled_creation_leaves_nothing():
    # The store is open, so that the next operation is the creation.
    await Sandbox("tiny").host.images()

    async def nothing():
        # When the cancellation has returned, not some time later.
        assert sandboxes() == []

    created = await at_each_await(lambda: Sandbox("tiny", name="never").start(), nothing, is_interrupted=True)
    await created.close()


async def test_a_cancelled_fork_leaves_no_copy(capfd):
    async with Sandbox("tiny", name="source") as sb:

        async def only_the_source():
            assert len(sandboxes()) == 1
            assert (await sb.execute("true")).ok

        copies = await at_each_await(lambda: sb.fork(2, name="never"), only_the_source, is_interrupted=True)
        for copy in copies:
            await copy.close()
    # Keepers write to the same stderr. A caller that stops waiting is no error.
    assert "lease" not in capfd.readouterr().err


async def test_a_cancelled_checkpoint_is_forgotten():
    async with Sandbox("tiny") as sb:
        await sb.checkpoint("base")

        async def only_the_base():
            assert [state.tag for state in await sb.states()] == ["base"]

        await at_each_await(lambda: sb.checkpoint("never"), only_the_base, is_interrupted=False)
        await sb.forget("never")
        # One that replaces another is not taken back.
        await at_each_await(lambda: sb.checkpoint("base", replace=True), only_the_base, is_interrupted=False)


async def test_other_cancelled_verbs_are_undone():
    async with Sandbox("tiny") as sb:
        await sb.checkpoint("base")
        await sb.execute("echo 1 > /srv/n")

        async def as_before():
            assert (await sb.info()).state == "running"
            assert (await sb.execute("cat /srv/n")).stdout == "1\n"

        async def not_saved():
            names = [name for each in await sb.host.snapshots() for name in each.names]
            assert "never" not in names

        await at_each_await(lambda: sb.revert("base"), as_before, is_interrupted=False)
        await sb.undo()
        await at_each_await(sb.pause, as_before, is_interrupted=False)
        await sb.resume()
        await at_each_await(lambda: sb.save("never"), not_saved, is_interrupted=True)
        await sb.host.remove_snapshot("never")


async def test_the_command_of_a_cancelled_task_ends():
    async with Sandbox("tiny") as sb:
        begun = asyncio.Event()
        task = asyncio.ensure_future(sb.execute("echo begun; sleep 6000", on_stdout=lambda _: begun.set()))
        await asyncio.wait_for(begun.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        ended = "for i in $(seq 600); do ps | grep -q '[s]leep 6000' || exit 0; sleep 0.1; done; exit 1"
        assert (await sb.execute(ended)).ok


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
            await cancelled_at(sb.checkpoint("never"), 0, False)
            assert len(await sb.states()) == 0
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
            try:
                sb.execute("echo ready; sleep 600", on_stdout=lambda text: print(text, end="", flush=True))
            except KeyboardInterrupt:
                print(sb.execute("echo usable").stdout, flush=True)
        """
    )
    assert child.stdout.readline() == "ready\n", child.stderr.read()
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
    # Idle threads end after some seconds.
    eventually(lambda: used()[0] <= before[0] + 2 and used()[1] <= before[1] + 4, about=lambda: (before, used()))
    assert used()[2] <= before[2] + (16 << 20), (before, used())


async def test_many_sandboxes_in_one_process():
    count = 100 if LONG else 10
    async with Sandbox("tiny", memory="128M") as sb:
        copies = await sb.fork(count - 1)
        try:
            said = await asyncio.gather(*(copy.execute("hostname") for copy in copies))
            assert [each.stdout.strip() for each in said] == [copy.name for copy in copies]
        finally:
            await asyncio.gather(*(copy.close() for copy in copies))
