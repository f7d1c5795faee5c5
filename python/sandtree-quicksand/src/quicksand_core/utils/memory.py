"""Sizes of memory, as QEMU's `-m` spells them: "512M", "1.5G"; a bare number counts MiB."""

from __future__ import annotations

import re

__all__ = ["format_bytes", "parse_memory_size"]

_UNITS = {"": 1 << 20, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)


def parse_memory_size(value: str | int) -> int:
    """Bytes of a size. Raises ValueError for anything that is not a positive size."""
    if isinstance(value, int):
        if value <= 0:
            raise ValueError(f"memory must be positive, got {value}")
        return value * _UNITS["m"]
    text = value.strip()
    if not text:
        raise ValueError("memory must not be empty")
    found = _SIZE.fullmatch(text)
    if not found:
        raise ValueError(
            f"invalid memory size {value!r}: expected forms like '512M', '2G', "
            f"'1.5G', '2048' (MiB), '512MiB', '4GB'"
        )
    if float(found[1]) <= 0:
        raise ValueError(f"memory must be positive, got {value!r}")
    size = int(float(found[1]) * _UNITS[found[2].lower()])
    if size <= 0:
        raise ValueError(f"memory rounds to zero bytes: {value!r}")
    return size


def format_bytes(n: int) -> str:
    """A short text for a number of bytes, such as "1.5G"."""
    for unit in "tgmk":
        if n >= _UNITS[unit]:
            value = n / _UNITS[unit]
            return f"{value:.1f}{unit.upper()}" if value < 10 else f"{value:.0f}{unit.upper()}"
    return f"{n}B"
