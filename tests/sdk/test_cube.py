"""CubeSandbox's Python client."""

import pytest
from cubesandbox import NEVER_TIMEOUT, Sandbox, SandboxNotFoundError, TemplateNotFoundError

from conftest import sandboxes


@pytest.fixture
def cube():
    made = Sandbox.create("base", timeout=300, metadata={"by": "cube"}, env_vars={"FOO": "bar"})
    yield made
    if made.sandbox_id in sandboxes():
        made.kill()


def test_commands_and_files(cube):
    done = cube.commands.run("echo $FOO; whoami; exit 3")
    assert (done.stdout, done.exit_code) == ("bar\nroot\n", 3)
    cube.files.write("/srv/a", "text")
    assert cube.files.read("/srv/a") == "text"
    assert cube.files.exists("/srv/a") and not cube.files.exists("/srv/b")
    assert cube.get_info().state == "running"


def test_rollback_and_clone(cube):
    cube.files.write("/dev/shm/x", "before")
    snapshot = cube.create_snapshot()
    cube.files.write("/dev/shm/x", "after")
    cube.rollback(snapshot.snapshot_id)
    assert cube.files.read("/dev/shm/x") == "before"
    copies = cube.clone(2)
    assert [copy.files.read("/dev/shm/x") for copy in copies] == ["before"] * 2
    assert [copy.get_info()["metadata"] for copy in copies] == [{"by": "cube"}] * 2
    for copy in copies:
        copy.kill()
    with pytest.raises(TemplateNotFoundError):
        cube.rollback("snap-000000000000000000000000")


def test_pause_and_lifetimes(cube):
    cube.set_timeout(NEVER_TIMEOUT)
    cube.files.write("/dev/shm/x", "kept")
    cube.pause()
    again = Sandbox.connect(cube.sandbox_id)
    assert again.files.read("/dev/shm/x") == "kept"
    with pytest.raises(SandboxNotFoundError):
        Sandbox.connect("0123456789abcdef")
