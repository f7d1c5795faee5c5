"""Sizes of disks, as `qemu-img resize` spells them: "4G"; a bare number counts bytes."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([bkmgt]?)(?:ib|b)?", re.IGNORECASE)
_SHIFTS = {"": 0, "b": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def disk_bytes(size: str | None) -> int | None:
    """Bytes of a size. Raises ValueError for anything else, also for relative sizes such as "+1G"."""
    if size is None:
        return None
    found = _SIZE.fullmatch(size.strip())
    if not found:
        raise ValueError(f"invalid disk_size {size!r}: expected forms like '4G' or '512M'")
    return int(float(found[1]) * (1 << _SHIFTS[found[2].lower()]))
