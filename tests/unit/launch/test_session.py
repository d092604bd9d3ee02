"""Which GPU a rank takes, how ranks meet, and what is said of a command's end."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist

from tests.reliability import lab
from trainer.core.errors import RankFailedError
from trainer.core.rank_progress import RankProgress
from trainer.launch.membership import Membership, membership
from trainer.launch.session import _open_store, gpu_index, joined_session


@pytest.mark.parametrize(
    ("visible", "launched", "index"), [(1, True, 0), (8, True, 2), (1, False, 2), (8, False, 2)]
)
def test_a_launcher_may_show_each_rank_a_single_gpu_of_its_own(visible, launched, index):
    timeout_s = 600 if launched else None
    member = Membership(rank=2, size=4, local_rank=2, local_size=4, start_timeout_s=timeout_s)
    assert gpu_index(member, visible) == index


def test_a_fault_of_parting_from_the_other_ranks_does_not_hide_how_the_command_ended(tmp_path):
    config, address = lab.config("deterministic=layout"), str(tmp_path / "store")
    member = Membership(rank=0, size=1, local_rank=0, local_size=1, address=address)

    def fail() -> None:
        with joined_session(config, tmp_path, member, RankProgress()):
            dist.destroy_process_group()
            raise ValueError("the first")

    with pytest.raises(ValueError, match="the first"):
        fail()


def test_ranks_that_a_launcher_starts_again_meet_anew_however_often_each_machine_did():
    """In the store of torchrun's agent, which lives on; one machine alone counts the restart."""
    hosted = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(hosted.port)}
    common |= {"TORCHELASTIC_RUN_ID": "gpt", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    common |= {"TRAIN_MEETING_S": "20"}

    def member(rank: int, restarts: int = 0) -> Membership:
        own = {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(restarts)}
        found = membership(common | own)
        assert found is not None
        return found

    def begin(rank: int, restarts: int) -> Future[dist.Store]:
        started = workers.submit(_open_store, member(rank, restarts))
        time.sleep(0.3)  # until it has joined what there is
        return started

    with ThreadPoolExecutor(2) as workers:
        first = [each.result(20) for each in (begin(0, 0), begin(1, 0))]
        first[0].set("key", "of the first attempt")
        assert first[1].get("key") == b"of the first attempt"
        again = [each.result(20) for each in (begin(1, 1), begin(0, 0))]
        assert not again[0].check(["key"])
        # An attempt that the first rank left before all were there is no other's either.
        with pytest.raises(RankFailedError, match="rank 1 did not connect to"):
            _open_store(replace(member(0), start_timeout_s=0.5))
        last = [each.result(20) for each in (begin(1, 1), begin(0, 1))]
        last[0].set("key", "of the last attempt")
        assert last[1].get("key") == b"of the last attempt"
