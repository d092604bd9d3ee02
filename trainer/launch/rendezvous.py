"""Open the store by which ranks find each other, and wait there for all that a launcher started."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from trainer.core.errors import ConfigError, RankFailedError
from trainer.core.signals import check
from trainer.core.world import LONG_TIMEOUT
from trainer.launch.membership import START_TIMEOUT, Membership

POLL_S = 0.2
CONNECT_S = 10.0  # that one attempt to connect may take


def open_store(member: Membership) -> Store:
    """Open the store. Collective.

    Ranks of our own find each other by a file, and wait until their supervisor ends them.

    Raises:
        ConfigError: the first rank cannot listen where the ranks connect.
        RankFailedError: a rank did not come.
    """
    if member.start_timeout_s is None:
        return FileStore(member.address, member.size)
    limit = time.monotonic() + member.start_timeout_s
    # A launcher's store outlives an attempt, and a port may be used by two jobs by mistake.
    store = PrefixStore(f"train/{member.attempt}", _connect(member, limit))
    store.set(f"here/{member.rank}", "")
    # Counted, so that many ranks ask little of the store; and in Python, which gets signals.
    store.add("count", 1)
    while store.add("count", 0) < member.size:
        if time.monotonic() > limit:
            late = [rank for rank in range(member.size) if not store.check([f"here/{rank}"])]
            raise RankFailedError(
                f"rank{'s' if late[1:] else ''} {', '.join(map(str, late))} did not come to "
                f"{member.address} within {member.start_timeout_s:g} s ({START_TIMEOUT})"
            )
        check()
        time.sleep(POLL_S)
    return store


def _connect(member: Membership, limit: float) -> Store:
    """Serve the store, or connect to it once it is there, until a moment of the monotonic clock.

    Raises:
        ConfigError: the first rank cannot listen there.
        RankFailedError: nothing answers there, or something that is no store.
    """
    host, _, written = member.address.rpartition(":")
    host, port = host.strip("[]"), int(written)
    is_server = member.rank == 0 and not member.is_hosted
    try:
        while not is_server and not _answers(host, port, limit):
            check()
            time.sleep(POLL_S)
        wait = timedelta(seconds=member.start_timeout_s or 0)
        store = TCPStore(host, port, member.size, is_server, wait, wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        if is_server:
            text = f"MASTER_PORT={port}: rank 0 cannot listen there: {reason:.150}"
            raise ConfigError(text) from error
        failure = RankFailedError(
            f"rank {member.rank}: rank 0 does not answer at {member.address} within "
            f"{member.start_timeout_s:g} s ({START_TIMEOUT}): {reason:.150}"
        )
        failure.is_own = True
        raise failure from error
    store.set_timeout(LONG_TIMEOUT)
    return store


def _answers(host: str, port: int, limit: float) -> bool:
    """Look whether somebody listens; PyTorch's own attempts to connect fill the screen."""
    with suppress(*(() if time.monotonic() > limit else (OSError,))):
        socket.create_connection((host, port), timeout=CONNECT_S).close()
        return True
    return False
