"""The options of a new sandbox: their spelling, and the request that they become."""

from __future__ import annotations

import functools
import os
from typing import Any, Callable, Mapping, Optional, Sequence, TypeVar, Union

from ._errors import Invalid
from ._types import Mount, NetworkMode, PathLike, Port

F = TypeVar("F", bound=Callable[..., Any])

Size = Union[int, str]
PortLike = Union[Port, "tuple[int, int]", str, int]

AUTO_CHECKPOINTS = 50
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def invalid(what: str, value: object, rule: str) -> Invalid:
    arguments = {"what": what, "value": str(value), "rule": rule}
    return Invalid(f"invalid {what} {value!r}: {rule}", code="invalid", kind="invalid", arguments=arguments)


def suggests(function: F) -> F:
    """Refuses unknown keywords with the nearest known one."""
    code = function.__code__
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known:
                import difflib

                near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"{function.__qualname__}() has no option {name!r}{hint}")
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def size(what: str, value: Optional[Size]) -> Optional[int]:
    """Bytes, from a number of bytes or a text such as "512M" or "1.5G"; units are powers of 1024."""
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = str(value).strip().upper()
    digits = text.rstrip("BKMGTI ")
    unit = text[len(digits) :].strip().rstrip("B").rstrip("I")
    try:
        number = float(digits) if "." in digits else int(digits)
        return int(number * (1 << _UNITS[unit]))
    except (ValueError, KeyError, OverflowError):
        raise invalid(what, value, "a number of bytes, or a text such as 512M or 2G") from None


def port(value: PortLike) -> dict[str, int]:
    """A published port, from Port, (host, guest), "HOST:GUEST", or the guest's port alone."""
    if isinstance(value, Port):
        host, guest = value.host, value.guest
    elif isinstance(value, int):
        host, guest = 0, value
    elif isinstance(value, str):
        parts = value.split(":")
        if len(parts) != 2 or not all(part.isdigit() for part in parts):
            raise invalid("port", value, "HOST:GUEST, each up to 65535")
        host, guest = int(parts[0]), int(parts[1])
    else:
        host, guest = value
    if not 0 <= host <= 65535 or not 1 <= guest <= 65535:
        raise invalid("port", f"{host}:{guest}", "HOST:GUEST, each up to 65535")
    return {"host": host, "guest": guest}


def mount(value: Union[Mount, str]) -> dict[str, Any]:
    """A mount, from Mount or "HOST:GUEST[:ro|:cow]"."""
    if isinstance(value, Mount):
        return value._spec()
    paths, _, access = value.rpartition(":")
    if access not in ("ro", "rw", "cow"):
        paths, access = value, "rw"
    host, _, guest = paths.rpartition(":")
    if not host or not guest.startswith("/"):
        raise invalid("mount", value, "HOST:GUEST, HOST:GUEST:ro or HOST:GUEST:cow, with an absolute GUEST")
    return Mount(host, guest, readonly=access == "ro", cow=access == "cow")._spec()


def milliseconds(value: Optional[float]) -> Optional[int]:
    return None if value is None else int(value * 1000)


def absolute(path: Optional[PathLike]) -> Optional[str]:
    return None if path is None else os.path.abspath(os.fspath(path))


def placed(name: str, workspace: Optional[PathLike]) -> str:
    """A name, or the directory of that name in a workspace."""
    if workspace is None:
        return os.path.abspath(name) if "/" in name else name
    if "/" in name or name in ("", ".", ".."):
        raise invalid("snapshot name in a workspace", name, "a name, not a path")
    return os.path.join(os.path.realpath(workspace), name)


def beginning(reference: str, workspace: Optional[PathLike]) -> str:
    """What a sandbox begins from: a snapshot of the workspace, if it has one of this name."""
    if workspace is not None and "/" not in reference:
        directory = os.path.join(os.path.realpath(workspace), reference)
        if os.path.isfile(os.path.join(directory, "manifest.json")):
            return directory
    return reference


def automatic(value: Union[bool, int, None]) -> Optional[int]:
    """The number of automatic checkpoints to keep; True is the program's own default."""
    if value is True:
        return AUTO_CHECKPOINTS
    return value or None


