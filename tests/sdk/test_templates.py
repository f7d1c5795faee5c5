"""Templates: builds, their files, tags, by E2B's and CubeSandbox's Python clients.

Each build boots a machine, so the tests share what they can. `min_free_disk_mb` keeps the images small.
"""

import asyncio
import glob
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import uuid
from pathlib import Path

import pytest
import requests
from e2b import (
    AsyncTemplate,
    BuildException,
    Sandbox,
    SandboxException,
    Template,
    TemplateException,
    wait_for_file,
    wait_for_port,
    wait_for_process,
    wait_for_url,
)
from e2b.template.types import TemplateBuildStatus

import cubesandbox
from conftest import STORE, Running, Server, eventually, sandboxes, sandtree, serving, use

SMALL = {"min_free_disk_mb": 64}


def images():
    """The names of all images of the store."""
    return {name for image in json.loads(sandtree("--json", "image", "ls")) for name in image["names"]}


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    """The directory that templates copy from."""
    directory = tmp_path_factory.mktemp("context")
    (directory / "app" / "lib").mkdir(parents=True)
    program = directory / "app" / "run.sh"
    program.write_text("#!/bin/sh\necho copied\n")
    program.chmod(0o755)
    (directory / "app" / "lib" / "data").write_text("data")
    (directory / "app" / "lib" / "data").chmod(0o600)
    (directory / "app" / "link").symlink_to("run.sh")
    (directory / "note.txt").write_text("note")
    return directory


def recipe(context):
    return (
        Template(file_context_path=context)
        .from_image("debian:stable")
        .set_workdir("/srv/app")
        .copy("app", ".")
        .copy("note.txt", "/srv/notes/", mode=0o640, user="root")
        .set_envs({"GREETING": "hello", "LONG": "${GREETING}, $GREETING"})
        .run_cmd('echo "said $LONG by $(whoami) in $PWD"; printf "%s" "$LONG" > made')
        .set_start_cmd("touch /srv/app/started && sleep infinity", "test -e /srv/app/started")
    )


@pytest.fixture(scope="module")
def built(context):
    """A template with a service, the log of its build, and what the client knows of it."""
    log = []
    template = recipe(context)
    made = Template.build(
        template, "sdk-app:v1", tags=["stable"], cpu_count=2, memory_mb=640, on_build_logs=log.append, **SMALL
    )
    yield made, [entry.message for entry in log]
    delete("sdk-app")


def delete(template):
    key = {"X-API-KEY": os.environ["E2B_API_KEY"]}
    return requests.delete(f"{Running.server.url}/templates/{template}", headers=key).status_code


def test_a_template_is_built_and_sandboxes_begin_from_it(built, own):
    made, log = built
    assert (made.template_id, sorted(made.tags)) == ("sdk-app", ["stable", "v1"])
    assert any("said hello, hello by user in /srv/app" in line for line in log)
    sandbox = own("sdk-app:v1")
    info = sandbox.get_info()
    assert (info.cpu_count, info.memory_mb) == (2, 640)
    assert sandbox.commands.run("pwd; echo $GREETING; cat made; whoami").stdout == "/srv/app\nhello\nhello, hellouser\n"
    modes = sandbox.commands.run("stat -c '%a %U %n' run.sh lib/data made; readlink link; sudo stat -c '%a %U' /srv/notes/note.txt")
    assert modes.stdout == "755 user run.sh\n600 user lib/data\n644 user made\nrun.sh\n640 root\n"
    assert sandbox.commands.run("./link").stdout == "copied\n"
    assert sandbox.files.exists("/srv/app/started")
    assert not sandbox.files.exists("/.sandtree-copy")


