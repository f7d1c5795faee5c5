"""The memory of this host."""

from __future__ import annotations

import os


def get_host_memory_bytes() -> int | None:
    """The size of the host's memory, or None where the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
