"""Real ranks for tests: processes over gloo, started once and used by every test of a file."""

import gc
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.core.world import World

PATIENCE_S = 240  # a machine with much else to do may give ranks no time for a minute


@contextmanager
def joined(rank: int, size: int, store: Path, timeout_s: float = 200) -> Iterator[World]:
    """A world of `size` ranks that meet at a file."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield World(rank=rank, size=size, local_size=size, long_timeout_group=dist.new_group())
        gc.collect()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.resetwarnings()  # a compiler's own are no errors, as in the processes of a run
    gc.freeze()  # else each collection walks the million objects that were imported, for 0.4 s
    while True:
        work, rank, size, store, args = pipe.recv()
        try:
            with joined(rank, size, store) as world:
                result = work(world, *args)
            pipe.send((result, None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))


class Ranks:
    """Runs a function of a module's own, which takes the world first, on real ranks."""

    def __init__(self) -> None:
        # A fork spares imports of 4 CPU seconds. Beside threads for GPUs none can run a backward.
        self._context = get_context("forkserver" if torch.cuda.is_available() else "fork")
        self._ends: list[tuple[Any, Connection]] = []

    def run(self, size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
        """What `work(world, *args)` gave on every rank."""
        while len(self._ends) < size:
            here, there = Pipe()
            process = self._context.Process(target=_serve, args=(there,), daemon=True)
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
                process.start()  # from a process with threads, none of which a rank has to do with
            there.close()
            self._ends.append((process, here))
        pipes = [pipe for _, pipe in self._ends[:size]]
        with tempfile.TemporaryDirectory() as folder:
            for rank, pipe in enumerate(pipes):
                pipe.send((work, rank, size, Path(folder) / "store", args))
            answers: dict[int, tuple[Any, str | None]] = {}
            while len(answers) < size:
                waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
                ready = wait(waiting, PATIENCE_S)
                assert ready, f"ranks {sorted(set(range(size)) - answers.keys())} hang"
                for pipe in ready:
                    answers[pipes.index(pipe)] = pipe.recv()
        wrong = [f"rank {rank}: {error}" for rank, (_, error) in answers.items() if error]
        assert not wrong, "\n".join(wrong)
        return [answers[rank][0] for rank in range(size)]

    def close(self) -> None:
        """End the processes."""
        for process, pipe in self._ends:
            process.kill()
            process.join()
            pipe.close()