def duration(value: Optional[float]) -> Optional[dict[str, int]]:
    if value is None:
        return None
    whole = int(value)
    return {"secs": whole, "nanos": int((value - whole) * 1e9)}


def expiry(after: Optional[float], action: str) -> Optional[dict[str, Any]]:
    """What happens to a sandbox after a time."""
    if action not in ("remove", "pause", "stop"):
        raise invalid("on_expiry", action, "remove, pause or stop")
    if after is None:
        return None
    return {"after_ms": milliseconds(after), "action": action}


def save_request(options: Mapping[str, Any]) -> Optional[dict[str, Any]]:
    """What the sandbox is saved as when it ends."""
    name, workspace = options.get("save"), options.get("workspace")
    if name is None:
        return None
    if workspace is not None:
        os.makedirs(workspace, exist_ok=True)
    return {
        "target": placed(name, workspace),
        "replace": bool(options.get("replace")),
        "labels": dict(options.get("labels") or {}),
    }


def create_request(options: Mapping[str, Any]) -> dict[str, Any]:
    """The request to create a sandbox, from the keywords of `Sandbox`."""
    get = options.get
    workspace = get("workspace")
    image, snapshot = get("image"), get("snapshot")
    if (image is None) == (snapshot is None):
        raise TypeError("Sandbox() needs an image or a snapshot, and not both")
    for needed, names in (("kernel", ("initramfs", "modules")), ("save", ("replace", "labels"))):
        for name in names:
            if get(name) and not get(needed):
                raise TypeError(f"{name}= means nothing without {needed}=")
    kernel = get("kernel")
    network = get("network")
    spec: dict[str, Any] = {
        "image": None if image is None else beginning(image, workspace),
        "snapshot": None if snapshot is None else beginning(snapshot, workspace),
        "name": get("name"),
        "memory_bytes": size("memory", get("memory")),
        "cpus": get("cpus"),
        "disk_bytes": size("disk", get("disk")),
        "network": None if network is None else NetworkMode(network).value,
        "display": get("display"),
        "accel": get("accel"),
        "nested": bool(get("nested")),
        "cpu": get("cpu"),
        "publish": [port(each) for each in get("publish") or ()],
        "qemu_args": list(get("qemu_args") or ()),
        "boot_timeout": duration(get("boot_timeout")),
        "auto_remove": bool(get("rm")),
        "cold": bool(get("cold")),
        "memory_dir": absolute(get("memory_dir")),
        "memory_mode": get("memory_mode"),
        "auto_checkpoint": automatic(get("auto_checkpoint")),
        "durable": bool(get("durable")),
        "expiry": expiry(get("expire_after"), get("on_expiry") or "remove"),
        "ca_bundle": None if get("ca_bundle") in (None, True, False) else absolute(get("ca_bundle")),
        "kernel": None
        if kernel is None
        else {"kernel": absolute(kernel), "initramfs": absolute(get("initramfs")), "modules": absolute(get("modules"))},
        "mounts": [mount(each) for each in get("mounts") or ()],
    }
    if get("arch") is not None:
        spec["arch"] = get("arch")
    return {"spec": spec, "save": save_request(options), "host_ca": get("ca_bundle") is True}


def import_spec(
    kernel: Optional[PathLike],
    initramfs: Optional[PathLike],
    modules: Optional[PathLike],
    init: Optional[str],
    disk: Optional[Size],
) -> dict[str, Any]:
    """How an image is made from something else."""
    if init not in (None, "agent", "image"):
        raise invalid("init", init, "agent or image")
    choice: Union[str, dict[str, Any]]
    if kernel is None or kernel in ("cloud", "full"):
        for name, value in (("initramfs", initramfs), ("modules", modules)):
            if value is not None:
                raise TypeError(f"{name}= means nothing without a file as kernel=")
        choice = "Full" if kernel == "full" else "Cloud"
    else:
        own = {"kernel": absolute(kernel), "initramfs": absolute(initramfs), "modules": absolute(modules)}
        choice = {"Own": own}
    return {"kernel": choice, "init": init, "disk_bytes": size("disk", disk)}


def words(value: Union[str, Sequence[str]]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
