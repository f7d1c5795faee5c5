"""Files, by E2B's Python client."""

import gzip
import io

import pytest
import requests
from e2b import FileNotFoundException, FileType, InvalidArgumentException, NotFoundException

from conftest import eventually


def test_texts_bytes_and_streams(sandbox):
    written = sandbox.files.write("dir/of/text.txt", "grüße")
    assert written.path == "/home/user/dir/of/text.txt"
    assert sandbox.files.read("dir/of/text.txt") == "grüße"
    content = bytes(range(256)) * 5000
    sandbox.files.write("/tmp/bytes", content)
    assert sandbox.files.read("/tmp/bytes", format="bytes") == content
    assert b"".join(sandbox.files.read("/tmp/bytes", format="stream")) == content
    sandbox.files.write("/tmp/stream", io.BytesIO(content))
    assert sandbox.files.read("/tmp/stream", format="bytes") == content
    assert sandbox.files.write("/tmp/empty", "").name == "empty"
    assert sandbox.files.read("/tmp/empty") == ""
    # New directories and files belong to the user; the user of the request decides.
    owners = sandbox.commands.run("stat -c '%U %a' dir dir/of dir/of/text.txt").stdout
    assert owners == "user 755\nuser 755\nuser 644\n"
    sandbox.files.write("/tmp/of-root", "x", user="root")
    assert sandbox.commands.run("stat -c %U /tmp/of-root").stdout == "root\n"


def test_several_files_at_once(sandbox):
    names = ["many/a.txt", 'many/"quoted" ä.txt', "many/deep/c.txt"]
    written = sandbox.files.write_files([{"path": name, "data": name} for name in names])
    assert [info.path for info in written] == [f"/home/user/{name}" for name in names]
    for name in names:
        assert sandbox.files.read(name) == name


def test_a_compressed_upload(sandbox, server):
    headers = {
        "E2b-Sandbox-Id": sandbox.sandbox_id,
        "X-Access-Token": sandbox._envd_access_token,
        "Content-Type": "application/octet-stream",
        "Content-Encoding": "gzip",
        "X-Metadata-Source": "a test",
    }
    content = b"compressed" * 10_000
    url = f"{server.url}/files?path=/tmp/gz"
    answer = requests.post(url, data=gzip.compress(content), headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()[0]["metadata"] == {"source": "a test"}
    assert sandbox.files.read("/tmp/gz", format="bytes") == content
    assert sandbox.files.get_info("/tmp/gz").metadata == {"source": "a test"}
    ranged = requests.get(url, headers={**headers, "Range": "bytes=10-19"})
    assert (ranged.status_code, ranged.content) == (206, b"compressed")


def test_directories(sandbox):
    assert sandbox.files.make_dir("tree/sub") is True
    assert sandbox.files.make_dir("tree/sub") is False
    sandbox.files.write("tree/file", "12345")
    sandbox.commands.run("ln -s file tree/link")
    listed = {entry.name: entry for entry in sandbox.files.list("tree")}
    assert set(listed) == {"sub", "file", "link"}
    assert listed["sub"].type == FileType.DIR
    assert listed["file"].size == 5
    assert listed["file"].permissions == "-rw-r--r--"
    assert (listed["file"].owner, listed["file"].group) == ("user", "user")
    assert listed["link"].symlink_target == "/home/user/tree/file"
    sandbox.files.write("tree/sub/deep", "")
    deep = [entry.path for entry in sandbox.files.list("tree", depth=2)]
    assert "/home/user/tree/sub/deep" in deep
    moved = sandbox.files.rename("tree/file", "other/place/file")
    assert moved.path == "/home/user/other/place/file"
    assert not sandbox.files.exists("tree/file")
    sandbox.files.remove("tree")
    assert not sandbox.files.exists("tree")
    with pytest.raises(NotFoundException):
        sandbox.files.list("tree")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.list("other/place/file")


def test_what_is_missing_or_no_file(sandbox):
    with pytest.raises(FileNotFoundException, match="path '/home/user/no' does not exist"):
        sandbox.files.read("no")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.read("/tmp")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.write("/tmp", "x")
    with pytest.raises(NotFoundException):
        sandbox.files.get_info("no")
    with pytest.raises(NotFoundException):
        sandbox.files.rename("no", "yes")


def test_watches(sandbox):
    sandbox.files.make_dir("watched")
    watch = sandbox.files.watch_dir("watched", recursive=True)
    sandbox.files.write("watched/new/file", "1")
    sandbox.commands.run("echo 2 >> watched/new/file; rm watched/new/file")
    seen = []

    def complete():
        seen.extend((event.type.value, event.name) for event in watch.get_new_events())
        return ("remove", "new/file") in seen

    eventually(complete)
    assert ("create", "new") in seen
    assert ("create", "new/file") in seen
    assert ("write", "new/file") in seen
    assert not any("sandtree" in name for _, name in seen)
    watch.stop()

    # The order of events is that of E2B: a new file is created, an existing one is written.
    sandbox.files.make_dir("ordered")
    watch = sandbox.files.watch_dir("ordered")
    sandbox.files.write("ordered/file", "1")
    sandbox.files.write("ordered/file", "2")
    sandbox.files.remove("ordered/file")
    events = []

    def ended():
        events.extend(event.type.value for event in watch.get_new_events())
        return "remove" in events

    eventually(ended)
    assert events == ["create", "chmod", "write", "write", "remove"]
    watch.stop()
    with pytest.raises(NotFoundException):
        sandbox.files.watch_dir("not-there")


def test_signed_addresses(sandbox):
    sandbox.files.write("signed.txt", "secret")
    download = sandbox.download_url("signed.txt")
    assert requests.get(download).text == "secret"
    upload = sandbox.upload_url("uploaded.txt")
    assert requests.post(upload, files={"file": ("x", b"by url")}).status_code == 200
    assert sandbox.files.read("uploaded.txt") == "by url"
    # A signature is for one operation and one path, and for a time.
    for wrong in [download.replace("signed", "other"), upload.replace("uploaded", "signed")]:
        assert requests.get(wrong).status_code == 401
    late = requests.get(sandbox.download_url("signed.txt", use_signature_expiration=-60))
    assert late.status_code == 401
    assert late.json()["message"] == "signature is already expired"
    assert requests.get(sandbox.download_url("signed.txt", use_signature_expiration=60)).status_code == 200
    assert requests.get(download.split("&signature")[0]).status_code == 401
