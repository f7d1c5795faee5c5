"""The control plane by plain requests: what clients of other versions send, lists, limits of keys, and refusals."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone

import pytest
import requests
from e2b import RateLimitException, Sandbox

from conftest import Running, eventually, sandtree
from test_observed import api

MISSING = "/sandboxes/0123456789abcdef"


def place(sandbox):
    return f"/sandboxes/{sandbox.sandbox_id}"


def left(sandbox):
    """The seconds until a sandbox ends."""
    return sandbox.get_info().end_at.timestamp() - time.time()


def boot(sandbox):
    return sandbox.commands.run("cat /proc/sys/kernel/random/boot_id").stdout


def test_sandboxes_are_created_and_joined_in_both_spellings():
    for version in ["", "/v2"]:
        made = api(f"{version}/sandboxes", "POST", json={"templateID": "base", "timeout": 60})
        assert made.status_code == 201, made.text
        assert {"sandboxID", "templateID", "clientID", "envdVersion", "domain"} <= set(made.json())
        id = made.json()["sandboxID"]
        assert api(f"/sandboxes/{id}/pause", "POST").status_code == 204
        joined = api(f"{version}/sandboxes/{id}/connect", "POST", json={"timeout": 60})
        assert (joined.status_code, joined.json()["sandboxID"]) == (200, id)
        assert joined.json()["envdAccessToken"] == made.json()["envdAccessToken"]
        assert api(f"/sandboxes/{id}", "DELETE").status_code == 204


def test_resume_is_for_sandboxes_that_rest(sandbox):
    refused = api(place(sandbox) + "/resume", "POST", json={})
    assert (refused.status_code, refused.json()["code"]) == (409, 409)
    sandbox.files.write("/dev/shm/kept", "in memory")
    assert api(place(sandbox) + "/pause", "POST").status_code == 204
    again = api(place(sandbox) + "/pause", "POST")
    assert (again.status_code, again.json()["code"]) == (409, 409)
    late = api(place(sandbox) + "/timeout", "POST", json={"timeout": 10})
    assert (late.status_code, late.json()["code"]) == (404, 404)
    resumed = api(place(sandbox) + "/resume", "POST", json={"timeout": 700})
    assert (resumed.status_code, resumed.json()["sandboxID"]) == (201, sandbox.sandbox_id)
    assert sandbox.files.read("/dev/shm/kept") == "in memory"
    assert 690 < left(sandbox) < 701


def test_refreshes_only_lengthen(sandbox):
    sandbox.set_timeout(100)
    assert api(place(sandbox) + "/refreshes", "POST", json={"duration": 600}).status_code == 204
    assert 590 < left(sandbox) < 601
    for body in [{"duration": 5}, {}]:
        assert api(place(sandbox) + "/refreshes", "POST", json=body).status_code == 204
    assert 580 < left(sandbox) < 601


def test_logs_are_the_console_in_both_spellings(sandbox):
    sandbox.commands.run("echo a line of the console > /dev/console", user="root")
    for version, field in [("", "line"), ("/v2", "message")]:
        found = lambda: [entry[field] for entry in api(version + place(sandbox) + "/logs").json()["logs"]]
        eventually(lambda: any("a line of the console" in line for line in found()))
    entry = api("/v2" + place(sandbox) + "/logs").json()["logs"][-1]
    assert datetime.fromisoformat(entry["timestamp"].replace("Z", "+00:00"))
    assert (entry["level"], entry["fields"]) == ("info", {})


def test_what_is_missing_or_wrong_is_refused():
    for method, path, body in [
        ("GET", "", None),
        ("DELETE", "", None),
        ("GET", "/logs", None),
        ("GET", "/metrics", None),
        ("POST", "/pause", {}),
        ("POST", "/resume", {}),
        ("POST", "/connect", {}),
        ("POST", "/refreshes", {}),
        ("POST", "/timeout", {"timeout": 1}),
        ("POST", "/fork", {}),
        ("POST", "/snapshots", {}),
        ("POST", "/rollback", {"snapshotID": "x"}),
        ("PUT", "/network", {}),
    ]:
        answer = api(MISSING + path, method, json=body)
        assert (answer.status_code, answer.json()["code"]) == (404, 404), path
        assert "0123456789abcdef" in answer.json()["message"], path
    assert api(MISSING + "/timeout", "POST", json={}).status_code == 400
    assert api("/v2/sandboxes?metadata=x").status_code == 400
    for query in ["limit=0", "limit=101", "limit=x", "nextToken=rubbish"]:
        assert api(f"/v2/sandboxes?{query}").status_code == 400, query


def test_secrets_are_refused_clearly():
    for method, path in [("GET", "/secrets"), ("POST", "/secrets"), ("GET", "/secrets/x"), ("DELETE", "/secrets/x")]:
        refused = api(path, method, json={"name": "x", "value": "y"} if method == "POST" else None)
        assert (refused.status_code, refused.json()["code"]) == (501, 501), path
        assert "secret" in refused.json()["message"].lower()


def test_lists_are_ordered_and_filtered(own):
    mine = {"metadata": "of=this%2520test"}
    first, second = own("base", metadata={"of": "this test"}), own("debian", metadata={"of": "this test"})
    first.pause()

    def ids(path="/v2/sandboxes", **query):
        answer = api(path, params={**mine, **query})
        assert answer.status_code == 200, answer.text
        return [one["sandboxID"] for one in answer.json()]

    both = [first.sandbox_id, second.sandbox_id]
    assert ids() == ids(order="desc") == both[::-1]
    assert ids(order="asc") == both
    assert ids(state="paused") == both[:1] and ids(state="running") == both[1:]
    assert ids(state="running,paused", order="asc") == both
    # The older spelling shows what runs.
    assert ids("/sandboxes") == both[1:] and ids("/sandboxes", state="paused") == both[:1]
    assert ids(template="debian") == both[1:] and ids(template="base") == both[:1]
    begun = second.get_info().started_at
    assert ids(startedAfter=begun.isoformat()) == both[1:]
    elsewhere = begun.astimezone(timezone(timedelta(hours=5, minutes=30)))
    assert ids(startedAfter=elsewhere.isoformat()) == both[1:]
    assert ids(startedAfter=(begun + timedelta(seconds=60)).isoformat()) == []
    assert api("/v2/sandboxes?startedAfter=yesterday").status_code == 400


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_stay_right_when_sandboxes_end_in_between(own, order):
    mine = {"metadata": f"pages={order}", "order": order, "limit": 1}
    made = [own(metadata={"pages": order}) for _ in range(3)]
    if order == "desc":
        made.reverse()
    first = api("/v2/sandboxes", params=mine)
    made[0].kill()
    second = api("/v2/sandboxes", params={**mine, "nextToken": first.headers["x-next-token"]})
    made[1].kill()
    last = api("/v2/sandboxes", params={**mine, "nextToken": second.headers["x-next-token"]})
    pages = [[one["sandboxID"] for one in page.json()] for page in [first, second, last]]
    assert pages == [[one.sandbox_id] for one in made] and "x-next-token" not in last.headers


def test_a_pause_without_memory_keeps_the_disk_alone(own):
    resting = own(timeout=300, lifecycle={"on_timeout": {"action": "pause", "mode": "filesystem"}})
    boots = [boot(resting)]
    resting.files.write("/dev/shm/memory", "x")
    resting.files.write("disk", "kept")
    assert api(place(resting) + "/pause", "POST", json={"memory": False}).status_code == 204
    resting.connect(timeout=300)
    boots.append(boot(resting))
    # At the end of its lifetime it does the same by itself.
    resting.set_timeout(1)
    eventually(lambda: resting.get_info().state == "paused")
    assert resting.get_info().lifecycle["on_timeout"] == "pause"
    resting.connect(timeout=300)
    boots.append(boot(resting))
    assert len(set(boots)) == 3
    assert resting.files.read("disk") == "kept" and not resting.files.exists("/dev/shm/memory")


def test_a_sandbox_from_a_snapshot_is_as_the_saved_one(own):
    settings = {"allow_internet_access": False, "envs": {"FOO": "inherited"}, "metadata": {"of": "a snapshot"}}
    saved = own(timeout=500, lifecycle={"on_timeout": "pause", "auto_resume": True}, **settings)
    snapshot = saved.create_snapshot()
    made = api("/v2/sandboxes", "POST", json={"templateID": snapshot.snapshot_id})
    try:
        assert made.status_code == 201, made.text
        copy = Sandbox.connect(made.json()["sandboxID"])
        info = copy.get_info()
        assert info.metadata == {"of": "a snapshot"}
        assert info.allow_internet_access is False
        assert info.lifecycle == {"on_timeout": "pause", "auto_resume": True}
        assert 480 < left(copy) < 501
        assert copy.commands.run("echo $FOO").stdout == "inherited\n"
        copy.kill()
    finally:
        Sandbox.delete_snapshot(snapshot.snapshot_id)


def envd(sandbox, path, **headers):
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "X-Access-Token": sandbox._envd_access_token, **headers}
    return requests.get(Running.server.url + path, headers=headers)


def test_the_data_plane_tells_variables_and_figures(sandbox):
    variables = envd(sandbox, "/envs")
    assert variables.status_code == 200
    assert variables.json()["FOO"] == "from create" and variables.json()["E2B_SANDBOX"] == "true"
    figures = envd(sandbox, "/metrics").json()
    assert abs(figures["ts"] - time.time()) < 60
    assert 0 < figures["mem_used"] < figures["mem_total"] and 0 <= figures["mem_cache"] < figures["mem_total"]
    assert figures["cpu_count"] == 1 and 0 < figures["disk_used"] < figures["disk_total"]
    for path in ["/envs", "/metrics"]:
        assert envd(sandbox, path, **{"X-Access-Token": "wrong"}).status_code == 401


@pytest.fixture
def limited():
    """Makes keys with limits."""
    made = []

    def make(*limits):
        made.append(json.loads(sandtree("--json", "key", "create", *limits)))
        return made[-1]["key"]

    yield make
    for one in made:
        sandtree("key", "rm", one["id"])


def create(key):
    return api("/v2/sandboxes", "POST", {"X-API-KEY": key}, json={"timeout": 60})


def test_a_key_limits_memory(limited):
    key = limited("--max-memory", "600M")
    first = Sandbox.create(timeout=60, api_key=key)
    refused = create(key)
    assert (refused.status_code, refused.json()["code"]) == (429, 429)
    assert refused.json()["message"] == "this key may use 600 MiB of memory at a time"
    # A client that tries again would only be refused again.
    assert refused.headers["should-retry"] == "false" and "retry-after" not in refused.headers
    began = time.monotonic()
    with pytest.raises(RateLimitException, match="600 MiB"):
        first.fork(api_key=key)
    assert time.monotonic() - began < 5
    first.pause()
    second = Sandbox.create(timeout=60, api_key=key)
    with pytest.raises(RateLimitException, match="600 MiB"):
        first.connect(api_key=key)
    second.kill()
    first.connect(api_key=key)
    first.kill()


def test_a_key_limits_creations_a_minute(limited):
    key = limited("--max-creates-per-minute", "2")
    ids = [create(key).json()["sandboxID"] for _ in range(2)]
    refused = create(key)
    assert refused.status_code == 429
    assert refused.json()["message"] == "this key may create 2 sandboxes a minute"
    # A client waits as long as the answer says, and then succeeds.
    assert 1 <= int(refused.headers["retry-after"]) <= 60 and "should-retry" not in refused.headers
    other = create(limited("--max-creates-per-minute", "1"))
    for id in [*ids, other.json()["sandboxID"]]:
        assert Sandbox.kill(id)


def test_limits_hold_for_requests_at_the_same_time(limited):
    for limit in [["--max-sandboxes", "1"], ["--max-memory", "600M"]]:
        key = limited(*limit)
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: create(key), range(4)))
        for answer in answers:
            if answer.status_code == 201:
                assert Sandbox.kill(answer.json()["sandboxID"])
        assert sorted(answer.status_code for answer in answers) == [201, 429, 429, 429], limit
