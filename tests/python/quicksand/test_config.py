"""Configuration: defaults, checks and messages."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from quicksand import (
    Accelerator,
    AlpineSandbox,
    BootTiming,
    Forward,
    Guest,
    Host,
    Mount,
    NetworkMode,
    PortForward,
    Sandbox,
    SandboxConfig,
    UbuntuDesktopSandbox,
)
from quicksand_core.utils import format_bytes, parse_memory_size


def test_defaults() -> None:
    config = SandboxConfig(image="ubuntu")
    assert config.model_dump() == {
        "image": "ubuntu",
        "arch": None,
        "memory": "512M",
        "cpus": 1,
        "mounts": [],
        "port_forwards": [],
        "network_mode": NetworkMode.MOUNTS_ONLY,
        "extra_qemu_args": [],
        "boot_timeout": 60.0,
        "accel": "auto",
        "disk_size": None,
        "enable_display": False,
        "host_dns_proxy": None,
    }


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(ValidationError):
        SandboxConfig(image="ubuntu").memory = "1G"  # type: ignore[misc]


def test_values_are_coerced() -> None:
    config = SandboxConfig.model_validate(
        {
            "image": "a",
            "network_mode": "full",
            "accel": "kvm",
            "mounts": [{"host": "/a", "guest": "/b"}],
            "port_forwards": [{"src": {"kind": "host", "port": 1}, "dst": {"kind": "guest", "port": 2}}],
        }
    )
    assert config.network_mode is NetworkMode.FULL and config.accel is Accelerator.KVM
    assert config.mounts == [Mount("/a", "/b")]
    assert config.port_forwards == [Forward(Host(1), Guest(2))]


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory": ""},
        {"memory": "0"},
        {"memory": "-1G"},
        {"memory": "much"},
        {"memory": 512},
        {"network_mode": "mounts-only"},
        {"accel": "magic"},
        {"cpus": "many"},
        {"port_forwards": [Forward(Host(1), Guest(2)), Forward(Host(1), Guest(3))]},
        {"port_forwards": [Forward(Guest(1), Host(2)), Forward(Guest(1), Host(3))]},
        {"port_forwards": [Forward(Guest("10.0.2.100:445"), Host(3))]},
        {"port_forwards": [Forward(Guest(1), Host(3))], "network_mode": "none"},
        {"port_forwards": [{"host": 1, "guest": 2}]},
    ],
)
def test_wrong_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SandboxConfig.model_validate({"image": "a", **wrong})


@pytest.mark.parametrize(
    ("text", "size"),
    [("512M", 512 << 20), ("1.5g", 3 << 29), ("2 GiB", 2 << 30), ("4GB", 4 << 30), ("64", 64 << 20)],
)
def test_memory(text: str, size: int) -> None:
    assert parse_memory_size(text) == size
    assert SandboxConfig(image="a", memory=text).memory_bytes == size


def test_sizes_are_short() -> None:
    assert [format_bytes(n) for n in (5, 1536, 3 << 29, 20 << 30)] == ["5B", "1.5K", "1.5G", "20G"]


def test_a_sandbox_takes_keywords_only() -> None:
    with pytest.raises(TypeError):
        Sandbox("ubuntu")  # type: ignore[misc]
    with pytest.raises(TypeError):
        Sandbox()  # type: ignore[call-arg]


def test_an_unknown_keyword_is_an_error_and_not_dropped() -> None:
    with pytest.raises(TypeError, match="did you mean 'memory'"):
        Sandbox(image="ubuntu", memmory="1G")  # type: ignore[call-arg]


def test_a_new_sandbox() -> None:
    sandbox = Sandbox(image="ubuntu", boot_timeout=7)
    assert not sandbox.is_running
    assert sandbox.accelerator is None and sandbox.qemu_command is None
    assert sandbox.boot_timing is None and sandbox.vnc_port is None
    assert sandbox.active_mounts == [] and sandbox.boot_timeout == 7


def test_subclasses() -> None:
    assert AlpineSandbox().config.image == "alpine"
    desktop = UbuntuDesktopSandbox(cpus=4).config
    assert (desktop.image, desktop.memory, desktop.cpus) == ("ubuntu-desktop", "1G", 4)
    assert desktop.enable_display


@pytest.mark.parametrize(
    "endpoint",
    [Host("0.0.0.0", 80), Host(80, "0.0.0.0"), Host("0.0.0.0:80"), Host(port=80, address="0.0.0.0")],
)
def test_forms_of_endpoints(endpoint: Host) -> None:
    assert (endpoint.address, endpoint.port) == ("0.0.0.0", 80)
    assert repr(endpoint) == "Host(port=80, address='0.0.0.0')"


def test_defaults_of_endpoints() -> None:
    assert Host(8080).address == "127.0.0.1" and Guest(80).address is None
    assert Host(None, 8080) == Host(8080)
    assert Forward(Guest(3128), Host(1)).guest.address == "10.0.2.101"


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((1, 2), TypeError),
        ((True,), TypeError),
        ((1.5,), TypeError),
        ((), TypeError),
        (("a", "b"), TypeError),
        (("a", 1, 2), TypeError),
        ((0,), ValueError),
        ((65536,), ValueError),
        ((":80",), ValueError),
        (("a:b",), ValueError),
    ],
)
def test_wrong_endpoints(args: tuple[Any, ...], error: type[Exception]) -> None:
    for kind in (Host, Guest):
        with pytest.raises(error):
            kind(*args)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Host(1), Host(2)),
        (Guest(1), Guest(2)),
        (Host("localhost", 1), Guest(2)),
        (Host(1), Guest("guest", 2)),
        (Guest("10.0.2.2", 1), Host(2)),
        (Guest("10.0.2.15", 1), Host(2)),
        (Guest("192.168.0.1", 1), Host(2)),
    ],
)
def test_wrong_forwards(source: Any, target: Any) -> None:
    with pytest.raises(ValueError):
        Forward(source, target)


def test_port_forward_is_deprecated() -> None:
    with pytest.warns(DeprecationWarning):
        forward = PortForward(host=8080, guest=80)
    assert forward == Forward(Host(8080), Guest(80)) and forward.host_to_guest


def test_boot_timing() -> None:
    timing = BootTiming(resolve_image_s=1.0, connect_agent_s=3.0, kernel_boot_s=2.0)
    assert timing.total_s == 4.0
    shown = str(timing)
    assert "connect_agent          ###############-----   3.000s ( 75.0%)" in shown
    assert "├ kernel_boot" in shown and "init_system" not in shown
