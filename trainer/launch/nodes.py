"""Several machines, one run: their supervisors meet at an address and watch each other.

The first node listens at `parallel.rendezvous`, and there alone, until all nodes have come. What
they send each other are lines of JSON, each of a few hundred bytes, over connections that close
when a supervisor ends and that the kernel probes, so that a machine without power is missed too.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import socket
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, final

from trainer.core.errors import ConfigError, RankLostError, said

MEETING_S = 600.0
"""How long nodes wait for each other at the start, as torchrun's do."""

MOST_BYTES = 65536
"""Longest line that a node listens to."""

HELLO_S = 10.0
"""How long a connection may take to say which node it is."""

POLL_S = 0.05

_PROBES = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 8000}
"""A peer that does not answer is given up after 8 s."""

_GET_ADDRESS = 0x8915
"""`SIOCGIFADDR` of Linux's ioctl."""


@final
class Link:
    """A connection to another node's supervisor.

    Args:
        connection: open; it never blocks from now on.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._text = b""
        self._kept: list[dict[str, Any]] = []
        self.is_open = True
        self.opened = time.monotonic()
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def address(self) -> str:
        """Give this machine's address on the connection."""
        return str(self._connection.getsockname()[0])

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; a node that is gone does not hear it."""
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.is_open = False

    def receive(self) -> list[dict[str, Any]]:
        """Take the messages that have come. Never waits."""
        try:
            while part := self._connection.recv(MOST_BYTES):
                self._text += part
            self.is_open = False
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False
        *lines, self._text = self._text.split(b"\n")
        try:
            found = [json.loads(line) for line in lines]
        except ValueError:
            found = [None]
        if len(self._text) > MOST_BYTES or not all(isinstance(each, dict) for each in found):
            self.is_open = False
            return []
        kept, self._kept = self._kept, []
        return [*kept, *found]

    def wait(self, timeout_s: float = float("inf")) -> dict[str, Any] | None:
        """Wait for one message; None when the node is gone, or does not answer in time."""
        limit = time.monotonic() + timeout_s
        while time.monotonic() < limit:
            found = self.receive()
            if found:
                self._kept = found[1:]
                return found[0]
            if not self.is_open:
                return None
            time.sleep(POLL_S)
        return None

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        self._connection.close()


@final
@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a node says of itself.

    Attributes:
        node: its number, from 0.
        nodes: how many there are to be.
        ranks: local ranks.
        config: a digest of every key's value that must not differ.
    """

    node: int
    nodes: int
    ranks: int
    config: Mapping[str, str]

    def refuse(self, other: Hello) -> ConfigError | None:
        """Say what another node was given that this one was not."""
        keys = self.config.keys() | other.config.keys()
        differing = sorted(k for k in keys if self.config.get(k) != other.config.get(k))
        if self.nodes != other.nodes:
            differing = ["parallel.nodes"]
        elif not differing and self.ranks != other.ranks:
            differing = ["parallel.ranks"]
        if not differing:
            return None
        return ConfigError(
            f"{', '.join(differing)}: node {other.node} was given another value than node "
            f"{self.node}; type the same command on every node, but for parallel.node"
        )


