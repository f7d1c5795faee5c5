"""Volumes: their files through the API and in sandboxes, by E2B's and CubeSandbox's Python clients."""

import asyncio
import os

import pytest
import requests
from e2b import AsyncSandbox, AsyncVolume, Sandbox, SandboxException, Volume
from e2b.exceptions import VolumeException, VolumeNotFoundException, VolumePathNotFoundException

import cubesandbox
from conftest import Running, Server, use


@pytest.fixture
def volume():
    made = Volume.create("sdk-data")
    yield made
    Volume.destroy(made.volume_id)


def test_volumes_are_made_listed_and_removed():
    made = Volume.create("sdk-one")
    assert "sdk-one" in {one.name for one in Volume.list()}
    assert Volume.get_info(made.volume_id).name == "sdk-one"
    assert Volume.connect(made.volume_id).token == made.token
    with pytest.raises(VolumeException, match="already"):
        Volume.create("sdk-one")
    for name in ["", "../x", "a b", "x" * 129]:
        with pytest.raises(VolumeException, match="invalid volume name"):
            Volume.create(name)
    assert Volume.destroy(made.volume_id) is True
    assert Volume.destroy(made.volume_id) is False
    with pytest.raises(VolumeNotFoundException):
        Volume.get_info(made.volume_id)


def test_files_of_a_volume(volume):
    with pytest.raises(VolumePathNotFoundException):
        volume.write_file("/a/b.txt", "text")
    written = volume.write_file("/a/b.txt", "text", mode=0o640, force=True)
    assert (written.path, written.size, written.mode, written.type) == ("/a/b.txt", 4, 0o640, "file")
    assert volume.read_file("/a/b.txt") == "text"
    large = os.urandom(3_000_000)
    volume.write_file("large", large)
    assert volume.read_file("large", format="bytes") == large
    assert b"".join(volume.read_file("large", format="stream")) == large
    made = volume.make_dir("/x/y", force=True)
    assert made.type == "directory"
    with pytest.raises(VolumeException, match="409"):
        volume.make_dir("/x/y")
    assert [entry.path for entry in volume.list("/")] == ["/a", "/large", "/x"]
    assert "/a/b.txt" in [entry.path for entry in volume.list("/", depth=3)]
    assert volume.update_metadata("/a/b.txt", mode=0o600).mode == 0o600
    with pytest.raises(VolumeException, match="another owner"):
        volume.update_metadata("/a/b.txt", uid=0)
    volume.remove("/a")
    assert not volume.exists("/a/b.txt") and volume.exists("/x/y")
    with pytest.raises(VolumePathNotFoundException):
        volume.read_file("/a/b.txt")
    with pytest.raises(VolumeException, match="400"):
        volume.read_file("/x/../../../etc/passwd")


def test_sandboxes_share_a_volume(volume, own):
    volume.write_file("before", "from outside")
    one = own(volume_mounts={"/mnt/data": volume})
    assert one.commands.run("cat /mnt/data/before").stdout == "from outside"
    two = own(volume_mounts={"/srv/same": "sdk-data"})
    one.commands.run("echo one > /mnt/data/shared && mkdir /mnt/data/dir && ln -s /etc/hostname /mnt/data/out")
    assert two.commands.run("cat /srv/same/shared; echo two >> /srv/same/shared; stat -c %U /srv/same/shared").stdout == "one\nuser\n"
    assert one.commands.run("cat /mnt/data/shared").stdout == "one\ntwo\n"
    assert volume.read_file("shared") == "one\ntwo\n"
    assert volume.get_info("out").type == "symlink"
    with pytest.raises(VolumeException):
        volume.read_file("out")
    with pytest.raises(VolumeException, match="mounted in sandbox"):
        Volume.destroy(volume.volume_id)
    mounts = one.get_info().volume_mounts
    assert [(mount["name"], mount["path"]) for mount in mounts] == [("sdk-data", "/mnt/data")]
    one.pause()
    again = Sandbox.connect(one.sandbox_id)
    assert again.commands.run("cat /mnt/data/shared").stdout == "one\ntwo\n"
    fork = again.fork(count=1, timeout=120)[0]
    fork.commands.run("echo fork >> /mnt/data/shared")
    assert two.commands.run("tail -n 1 /srv/same/shared").stdout == "fork\n"
    snapshot = two.create_snapshot()
    copy = own(snapshot.snapshot_id)
    assert copy.commands.run("tail -n 1 /srv/same/shared").stdout == "fork\n"
    Sandbox.delete_snapshot(snapshot.snapshot_id)
    for sandbox in [fork, again, two, copy]:
        sandbox.kill()
    assert volume.read_file("shared") == "one\ntwo\nfork\n"


