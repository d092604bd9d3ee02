"""What ranks cost by their number: to find each other, and to agree, over gloo on this machine.

    python benchmarks/ranks.py [--ranks 2,4,8,16,32] [--repeats 20] [--json FILE]

Every rank is a process that joins as under torchrun. `join` is until all are joined; `flags` a
step's vector of 200 numbers, through small groups, beside it round all ranks at once;
`gather` 100 bytes of JSON of each rank, `from main` as many of the first rank alone. Milliseconds
are those of the quickest repeat, on the slowest rank. Ranks share the machine's cores, so that a
message waits for a core, too: one takes the time times the cores, over all messages of all ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import parser_of, print_table, write_results

from trainer.cli.compose import Composer
from trainer.cli.prepare import prepare_run
from trainer.config.run_config import RunConfig
from trainer.core.rank_progress import RankProgress
from trainer.launch.membership import Membership
from trainer.launch.session import joined_session

FLAGS, TEXT = [1.0] * 200, "x" * 98
LIMIT_S = 600.0


def work(config: RunConfig, member: Membership, repeats: int, begin: Any, answers: Any) -> None:  # noqa: ANN401
    """Join as one rank, and time each kind of message."""
    torch.set_num_threads(1)
    begin.wait()
    start = time.perf_counter()
    with joined_session(config, Path(), member, RankProgress()) as world:
        found = {"join": time.perf_counter() - start}
        flags = torch.tensor(FLAGS, dtype=torch.float64)
        kinds: dict[str, Callable[[], Any]] = {
            "flags": lambda: world.sum_numbers(FLAGS),
            "at once": lambda: dist.all_reduce(flags),
            "gather": lambda: world.collect(TEXT),
            "from main": lambda: world.on_main(lambda: TEXT),
        }
        for name, send in kinds.items():
            send()
            times = list[float]()
            for _ in range(repeats):
                world.barrier()
                start = time.perf_counter()
                send()
                times.append(time.perf_counter() - start)
            found[name] = min(times)
        answers.put(found)


def measure(size: int, repeats: int) -> dict[str, float]:
    """Start so many ranks, and give the slowest one's seconds by kind.

    Raises:
        RuntimeError: a rank failed.
    """
    context = multiprocessing.get_context("fork")
    begin, answers = context.Barrier(size), context.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config, ranks = prepare_run(["device=cpu"], Composer.of()).config, []
    for rank in range(size):
        member = Membership(
            rank=rank,
            size=size,
            local_rank=rank,
            local_size=size,
            address=f"127.0.0.1:{port}",
            start_timeout_s=LIMIT_S,
        )
        args = config, member, repeats, begin, answers
        ranks.append(context.Process(target=work, args=args))
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        raise RuntimeError(f"{size} ranks: one failed")
    found = [answers.get() for _ in ranks]
    return {name: max(each[name] for each in found) for name in found[0]}


def main() -> None:
    """Measure every number of ranks, and print a table."""
    parser = parser_of((__doc__ or "").partition("\n")[0], "ranks", repeats=20)
    parser.add_argument("--ranks", default="2,4,8,16,32")
    asked = parser.parse_args()
    rows, results = [], []
    for size in map(int, asked.ranks.split(",")):
        found = measure(size, asked.repeats)
        results.append({"ranks": size, **found})
        rows.append([f"{size} ranks", *(f"{1e3 * seconds:.2f}" for seconds in found.values())])
        print(rows[-1], flush=True)
    print_table([f"ms, {os.cpu_count()} cores", *list(results[0])[1:]], rows)
    write_results(asked.json, {"ranks": asked.ranks, "repeats": asked.repeats}, results)


if __name__ == "__main__":
    main()