@final
@dataclass(kw_only=True)
class Nodes:
    """The other nodes, as one of them sees them.

    Attributes:
        links: of the first node, to each other one by its number; of any other, to the first.
        address: this machine's, on the network that connects them; None where it is alone.
    """

    links: dict[int, Link] = field(default_factory=dict)
    address: str | None = None

    @property
    def are_whole(self) -> bool:
        """Whether no node is gone."""
        return all(link.is_open for link in self.links.values())

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message to every node there is a link to."""
        for link in self.links.values():
            link.send(message)

    def close(self) -> None:
        """Close all connections."""
        for link in self.links.values():
            link.close()


def gather(hello: Hello, address: str) -> Nodes:
    """Wait at an address, as the first node, for all others.

    Args:
        hello: what this node is.
        address: host and port; the kernel hears connections at it alone.

    Raises:
        ConfigError: the address is not this machine's, or a node was given another config.
        RankLostError: a node did not come.
    """
    server = _listen(*split(address))
    nodes, limit, told = Nodes(address=str(server.getsockname()[0])), time.monotonic(), False
    pending: list[Link] = []
    try:
        while len(nodes.links) < hello.nodes - 1:
            with suppress(BlockingIOError):
                pending.append(Link(server.accept()[0]))
            for link in list(pending):
                _welcome(link, hello, pending, nodes)
            waited = time.monotonic() - limit
            missing = [n for n in range(1, hello.nodes) if n not in nodes.links]
            if missing and waited > MEETING_S:
                raise RankLostError(f"node {missing[0]} did not come to {address}")
            if missing and waited > HELLO_S and not told:
                sys.stderr.write(f"train: waiting at {address} for node {missing[0]}\n")
                told = True
            time.sleep(POLL_S)
    except BaseException as error:
        if isinstance(error, ConfigError | RankLostError):
            nodes.tell({"ended": said(error)})
        nodes.close()
        raise
    finally:
        server.close()
        for link in pending:
            link.close()
    return nodes


def _welcome(link: Link, hello: Hello, pending: list[Link], nodes: Nodes) -> None:
    """Make a node of a connection that says it is one; drop what says anything else.

    Raises:
        refusal: the `ConfigError` of a node that was given another config.
    """
    told = next(iter(link.receive()), None)
    if told is None and link.is_open and time.monotonic() - link.opened < HELLO_S:
        return
    pending.remove(link)
    try:
        other = Hello(**(told or {}))
        is_new = other.node in range(1, max(hello.nodes, other.nodes))
        is_new &= other.node not in nodes.links
    except (TypeError, AttributeError):
        is_new = False
    if not is_new:
        link.close()
        return
    nodes.links[other.node] = link
    refusal = hello.refuse(other)
    if refusal is not None:
        raise refusal


def join(hello: Hello, address: str) -> Nodes:
    """Connect to the first node.

    Raises:
        ConfigError: there is no such address.
        RankLostError: nothing answers there.
    """
    host, port = split(address)
    limit = time.monotonic() + MEETING_S
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=HELLO_S)
            break
        except socket.gaierror as error:
            raise ConfigError(f"parallel.rendezvous={address}: {error.strerror}") from error
        except OSError as error:
            if time.monotonic() > limit:
                raise RankLostError(f"node 0 does not answer at {address}: {error}") from error
            time.sleep(POLL_S)
    link = Link(connection)
    link.send({**vars(hello), "config": dict(hello.config)})
    return Nodes(links={0: link}, address=link.address)


def bracketed(host: str) -> str:
    """Write an address as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def split(address: str) -> tuple[str, int]:
    """Split `host:port`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _listen(host: str, port: int) -> socket.socket:
    """Listen at one address, and no other.

    Raises:
        ConfigError: this machine does not have it, or something else listens there.
    """
    typed = f"parallel.rendezvous={host}:{port}"
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        if ipaddress.ip_address(place[0]).is_loopback and not _is_loopback(host):
            raise ConfigError(
                f"{typed}: {host} is {place[0]} on this machine, which no other can reach; type "
                "its address"
            )
        with ExitStack() as opened:
            server = opened.enter_context(socket.socket(family, kind, protocol))
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(place)
            server.listen()
            server.setblocking(False)
            opened.pop_all()
    except OSError as error:
        raise ConfigError(
            f"{typed}: node 0 cannot listen there ({error.strerror}); it is to be an address of "
            "the machine with parallel.node=0, and a free port"
        ) from error
    return server


def listen_for_ranks(address: str | None) -> socket.socket:
    """Listen at a free port of an address; the first rank takes it over."""
    assert address is not None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.socket(family)
    server.bind((address, 0))
    server.listen()
    return server


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def interface_of(address: str | None) -> str | None:
    """Name the network interface of an address of this machine; None where it cannot be told.

    Args:
        address: None is a run on one machine, which keeps to the loopback interface.
    """
    if address is None or _is_loopback(address):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
