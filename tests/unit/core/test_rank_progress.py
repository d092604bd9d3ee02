"""A supervisor reads where a rank is while the rank writes it."""

import subprocess
import sys
from pathlib import Path

from trainer.core.rank_progress import RankProgress

WRITER = """
import sys
from pathlib import Path
from trainer.core.rank_progress import RankPosition, RankProgress
progress = RankProgress(Path(sys.argv[1]))
progress.write(RankPosition(5, "compute"))
print("begun", flush=True)
while True:
    progress.next_micro_batch()
"""


def test_a_place_that_is_read_while_it_is_written_is_never_an_older_one(tmp_path):
    """Zeros in between, of a time, would be a rank that has hung since the machine started."""
    path, root = tmp_path / "place", Path(__file__).parents[3]
    line = [sys.executable, "-c", WRITER, path]
    with subprocess.Popen(line, cwd=root, stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"begun\n"
            progress = RankProgress(path)
            places = [progress.read() for _ in range(100_000)]
        finally:
            writer.kill()
    assert {(place.step, place.phase) for place in places} == {(5, "compute")}
    assert places[0].since > 0
    times = [place.since for place in places]
    assert times == sorted(times)
    assert places[-1].micro_batch > places[0].micro_batch
