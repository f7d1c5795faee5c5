"""Free ports of this host."""

from __future__ import annotations

import socket

VNC_PORTS = range(5900, 6000)


def _try_port(port: int) -> int | None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return None
        return int(probe.getsockname()[1])


def find_free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now."""
    port = _try_port(0)
    if port is None:
        raise RuntimeError("No free TCP port available")
    return port


def find_free_vnc_port() -> int:
    """A port of QEMU's VNC displays that is free now."""
    for port in VNC_PORTS:
        if _try_port(port) is not None:
            return port
    raise RuntimeError("No free VNC ports available in range 5900-5999")
