"""Endpoints and forwards of TCP connections between host and guest."""

from __future__ import annotations

import ipaddress
import warnings
from dataclasses import dataclass, field
from typing import Annotated, Literal, overload

from pydantic import Field

from ._constants import NetworkConstants


def _check_port(owner: str, port: int) -> None:
    if not 1 <= port <= 65535:
        raise ValueError(f"{owner}.port must be in 1..65535, got {port}")


class _Given:
    """The port and the address of an endpoint, each at most once, in whatever form they were given."""

    def __init__(self, owner: str, port: int | None, address: str | None) -> None:
        self.owner = owner
        self.port = port
        self.address = address

    def add(self, value: object) -> None:
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise TypeError(
                f"{self.owner}() positional arguments must be an int port or a str address, "
                f"got {type(value).__name__}"
            )
        if isinstance(value, int):
            self._set_port(value)
        elif ":" in value:
            self._add_both(value)
        else:
            self._set_address(value)

    def _add_both(self, value: str) -> None:
        address, _, port = value.rpartition(":")
        if not address or not port.isdigit():
            raise ValueError(f"{self.owner}: expected 'address:port', got {value!r}")
        self._set_address(address)
        self._set_port(int(port))

    def _set_port(self, port: int) -> None:
        if self.port is not None:
            raise TypeError(f"{self.owner}() got multiple values for port")
        self.port = port

    def _set_address(self, address: str) -> None:
        if self.address is not None:
            raise TypeError(f"{self.owner}() got multiple values for address")
        self.address = address


def _endpoint(
    owner: str, args: tuple[int | str | None, ...], port: int | None, address: str | None
) -> tuple[int, str | None]:
    if len(args) > 2:
        raise TypeError(f"{owner}() takes at most 2 positional arguments ({len(args)} given)")
    given = _Given(owner, port, address)
    for arg in args:
        given.add(arg)
    if given.port is None:
        raise TypeError(
            f"{owner}() missing a port; use {owner}(port), {owner}('addr', port), "
            f"{owner}('addr:port') or {owner}(port=...)"
        )
    _check_port(owner, given.port)
    return given.port, given.address


@dataclass(init=False)
class Host:
    """A TCP endpoint on the host: `Host(8080)`, `Host("0.0.0.0", 8080)`, `Host("0.0.0.0:8080")`."""

    port: int
    address: str = NetworkConstants.LOCALHOST
    kind: Literal["host"] = field(default="host", repr=False, compare=False)

    @overload
    def __init__(self, port: int, /, address: str = ...) -> None: ...
    @overload
    def __init__(self, address: str | None, port: int, /) -> None: ...
    @overload
    def __init__(self, address_and_port: str, /) -> None: ...
    @overload
    def __init__(self, address: str, /, *, port: int) -> None: ...
    @overload
    def __init__(self, *, port: int, address: str = ...) -> None: ...

    def __init__(
        self, *args: int | str | None, port: int | None = None, address: str | None = None
    ) -> None:
        self.port, given = _endpoint("Host", args, port, address)
        self.address = NetworkConstants.LOCALHOST if given is None else given
        self.kind = "host"

    def __post_init__(self) -> None:
        _check_port("Host", self.port)


@dataclass(init=False)
class Guest:
    """A TCP endpoint in the guest, in the same forms as `Host`."""

    port: int
    address: str | None = None
    kind: Literal["guest"] = field(default="guest", repr=False, compare=False)

    @overload
    def __init__(self, port: int, /, address: str | None = ...) -> None: ...
    @overload
    def __init__(self, address: str | None, port: int, /) -> None: ...
    @overload
    def __init__(self, address_and_port: str, /) -> None: ...
    @overload
    def __init__(self, address: str, /, *, port: int) -> None: ...
    @overload
    def __init__(self, *, port: int, address: str | None = ...) -> None: ...

    def __init__(
        self, *args: int | str | None, port: int | None = None, address: str | None = None
    ) -> None:
        self.port, self.address = _endpoint("Guest", args, port, address)
        self.kind = "guest"

    def __post_init__(self) -> None:
        _check_port("Guest", self.port)


Endpoint = Annotated[Host | Guest, Field(discriminator="kind")]


@dataclass
class Forward:
    """Connections to `src` reach `dst`. One end is a `Host`, the other a `Guest`."""

    src: Endpoint
    dst: Endpoint

    def __post_init__(self) -> None:
        if isinstance(self.src, Host) and isinstance(self.dst, Guest):
            _check_ipv4("Host.address", self.src.address, "when the host is the source (bind address)")
            if self.dst.address is not None:
                _check_ipv4("Guest.address", self.dst.address, "when the guest is the destination")
        elif isinstance(self.src, Guest) and isinstance(self.dst, Host):
            address = self.src.address or NetworkConstants.GUESTFWD_DEFAULT_IP
            self.src = Guest(self.src.port, address)
            _check_source_in_guest(address)
        else:
            raise ValueError(
                "Forward must connect a Host endpoint to a Guest endpoint, got "
                f"src={type(self.src).__name__} and dst={type(self.dst).__name__}"
            )

    @property
    def host(self) -> Host:
        """The end on the host."""
        return self.src if isinstance(self.src, Host) else self.dst  # type: ignore[return-value]

    @property
    def guest(self) -> Guest:
        """The end in the guest."""
        return self.src if isinstance(self.src, Guest) else self.dst  # type: ignore[return-value]

    @property
    def host_to_guest(self) -> bool:
        """Whether connections are made on the host."""
        return isinstance(self.src, Host)


_NETWORK = ipaddress.IPv4Network("10.0.2.0/24")
_RESERVED = {
    NetworkConstants.QEMU_SLIRP_GATEWAY: "the slirp gateway",
    NetworkConstants.QEMU_SLIRP_DNS: "the slirp DNS forwarder",
    NetworkConstants.QEMU_SLIRP_GUEST_IP: "the guest itself",
}


def _check_ipv4(name: str, value: str, context: str) -> ipaddress.IPv4Address:
    try:
        return ipaddress.IPv4Address(value)
    except ValueError as error:
        raise ValueError(f"{name} must be an IPv4 address {context}, got {value!r}") from error


def _check_source_in_guest(address: str) -> None:
    if _check_ipv4("Guest.address", address, "when the guest is the source") not in _NETWORK:
        raise ValueError(
            f"Guest.address must be inside the slirp network {_NETWORK} when the guest "
            f"is the source, got {address}"
        )
    if address in _RESERVED:
        raise ValueError(f"Guest.address {address} is reserved for {_RESERVED[address]}")


def PortForward(host: int, guest: int) -> Forward:
    """Deprecated: `Forward(Host(host), Guest(guest))`."""
    warnings.warn(
        "PortForward is deprecated and will be removed in a future release; "
        "use Forward(Host(port), Guest(port)) instead.",
        DeprecationWarning,
        stacklevel=2,
    )
    return Forward(Host(host), Guest(guest))
