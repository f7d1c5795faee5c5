"""What operators see of the server: figures, logs, names of requests; and what a server finds again after a restart."""

import json
import os
import re
import subprocess
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest
import requests
from e2b import PtySize, Sandbox

from conftest import PROGRAM, STORE, Running, Server, eventually, sandtree, use


def api(path, method="GET", headers=None, server=None, **options):
    """A request to the control plane, with the key of the tests."""
    url = (server or Running.server).url + path
    headers = {"X-API-KEY": os.environ["E2B_API_KEY"], **(headers or {})}
    return requests.request(method, url, headers=headers, **options)


def figures():
    """The figures of the server by name and labels."""
    answer = api("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
    lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def lines_of_log():
    """The lines that servers of this run have logged about requests."""
    log = Path(Running.server.log.name).read_text().splitlines()
    parsed = [json.loads(line) for line in log if line.startswith("{")]
    return [line for line in parsed if line.get("message") == "answered"]


def test_figures_count_what_is_done(own):
    before = figures()
    made = own(timeout=300)
    made.pause()
    made.connect(timeout=300)
    [copy] = made.fork()
    copy.kill()
    snapshot = made.create_snapshot()
    assert api(f"/sandboxes/{made.sandbox_id}/no-such").status_code == 404
    assert api("/sandboxes/missing").status_code == 404
    after = figures()
    grown = lambda name: after.get(name, 0) - before.get(name, 0)
    done = lambda operation: grown(f'sandtree_operations_total{{operation="{operation}",outcome="done"}}')
    assert [done(name) for name in ["create", "pause", "resume", "fork", "snapshot", "kill"]] == [1] * 6
    for operation in ["create", "resume", "fork"]:
        for part in ["host", "guest"]:
            labels = f'{{operation="{operation}",part="{part}"}}'
            assert grown(f"sandtree_restore_seconds_count{labels}") == 1, labels
            assert grown(f"sandtree_restore_seconds_sum{labels}") > 0, labels
    assert grown('sandtree_errors_total{code="not_found"}') == 2
    assert grown("sandtree_received_bytes_total") > 500 and grown("sandtree_sent_bytes_total") > 500
    assert after["sandtree_requests_under_way"] == 1 and after["sandtree_connections"] >= 1
    assert after['sandtree_sandboxes{state="running"}'] >= 1
    Sandbox.delete_snapshot(snapshot.snapshot_id)


def test_labels_are_not_chosen_by_clients(own):
    made = own()
    api("/sandboxes/" + made.sandbox_id)
    api("/some/unlikely-path")
    api("/sandboxes/unlikely-id")
    requests.request("BREW", Running.server.url + "/unlikely-method")
    made.commands.run("true")
    text = api("/metrics").text
    assert made.sandbox_id not in text and "unlikely" not in text and "BREW" not in text
    assert 'route="/process.Process/Start"' in text and 'route="/sandboxes/{id}"' in text


def test_figures_need_a_key_unless_the_configuration_opens_them_on_loopback(tmp_path):
    assert requests.get(Running.server.url + "/metrics").status_code == 401
    config = tmp_path / "sandtree.toml"
    config.write_text('metrics = "loopback"\n')
    other = Server("127.0.0.1:0", "--config", str(config))
    try:
        assert requests.get(other.url + "/metrics").status_code == 200
        assert requests.get(other.url + "/v2/sandboxes").status_code == 401
    finally:
        assert other.stop() == 0
    exposed = [PROGRAM, "--home", STORE, "serve", "--listen", "0.0.0.0:0", "--insecure-listen", "--config", str(config)]
    refused = subprocess.run(exposed, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 125 and "bearer token" in refused.stderr, refused.stderr


def test_traces_are_refused_by_a_program_without_them(tmp_path):
    config = tmp_path / "sandtree.toml"
    config.write_text('traces = "http://127.0.0.1:4318"\n')
    words = [PROGRAM, "--home", STORE, "serve", "--listen", "127.0.0.1:0", "--config", str(config)]
    refused = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 125 and "--features otlp" in refused.stderr, refused.stderr


def test_a_request_has_one_name_in_all_logs(own):
    made = own()
    answer = api(f"/sandboxes/{made.sandbox_id}/timeout", "POST", {"X-Request-Id": "trace-7.a"}, json={"timeout": 200})
    assert (answer.status_code, answer.headers["x-request-id"]) == (204, "trace-7.a")
    line = eventually(lambda: [line for line in lines_of_log() if line["request"] == "trace-7.a"])[0]
    keys = json.loads(sandtree("--json", "key", "ls"))
    assert line["key"] in {key["id"] for key in keys}
    assert (line["method"], line["route"], line["status"]) == ("POST", "/sandboxes/{id}/timeout", 204)
    assert (line["sandbox"], line["received"], line["code"]) == (made.sandbox_id, 16, "-")
    keeper = Path(STORE, "sandboxes", made.sandbox_id, "keeper.log").read_text()
    assert re.search(r"request=\"?trace-7\.a\"? verb=\"?expire", keeper), keeper
    # The keeper was started for another request: its creation.
    assert re.search(r"request=\"?[0-9a-f]{32}\"? verb=\"?create", keeper), keeper


def test_names_that_would_break_a_log_are_replaced():
    for hostile in ["a b", "x" * 129, "a\"b", "\xe4"]:
        answer = api("/sandboxes/missing", headers={"X-Request-Id": hostile.encode("latin-1")})
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"]), hostile
    assert api("/sandboxes/missing").json()["code"] == 404
    line = eventually(lambda: [line for line in lines_of_log() if line["status"] == 404][-1:])[0]
    assert line["code"] == "not_found"


def test_usage_of_the_past_outlives_the_server(own):
    made = own(timeout=600)
    first = eventually(lambda: made.get_metrics())[0]
    Running.server.kill()
    alone = datetime.now(timezone.utc)
    end = time.monotonic() + 6
    eventually(lambda: time.monotonic() > end)
    together = datetime.now(timezone.utc)
    use(Server(Running.server.address))
    samples = made.get_metrics()
    assert samples[0].timestamp == first.timestamp
    assert any(alone < sample.timestamp < together for sample in samples), "its keeper has taken samples meanwhile"
    assert [sample.timestamp for sample in samples] == sorted(sample.timestamp for sample in samples)
    assert all(0 <= sample.cpu_used_pct <= 100 * sample.cpu_count for sample in samples)
    assert 0 < samples[-1].mem_used <= samples[-1].mem_total
    last = samples[-1].timestamp
    some = [sample.timestamp for sample in made.get_metrics(start=last, end=last)]
    assert last in some and first.timestamp not in some
    for _ in range(20):
        asked = made.get_metrics()
    assert len(asked) - len(samples) <= 3, "one who asks often does not displace the past"
    several = api("/sandboxes/metrics", params={"sandbox_ids": f"{made.sandbox_id},missing"}).json()["sandboxes"]
    assert list(several) == [made.sandbox_id] and several[made.sandbox_id]["memTotal"] == samples[-1].mem_total
    assert api("/sandboxes/metrics").status_code == 400


def rpc(sandbox, method, message):
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "X-Access-Token": sandbox._envd_access_token}
    return requests.post(f"{Running.server.url}/process.Process/{method}", json=message, headers=headers)


def test_another_server_knows_how_commands_were_started(own):
    made = own(timeout=600)
    typed = b""

    def seen(output):
        nonlocal typed
        typed += output

    terminal = made.pty.create(PtySize(rows=24, cols=80), cwd="/tmp", timeout=120)
    start = {"process": {"cmd": "/bin/sh", "args": ["-c", "read line; echo got $line"]}, "tag": "mine", "stdin": True}
    headers = {
        "E2b-Sandbox-Id": made.sandbox_id,
        "X-Access-Token": made._envd_access_token,
        "Content-Type": "application/connect+json",
    }
    body = json.dumps(start).encode()
    envelope = b"\0" + len(body).to_bytes(4, "big") + body
    tagged = requests.post(f"{Running.server.url}/process.Process/Start", data=envelope, headers=headers, stream=True)
    assert tagged.status_code == 200
    eventually(lambda: len(made.commands.list()) == 2)
    Running.server.kill()
    use(Server(Running.server.address))
    listed = {process.tag or None: process for process in made.commands.list()}
    assert (listed["mine"].cmd, listed["mine"].args) == ("/bin/sh", start["process"]["args"])
    assert (listed[None].cmd, listed[None].args, listed[None].cwd) == ("/bin/bash", ["-i", "-l"], "/tmp")
    joined = made.pty.connect(terminal.pid)
    made.pty.send_stdin(terminal.pid, b"tty; exit 3\n")
    try:
        joined.wait(on_pty=seen)
    except Exception as ended:
        assert "3" in str(ended)
    assert b"/dev/pts/" in typed
    assert rpc(made, "SendInput", {"process": {"tag": "mine"}, "input": {"stdin": "aXQK"}}).status_code == 200
    eventually(lambda: not made.commands.list())
    assert rpc(made, "SendSignal", {"process": {"tag": "mine"}, "signal": "SIGNAL_SIGTERM"}).status_code == 404
    # Nobody has to discard them: their keeper does.
    output = Path(STORE, "sandboxes", made.sandbox_id, "execs")
    eventually(lambda: not list(output.glob("*/*/*")), 90)


def test_parts_of_large_files_are_read_from_where_they_are(own):
    made = own(timeout=300)
    made.commands.run("truncate -s 3G large && printf tail >> large")
    url = made.download_url("large")
    began = time.monotonic()
    answer = requests.get(url, headers={"Range": f"bytes={3 << 30}-"})
    assert (answer.status_code, answer.content) == (206, b"tail")
    assert answer.headers["content-range"] == f"bytes {3 << 30}-{(3 << 30) + 3}/{(3 << 30) + 4}"
    assert requests.get(url, headers={"Range": "bytes=-6"}).content == b"\0\0tail"
    assert time.monotonic() - began < 30, "the guest reads what is before them"
