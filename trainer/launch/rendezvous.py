"""Open the store by which ranks find each other, and wait there for all that a launcher started."""

from __future__ import annotations

import socket
import time
from datetime import timedelta

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from trainer.core.errors import ConfigError, RankLostError
from trainer.core.launcher import START_TIMEOUT, Membership
from trainer.core.signals import check
from trainer.core.world import LONG_TIMEOUT

POLL_S = 0.2

CONNECT_S = 10.0
"""How long one attempt to connect may take."""


def open_store(member: Membership) -> Store:
    """Open the store. Collective.

    Ranks of our own meet at a file, and wait until their supervisor ends them.

    Raises:
        ConfigError: the first rank cannot listen where the ranks connect.
        RankLostError: a rank did not come.
    """
    if member.start_timeout_s is None:
        return FileStore(member.address, member.size)
    limit = time.monotonic() + member.start_timeout_s
    served = _connect(member, member.start_timeout_s, limit)
    # A launcher's store outlives an attempt, and a port may be used by two jobs by mistake.
    store = PrefixStore(f"train/{member.attempt}", served)
    store.set(f"here/{member.rank}", "")
    # Counted, so that many ranks ask little of the store; and in Python, which hears signals.
    store.add("count", 1)
    while store.add("count", 0) < member.size:
        if time.monotonic() > limit:
            late = [rank for rank in range(member.size) if not store.check([f"here/{rank}"])]
            raise RankLostError(
                f"rank{'s' if late[1:] else ''} {', '.join(map(str, late))} did not come to "
                f"{member.address} within {member.start_timeout_s:g} s ({START_TIMEOUT})"
            )
        check()
        time.sleep(POLL_S)
    return store


def _connect(member: Membership, timeout_s: float, limit: float) -> Store:
    """Serve the store, or connect to it once it is there.

    Args:
        member: this rank.
        timeout_s: how long to try.
        limit: until when, by the monotonic clock.

    Raises:
        ConfigError: the first rank cannot listen there.
        _unanswered: a `RankLostError`: nothing answers there, or something that is no store.
    """
    host, _, port = member.address.rpartition(":")
    is_server = member.rank == 0 and not member.is_hosted
    # PyTorch's own attempts to connect fill the screen.
    while not is_server:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
            break
        except OSError as error:
            if time.monotonic() > limit:
                raise _unanswered(member, error) from error
        check()
        time.sleep(POLL_S)
    try:
        store = TCPStore(
            host.strip("[]"),
            int(port),
            member.size,
            is_master=is_server,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        if not is_server:
            raise _unanswered(member, error) from error
        reason = " ".join(str(error).splitlines()[0].split())
        raise ConfigError(
            f"MASTER_PORT={port}: rank 0 cannot listen there: {reason:.150}"
        ) from error
    store.set_timeout(LONG_TIMEOUT)
    return store


def _unanswered(member: Membership, reason: Exception) -> RankLostError:
    text = " ".join(str(reason).split())
    lost = RankLostError(
        f"rank {member.rank}: rank 0 does not answer at {member.address} within "
        f"{member.start_timeout_s:g} s ({START_TIMEOUT}): {text:.150}"
    )
    lost.is_own = True
    return lost
