"""Which GPU a rank takes, and what is said of a command's end."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.reliability import lab
from trainer.core.rank_progress import RankProgress
from trainer.launch.membership import Membership
from trainer.launch.session import gpu_index, joined


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
        with joined(config, member, RankProgress()):
            dist.destroy_process_group()
            raise ValueError("the first")

    with pytest.raises(ValueError, match="the first"):
        fail()