def test_tags_lead_to_builds(built):
    made, _ = built
    assert Template.exists("sdk-app") and Template.exists("sdk-app:stable") and Template.alias_exists("base")
    assert not Template.exists("sdk-app:none") and not Template.exists("no-such")
    with pytest.raises(SandboxException, match='template "sdk-app" not found'):
        Sandbox.create("sdk-app")
    given = Template.assign_tags("sdk-app:v1", ["default", "v1.0"])
    assert given.build_id == made.build_id
    tags = {tag.tag: tag.build_id for tag in Template.get_tags("sdk-app")}
    assert tags == dict.fromkeys(["default", "stable", "v1", "v1.0"], made.build_id)
    assert "sdk-app.v1.0" in images()
    key = {"X-API-KEY": os.environ["E2B_API_KEY"]}
    listed = requests.get(f"{Running.server.url}/templates", headers=key).json()
    mine = next(template for template in listed if template["templateID"] == "sdk-app")
    assert {"sdk-app", "sdk-app:v1", "sdk-app:v1.0"} <= set(mine["names"])
    assert (mine["buildID"], mine["cpuCount"], mine["memoryMB"], mine["public"]) == (made.build_id, 2, 640, False)
    detailed = requests.get(f"{Running.server.url}/templates/sdk-app", headers=key).json()
    assert [build["status"] for build in detailed["builds"]] == ["ready"]
    Template.remove_tags("sdk-app", ["v1.0", "stable"])
    assert {tag.tag for tag in Template.get_tags("sdk-app")} == {"default", "v1"}
    assert not Template.exists("sdk-app:stable")
    with pytest.raises(TemplateException, match="not found"):
        Template.assign_tags("sdk-app:none", "x")
    with pytest.raises(TemplateException, match="not found"):
        Template.get_tags("no-such")
    with pytest.raises(TemplateException, match="invalid template name"):
        Template.assign_tags("sdk-app:v1", "../x")


def test_a_second_build_runs_no_step_again(built, context):
    log = []
    again = Template.build(recipe(context), "sdk-again", on_build_logs=log.append, **SMALL)
    try:
        lines = [entry.message for entry in log]
        steps = [line for line in lines if "/4] " in line]
        assert len(steps) == 4 and all(line.startswith("CACHED ") for line in steps), lines
        status = Template.get_build_status(again)
        assert status.status == TemplateBuildStatus.READY
        assert Template.get_build_status(again, logs_offset=len(status.log_entries)).log_entries == []
    finally:
        assert delete("sdk-again") == 204
    assert not Template.exists("sdk-again")


def test_a_build_continues_from_another_one_and_runs_again_what_is_asked(own):
    log = []
    first = Template().from_template("base").set_user("dev").set_envs({"WHO": "dev"}).run_cmd("whoami; pwd; date +%s%N > stamp")
    Template.build(first, "sdk-first", on_build_logs=log.append, **SMALL)
    again = Template().from_template("base").set_user("dev").set_envs({"WHO": "dev"}).skip_cache()
    again = again.run_cmd("whoami; pwd; date +%s%N > stamp")
    Template.build(again, "sdk-first:again", on_build_logs=log.append, **SMALL)
    runs = [entry.message for entry in log if "] RUN whoami" in entry.message]
    assert len(runs) == 2 and not any(line.startswith("CACHED") for line in runs)
    assert [entry.message for entry in log].count("/home/dev") == 2
    users = [entry.message for entry in log if "] USER dev" in entry.message]
    assert [line.startswith("CACHED") for line in users] == [False, True]
    Template.build(Template().from_template("sdk-first:again").run_cmd("echo $WHO > who"), "sdk-second", **SMALL)
    sandbox = own("sdk-second")
    assert sandbox.commands.run("whoami; cat who; echo $WHO").stdout == "dev\ndev\ndev\n"
    assert [delete(name) for name in ["sdk-first", "sdk-second", "sdk-second"]] == [204, 204, 404]


def test_a_step_that_fails_is_reported_with_its_output():
    log = []
    template = Template().from_template("base").run_cmd("echo to be seen; echo the cause >&2; exit 7", user="root")
    with pytest.raises(BuildException, match="exit(ed)? .*7") as failed:
        Template.build(template, "sdk-fails", on_build_logs=log.append, **SMALL)
    assert "the cause" in str(failed.value)
    assert {"to be seen", "the cause"} <= {entry.message for entry in log}
    assert "error" in {entry.level for entry in log}
    assert "sdk-fails" not in images()
    assert not Template.exists("sdk-fails")


DOCKERFILE = """
FROM debian:bookworm
ARG WHO=there
ENV GREETING="hello ${WHO}"
WORKDIR /srv/docker
COPY --chown=root --chmod=640 note.txt ./
USER root
RUN <<EOF
echo "$GREETING" > said
id -un >> said
EOF
RUN ["sh", "-c", "echo exec form > exec"]
USER user
"""


