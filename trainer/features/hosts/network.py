"""Find this host's network interfaces, which of them leads to another host, and InfiniBand."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

_SYS = Path("/sys/class")
_GET_FLAGS, _GET_ADDRESS = 0x8913, 0x8915  # SIOCGIFFLAGS and SIOCGIFADDR of Linux
_UP, _LOOPBACK, _RUNNING = 0x1, 0x8, 0x40
# What container engines and virtual machines make; no other host is behind them
_INNER = ("docker", "podman", "veth", "virbr", "br-", "cni", "flannel", "cali", "lxc", "lxd")
_DISCARD = 9  # the port of a service that answers nobody; nothing is sent there


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface that is up and has an address of IPv4."""

    name: str
    address: str
    is_inner: bool  # whether it leads to containers, virtual machines or this host alone

    @property
    def speed(self) -> str:
        """Its speed as the driver reports it, in words."""
        written = _read(_SYS / "net" / self.name / "speed")
        if written.isdecimal():
            return f"{int(written) / 1000:g} Gbit/s"
        return "speed not known"


def interfaces() -> list[Interface]:
    """List the interfaces that ranks may use."""
    found = list[Interface]()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            # Without an address of IPv4 there is no answer.
            with suppress(OSError):
                address = socket.inet_ntoa(fcntl.ioctl(asked, _GET_ADDRESS, request)[20:24])
                flags = fcntl.ioctl(asked, _GET_FLAGS, request)[16]
                is_inner = bool(flags & _LOOPBACK) or name.startswith(_INNER)
                if flags & _UP and flags & _RUNNING:
                    found.append(Interface(name=name, address=address, is_inner=is_inner))
    return found


def address_of(host: str) -> str:
    """Give a host's address as this one knows it; empty where it knows none but a loopback."""
    with suppress(OSError, UnicodeError):
        address = socket.gethostbyname(host)
        if not address.startswith("127."):
            return address
    return ""


def leading_to(address: str, found: Sequence[Interface]) -> Interface | None:
    """Find the interface by which this host sends to an address; None where there is no way."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((address, _DISCARD))
        for each in found:
            if each.address == way.getsockname()[0]:
                return each
    return None


def infiniband() -> dict[str, float]:
    """Give the active ports of InfiniBand and RoCE, as `mlx5_0:1`, with their Gbit/s."""
    found = dict[str, float]()
    for port in sorted(_SYS.glob("infiniband/*/ports/*")):
        if "ACTIVE" in _read(port / "state"):
            found[f"{port.parents[1].name}:{port.name}"] = float(_read(port / "rate").split()[0])
    return found


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""
