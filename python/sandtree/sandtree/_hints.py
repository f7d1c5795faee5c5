"""What to do about an error, in the words of this package. A hint depends on code and arguments, never on a message."""

from __future__ import annotations

from typing import Any, Mapping, Optional

_HINTS: dict[str, str] = {
    "no_sandbox": "`await Host().list()` lists the sandboxes of this store",
    "no_state": "`await sandbox.states()` lists its states",
    "no_step": "`await sandbox.states()` shows where it stands",
    "no_image": "`debian`, `desktop` and `tiny` are built in; `await Host().images()` lists the others",
    "no_snapshot": "`await Host().snapshots()` lists the snapshots of this store",
    "no_image_or_snapshot": "`await Host().images()` and `await Host().snapshots()` list what is in the store",
    "not_pulled": "`await Host().pull({reference!r})` downloads it",
    "no_qemu": "install QEMU (Debian: apt-get install qemu-system-x86), or pass Host(qemu=...)",
    "sandbox_name_taken": "choose another name=, or remove the other: `await (await Sandbox.attach({name!r})).remove()`",
    "name_taken": "choose another name, or pass replace=True to replace a snapshot",
    "tag_taken": "choose another tag, or pass replace=True",
    "mount_taken": "choose another path, or unmount it first",
    "no_mount": "`(await sandbox.info()).mounts` lists its mounts",
    "no_display": 'pass display="1280x800" to Sandbox(), or use an image with a screen such as `desktop`',
    "no_x_server": "start one in the guest, or use the image `desktop`; pictures, keys, mouse and `display.view()` work without one",
    "screen_timeout": "pass a longer timeout=; a blinking cursor is a change, too",
    "screens_unsupported": "install QEMU's display devices (Debian: apt-get install qemu-system-common)",
    "apply_conflicts": "`await sandbox.changes(path)` shows them; force=True overwrites the host's files",
    "wrong_state": "the sandbox is {phase}: `start()` boots a stopped one, `resume()` continues a paused one",
    "no_memory": "leave memory=True away: its disk is saved",
    "link_ended": "`await sandbox.info()` shows how the sandbox ended",
    "output_limit": "read the output as a stream, with `sandbox.exec(...).lines()`, or pass a larger limit=",
    "no_save_base": "import the image that the save was made on, under its name: `await Host().import_image(path, name=...)`",
    "not_as_saved": "leave this setting out, or pass cold=True to boot from the disk",
    "lacking_processor": "cold=True boots a sandbox from its disk",
    "foreign_state": "cold=True boots a sandbox from its disk",
    "accelerator_unusable": 'leave accel= out; `await Host().doctor()` shows what works here',
    "not_enough_memory": "pass a smaller memory=, or stop another sandbox",
    "not_enough_space": "free some space, perhaps by `await Host().gc()`, or choose another store: Host(home=...)",
    "disk_full": "free some space, perhaps by `await Host().gc()`, or choose another store: Host(home=...)",
    "guest_disk_full": "free some space in the guest, or create it with a larger disk=",
    "boot_timeout": "a slow host may need a longer boot_timeout=",
    "build_step_failed": "the steps before it are kept: the next build continues from there",
    "tool_missing": "install the Debian package {package}",
    "port_unavailable": "choose another port of the host",
    "nested_guest_runs": "stop the guests that the sandbox runs, and try again",
    "keeper_version": "stop the sandbox with the program that started it",
    "panicked": "this is a defect of Sandtree; please report it",
}


class _Known(dict):  # type: ignore[type-arg]
    def __missing__(self, key: str) -> str:
        return "?"


def of(code: str, arguments: Mapping[str, Any]) -> Optional[str]:
    """None where no remedy is known."""
    hint = _HINTS.get(code)
    return hint.format_map(_Known(arguments)) if hint else None