def helped(flavour, context):
    """Every helper of the builder that needs no network, after a Dockerfile."""
    builder = flavour(file_context_path=context).from_dockerfile(DOCKERFILE)
    items = [{"src": "note.txt", "dest": "/srv/made/"}, {"src": "app/lib", "dest": "/srv/made/lib", "user": "user", "mode": 0o700}]
    return (
        builder.make_dir(["/srv/made", "/srv/with blanks"], mode=0o755, user="root")
        .copy_items(items)
        .rename("/srv/made/note.txt", "/srv/made/renamed.txt", user="root")
        .make_symlink("/srv/made/renamed.txt", "/srv/link", user="root", force=True)
        .remove("/srv/with blanks", recursive=True, force=True, user="root")
        .set_envs({"HELPED": "yes"})
        .run_cmd(["git init -q /home/user/origin", "cd /home/user/origin", "git -c user.name=x -c user.email=x@x commit -q --allow-empty -m x"])
        .git_clone("/home/user/origin", "/home/user/cloned", depth=1)
        .set_user("root")
        .set_workdir("/srv/made")
    )


@pytest.fixture(scope="module")
def helpers(context):
    """A template of all helpers, whose service is ready when it answers."""
    service = helped(Template, context).set_start_cmd("python3 -m http.server 8010", wait_for_url("http://127.0.0.1:8010"))
    yield Template.build(service, "sdk-helped", **SMALL)
    delete("sdk-helped")


def test_every_helper_of_the_builder(helpers, own):
    sandbox = own("sdk-helped")
    run = lambda line, **options: sandbox.commands.run(line, **options).stdout
    assert run("whoami; pwd; echo $GREETING, $HELPED") == "root\n/srv/made\nhello there, yes\n"
    assert run("cd /srv/docker; stat -c '%a %U' note.txt; cat said exec") == "640 root\nhello there\nroot\nexec form\n"
    assert run("cat /srv/link; stat -c '%a %U' lib lib/data; ls -d /srv/with* 2>/dev/null || true") == (
        "note700 user\n700 user\n"
    )
    assert run("git -C /home/user/cloned log --format=%s", user="user") == "x\n"
    ready = [wait_for_url("http://127.0.0.1:8010"), wait_for_port(8010), wait_for_process("python3"), wait_for_file("/srv/link")]
    run(" && ".join(command.get_cmd() for command in ready))
    assert "FROM debian:bookworm" in Template.to_dockerfile(Template().from_image("debian:bookworm").run_cmd("true"))


def test_the_asynchronous_client_builds_and_tags(helpers, context):
    """The same steps with another end: nothing runs again but the check that it is ready."""

    async def work():
        log = []
        ready = helped(AsyncTemplate, context).set_ready_cmd(wait_for_file("/srv/made/renamed.txt"))
        made = await AsyncTemplate.build(ready, "sdk-ready", tags=["one"], on_build_logs=log.append, **SMALL)
        steps = [entry.message for entry in log if re.search(r"\d+/\d+\] ", entry.message)]
        assert steps and all(line.startswith("CACHED ") for line in steps), steps
        assert (await AsyncTemplate.assign_tags("sdk-ready:one", ["two", "three"])).build_id == made.build_id
        assert {tag.tag for tag in await AsyncTemplate.get_tags("sdk-ready")} == {"one", "two", "three"}
        await AsyncTemplate.remove_tags("sdk-ready", "two")
        assert [await AsyncTemplate.exists(f"sdk-ready:{tag}") for tag in ["one", "two"]] == [True, False]
        assert await AsyncTemplate.alias_exists("sdk-ready:three") and not await AsyncTemplate.alias_exists("no-such")
        with pytest.raises(TemplateException, match="not found"):
            await AsyncTemplate.get_tags("no-such")
        with pytest.raises(TemplateException, match="not found"):
            await AsyncTemplate.assign_tags("sdk-ready:none", "x")
        with pytest.raises(BuildException, match="exit(ed)? .*7"):
            await AsyncTemplate.build(AsyncTemplate().from_template("base").run_cmd("exit 7"), "sdk-fails", **SMALL)

    try:
        asyncio.run(work())
    finally:
        assert delete("sdk-ready") == 204