def test_a_volume_outlives_the_server(volume):
    volume.write_file("kept", "kept")
    address = Running.server.address
    Running.server.kill()
    use(Server(address))
    assert Volume.connect(volume.volume_id).read_file("kept") == "kept"


def test_refusals_are_clear(volume, server):
    with pytest.raises(SandboxException, match='volume "none" not found'):
        Sandbox.create(volume_mounts={"/mnt": "none"})
    with pytest.raises(SandboxException, match="mount point"):
        Sandbox.create(volume_mounts={"relative": volume})
    url = f"{server.url}/volumecontent/{volume.volume_id}/dir?path=/"
    other = Volume.create("sdk-other")
    try:
        for token in [None, "", other.token, os.environ["E2B_API_KEY"]]:
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            assert requests.get(url, headers=headers).status_code == 401
        assert requests.get(url, headers={"Authorization": f"Bearer {volume.token}"}).status_code == 200
    finally:
        Volume.destroy(other.volume_id)


def test_the_asynchronous_client(volume):
    async def work():
        same = await AsyncVolume.connect(volume.volume_id)
        assert (same.name, same.token) == (volume.name, volume.token)
        assert (await AsyncVolume.get_info(volume.volume_id)).name == "sdk-data"
        assert "sdk-data" in {one.name for one in await AsyncVolume.list()}
        with pytest.raises(VolumeException, match="already"):
            await AsyncVolume.create("sdk-data")
        large = os.urandom(3_000_000)
        assert (await same.write_file("dir/a", large, mode=0o640, force=True)).mode == 0o640
        assert await same.read_file("dir/a", format="bytes") == large
        assert b"".join([piece async for piece in await same.read_file("dir/a", format="stream")]) == large
        assert (await same.make_dir("dir/sub")).type == "directory"
        assert [entry.name for entry in await same.list("/", depth=2)] == ["dir", "a", "sub"]
        assert (await same.get_info("dir/a")).size == len(large)
        assert (await same.update_metadata("dir/a", mode=0o600)).mode == 0o600
        await same.remove("dir/a")
        assert not await same.exists("dir/a")
        with pytest.raises(VolumePathNotFoundException):
            await same.read_file("dir/a")
        sandbox = await AsyncSandbox.create(timeout=120, volume_mounts={"/mnt/data": same})
        await sandbox.commands.run("echo inside > /mnt/data/in")
        await sandbox.kill()
        assert await same.read_file("in") == "inside\n"
        other = await AsyncVolume.create("sdk-async")
        assert [await AsyncVolume.destroy(other.volume_id) for _ in range(2)] == [True, False]
        with pytest.raises(VolumeNotFoundException):
            await AsyncVolume.connect(other.volume_id)

    asyncio.run(work())


def test_volumes_of_cubesandbox():
    made = cubesandbox.Volume.create("sdk-cube")
    assert made.volume_id in {volume.volume_id for volume in cubesandbox.Volume.list()}
    info = cubesandbox.Volume.get_info(made.volume_id)
    assert (info.volume_id, info.name, info.token) == (made.volume_id, "sdk-cube", made.token)
    assert cubesandbox.Volume.connect(made.volume_id) == made
    with pytest.raises(cubesandbox.ApiError, match="driver"):
        cubesandbox.Volume.create("sdk-driven", driver="nfs")
    mount = cubesandbox.VolumeMount(made, read_only=True)
    sandbox = cubesandbox.Sandbox.create("base", timeout=120, volume_mounts={"/mnt/data": mount})
    refused = sandbox.commands.run("touch /mnt/data/x")
    assert refused.exit_code != 0 and "Read-only" in refused.stderr
    with pytest.raises(cubesandbox.ApiError, match="mounted in sandbox"):
        cubesandbox.Volume.destroy(made.volume_id)
    sandbox.kill()
    assert cubesandbox.Volume.destroy(made.volume_id) is True
    assert cubesandbox.Volume.destroy(made.volume_id) is False
    for refused in [cubesandbox.Volume.get_info, cubesandbox.Volume.connect]:
        with pytest.raises(cubesandbox.VolumeNotFoundError):
            refused(made.volume_id)
