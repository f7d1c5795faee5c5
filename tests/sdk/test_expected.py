"""What E2B's own tests expect of a server, where ours once answered something else."""

import time

import requests
from e2b import Sandbox

from conftest import eventually


def test_a_sandbox_without_a_timeout_lives_for_minutes(own):
    made = Sandbox.create()
    try:
        left = made.get_info().end_at.timestamp() - time.time()
        assert 240 < left < 310
    finally:
        made.kill()


def test_a_listing_follows_the_tree(sandbox):
    sandbox.commands.run("mkdir -p tree/a/x tree/b && touch tree/a/x/1 tree/a/y tree/b/2")
    listed = [entry.path.split("/tree/")[1] for entry in sandbox.files.list("tree", depth=3)]
    assert listed == ["a", "a/x", "a/x/1", "a/y", "b", "b/2"]


def test_a_signature_that_has_expired_is_refused_in_the_words_of_e2b(sandbox):
    url = sandbox.download_url("/etc/hostname", use_signature_expiration=-10)
    refused = requests.get(url)
    assert refused.status_code == 401
    assert refused.json() == {"code": 401, "message": "signature is already expired"}


def test_a_paused_sandbox_boots_if_its_client_asks(own):
    made = own()
    boot = lambda: made.commands.run("cat /proc/sys/kernel/random/boot_id").stdout
    made.files.write("kept", "yes")
    first = boot()
    made.pause()
    made.connect(timeout=300)
    assert boot() == first
    made.pause()
    made.connect(timeout=300, on_resume="reboot")
    assert boot() != first
    assert made.files.read("kept") == "yes"


def test_a_snapshot_of_a_paused_sandbox_has_its_files(own):
    made = own()
    made.files.write("recent", "yes")
    made.pause()
    snapshot = made.create_snapshot()
    copy = own(snapshot.snapshot_id)
    try:
        assert copy.files.read("recent") == "yes"
    finally:
        Sandbox.delete_snapshot(snapshot.snapshot_id)


def test_a_sandbox_that_denies_everything_reaches_nothing(own):
    made = own(network={"deny_out": ["0.0.0.0/0"]})
    # Nothing answers on an isolated interface, not even as its gateway.
    refused = made.commands.run("ping -c 1 -W 2 10.0.2.2 || echo unreachable")
    assert "unreachable" in refused.stdout


def test_a_sandbox_is_connected_in_the_moment_of_its_pause(own):
    made = own(timeout=3, lifecycle={"on_timeout": "pause"})
    made.files.write("/dev/shm/word", "here")
    eventually(lambda: made.get_info().state == "paused")
    made.connect(timeout=300)
    assert made.files.read("/dev/shm/word") == "here"