def test_the_asynchronous_client_builds_in_the_background():
    async def work():
        template = AsyncTemplate().from_template("base").set_envs({"A": "b"})
        started = await AsyncTemplate.build_in_background(template, "sdk-async", **SMALL)
        while (status := await AsyncTemplate.get_build_status(started)).status == TemplateBuildStatus.BUILDING:
            await asyncio.sleep(0.1)
        assert status.status == TemplateBuildStatus.READY
        assert await AsyncTemplate.exists("sdk-async")

    asyncio.run(work())
    assert delete("sdk-async") == 204


def test_what_cannot_be_built_is_refused():
    with pytest.raises(BuildException, match="built-in image"):
        Template.build(Template().from_template("base"), "debian")
    with pytest.raises(BuildException, match="invalid template name"):
        Template.build(Template().from_template("base"), "UPPER")
    with pytest.raises(BuildException, match='template "none" not found'):
        Template.build(Template().from_template("none"), "sdk-refused")
    with pytest.raises(BuildException, match="not in the store"):
        Template.build(Template().from_image("no-such-image:1"), "sdk-refused")
    with pytest.raises(BuildException, match="cpuCount"):
        Template.build(Template().from_template("base"), "sdk-refused", cpu_count=1000)
    with pytest.raises(BuildException, match="AWS or GCP"):
        Template.build(Template().from_aws_registry("r/i", "a", "b", "c"), "sdk-refused")
    with pytest.raises(BuildException, match="AWS or GCP"):
        Template.build(Template().from_gcp_registry("r/i", {"project_id": "x"}), "sdk-refused")
    for foreign in ["ubuntu", "fedora", "alpine", "arch", "python", "node", "bun"]:
        with pytest.raises(BuildException, match="not in the store"):
            Template.build(getattr(Template(), f"from_{foreign}_image")(), "sdk-refused")
    with pytest.raises(BuildException, match='template "devcontainer" not found'):
        Template.build(Template().from_template("devcontainer").beta_set_dev_container_start("/srv"), "sdk-refused")


@pytest.fixture
def registries():
    """The clients have a key that may use registries, as long as a test runs."""
    before = os.environ["E2B_API_KEY"]
    made = json.loads(sandtree("--json", "key", "create", "--name", "registries", "--scope", "sandboxes,registries"))
    os.environ["E2B_API_KEY"] = made["key"]
    yield before
    os.environ["E2B_API_KEY"] = before
    sandtree("key", "rm", made["id"])


def minimal_layer():
    """A tar with a shell, some programs and their libraries, those of this machine."""
    names = ["sh", "bash", "cat", "chown", "cut", "grep", "id", "mkdir", "sleep", "touch"]
    programs = {f"bin/{name}": shutil.which(name) for name in names}
    shown = subprocess.check_output(["ldd", *programs.values()], text=True)
    libraries = {path.lstrip("/"): path for path in re.findall(r"(/\S+) \(0x", shown)}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in ["tmp", "proc", "sys", "dev", "etc", "run", "root"]:
            member = tarfile.TarInfo(name)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(member)
        for name, path in {**programs, **libraries}.items():
            content = Path(os.path.realpath(path)).read_bytes()
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def push(address, name, user):
    """Makes an image of one layer in a registry, by its API alone."""

    def blob(content, kind):
        digest = "sha256:" + hashlib.sha256(content).hexdigest()
        begun = requests.post(f"http://{address}/v2/{name}/blobs/uploads/", auth=user)
        assert begun.status_code == 202, begun.text
        sent = requests.put(begun.headers["Location"], params={"digest": digest}, data=content, auth=user)
        assert sent.status_code == 201, sent.text
        return {"mediaType": kind, "digest": digest, "size": len(content)}

    layer = blob(minimal_layer(), "application/vnd.oci.image.layer.v1.tar")
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["FROM=a registry", "PATH=/usr/bin:/bin"], "WorkingDir": "/tmp", "User": "5"},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
    }
    kind = "application/vnd.oci.image.manifest.v1+json"
    described = blob(json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json")
    manifest = {"schemaVersion": 2, "mediaType": kind, "config": described, "layers": [layer]}
    sent = requests.put(
        f"http://{address}/v2/{name}/manifests/1", data=json.dumps(manifest), headers={"Content-Type": kind}, auth=user
    )
    assert sent.status_code == 201, sent.text


def test_a_template_begins_from_an_image_of_a_registry(registries, own, tmp_path):
    user = ("someone", "a secret")
    with serving(tmp_path, users=[user]) as address:
        push(address, "team/small", user)
        reference = f"{address}/team/small:1"
        named = Template().from_image(reference, username=user[0], password=user[1])
        made = named.run_cmd('echo "$FROM" > from; id -un > who')
        Template.build(made, "sdk-pulled", **SMALL)
        with pytest.raises(BuildException, match="(?i)credentials|denied|unauthorized"):
            Template.build(Template().from_image(reference, username=user[0], password="wrong"), "sdk-refused")
        with pytest.raises(BuildException, match="absent"):
            absent = Template().from_image(f"{address}/team/absent:1", username=user[0], password=user[1])
            Template.build(absent, "sdk-refused")
        with pytest.raises(BuildException, match="scope registries"):
            Template.build(Template().from_image(reference), "sdk-refused", api_key=registries)
    assert "sdk-refused" not in images()
    sandbox = own("sdk-pulled")
    assert sandbox.files.read("/home/user/from") == "a registry\n"
    assert sandbox.files.read("/home/user/who") == "user\n"
    assert sandbox.commands.run("id -un; echo $FROM").stdout == "user\na registry\n"
    assert delete("sdk-pulled") == 204


class Api:
    """The calls that the client makes, to send what it never would."""

    def __init__(self):
        self.url = Running.server.url
        self.key = {"X-API-KEY": os.environ["E2B_API_KEY"]}

    def build(self, name):
        asked = requests.post(f"{self.url}/v3/templates", json={"name": name, "minFreeDiskMb": 64}, headers=self.key)
        assert asked.status_code == 202
        return asked.json()["buildID"]

    def link(self, name, number):
        digest = f"{number:064x}"
        link = requests.get(f"{self.url}/templates/{name}/files/{digest}", headers=self.key)
        assert link.status_code == 201
        return digest, link.json()

    def start(self, name, build, digest, target="/srv/x"):
        step = {"type": "COPY", "args": ["a", target, "", ""], "filesHash": digest}
        body = {"fromTemplate": "base", "steps": [step]}
        return requests.post(f"{self.url}/v2/templates/{name}/builds/{build}", json=body, headers=self.key)

    def end(self, name, build):
        def ended():
            status = requests.get(f"{self.url}/templates/{name}/builds/{build}/status", headers=self.key).json()
            return status["status"] != "building" and status

        return eventually(ended, 240)


def archive(*members):
    """A tar with members of any name: (name, type, content or target)."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, kind, content in members:
            member = tarfile.TarInfo(name)
            member.type = kind
            if kind == tarfile.REGTYPE:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            else:
                member.linkname = content
                tar.addfile(member)
    return packed.getvalue()


HOSTILE = [
    archive(("a", tarfile.REGTYPE, b"x"), ("/etc/absolute", tarfile.REGTYPE, b"x")),
    archive(("a", tarfile.REGTYPE, b"x"), ("../../../../tmp/sandtree-up", tarfile.REGTYPE, b"x")),
    archive(("a", tarfile.LNKTYPE, "/etc/passwd")),
    archive(("a", tarfile.BLKTYPE, "")),
    b"no archive at all" * 100,
]


def test_hostile_archives_are_refused():
    api = Api()
    for number, packed in enumerate(HOSTILE):
        build = api.build("sdk-hostile")
        digest, link = api.link("sdk-hostile", number)
        assert link["present"] is False
        assert requests.put(link["url"], data=packed).status_code == 200
        assert api.start("sdk-hostile", build, digest).status_code == 202
        status = api.end("sdk-hostile", build)
        assert status["status"] == "error", status
        assert "archive" in status["reason"]["message"], status
    assert not os.path.exists("/tmp/sandtree-up") and not os.path.exists("/etc/absolute")
    assert not Template.exists("sdk-hostile")


def test_an_archive_that_unpacks_without_end_is_refused():
    api = Api()
    api.build("sdk-bomb")
    _, link = api.link("sdk-bomb", 1)
    bomb = gzip.compress(b"\0" * (1 << 20), 9)
    refused = requests.put(link["url"], data=bomb * 400)
    assert refused.status_code == 413
    assert "too large" in refused.json()["message"]
    assert api.link("sdk-bomb", 1)[1]["present"] is False


def test_an_archive_that_no_build_uses_is_removed():
    api = Api()
    _, link = api.link("sdk-unused", 3)
    assert requests.put(link["url"], data=archive(("a", tarfile.REGTYPE, b"x"))).status_code == 200
    assert api.link("sdk-unused", 3)[1]["present"] is True
    before = set(glob.glob(f"{STORE}/server/archives/*.tar"))
    for note in glob.glob(f"{STORE}/server/uploads/*.json"):
        text = Path(note).read_text()
        Path(note).write_text(re.sub(r'"used_at_unix_ms":\d+', '"used_at_unix_ms":1', text))
    assert api.link("sdk-unused", 3)[1]["present"] is False
    assert before and not glob.glob(f"{STORE}/server/archives/*.tar")


def test_addresses_for_uploads_are_signed():
    api = Api()
    _, link = api.link("sdk-signed", 7)
    url = link["url"]
    assert requests.put(url.split("?")[0], data=b"x").status_code == 401
    assert requests.put(url[:-1] + ("0" if url[-1] != "0" else "1"), data=b"x").status_code == 401
    other = url.replace(f"{7:064x}", f"{8:064x}")
    assert requests.put(other, data=b"x").status_code == 401
    assert requests.get(f"{api.url}/templates/sdk-signed/files/..%2Fx", headers=api.key).status_code == 400


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_build_whose_server_ends_has_failed_and_leaves_nothing(end):
    before = sandboxes()
    template = Template().from_template("base").run_cmd("echo begun; sleep 3600")
    started = Template.build_in_background(template, "sdk-killed", **SMALL)
    eventually(lambda: "begun" in [entry.message for entry in Template.get_build_status(started).log_entries], 240)
    address = Running.server.address
    getattr(Running.server, end)()
    use(Server(address))
    status = Template.get_build_status(started)
    assert status.status == TemplateBuildStatus.ERROR
    assert "the server ended during the build" in status.reason.message
    eventually(lambda: sandboxes() == before)
    assert not Template.exists("sdk-killed")
    eventually(lambda: os.listdir(os.path.join(STORE, "staging")) == [])


def test_templates_of_cubesandbox():
    made = cubesandbox.Template.build(image="debian:stable", env=["A=b"], cpu_count=1)
    status = eventually(
        lambda: (s := cubesandbox.Template.get_build_status(made.template_id, made.job_id)).status != "building" and s, 240
    )
    assert status.status == "ready", status
    cubesandbox.Template.set_alias(made.template_id, "sdk-cube")
    info = cubesandbox.Template.get(made.template_id)
    assert (info.template_id, info.name) == (made.template_id, "sdk-cube")
    assert made.template_id in {template.template_id for template in cubesandbox.Template.list()}
    assert cubesandbox.Template.get_build_logs(made.template_id, made.job_id)["logs"]
    sandbox = cubesandbox.Sandbox.create("sdk-cube", timeout=120)
    assert sandbox.commands.run("echo $A").stdout == "b\n"
    sandbox.kill()
    again = cubesandbox.Template.rebuild(made.template_id)
    assert again.template_id == made.template_id and again.job_id != made.job_id
    status = eventually(
        lambda: (s := cubesandbox.Template.get_build_status(made.template_id, again.job_id)).status != "building" and s, 240
    )
    assert status.status == "ready", status
    with pytest.raises(cubesandbox.TemplateNotFoundError):
        cubesandbox.Template.rebuild(f"tpl-{uuid.uuid4().hex[:24]}")
    with pytest.raises(cubesandbox.ApiError, match="dns"):
        cubesandbox.Template.build(image="debian", dns=["1.1.1.1"])
    for name in [made.template_id, "sdk-cube"]:
        cubesandbox.Template.delete(name)
    with pytest.raises(cubesandbox.TemplateNotFoundError):
        cubesandbox.Template.get(f"tpl-{uuid.uuid4().hex[:24]}")
