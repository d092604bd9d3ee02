"""Which rank a launcher says that a process is, and what its collectives say of a lost one."""

from __future__ import annotations

import re

import pytest

from trainer.core.errors import ConfigError
from trainer.core.launcher import first_host, global_rank, is_peer_failure, membership


@pytest.mark.parametrize(
    ("listed", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[03-05,9],head", "gpu03"),
        ("head,gpu[1-2]", "head"),
        ("r[1-2]n.x", "r1n.x"),
        ("a[7,9]", "a7"),
    ],
)
def test_the_first_machine_of_a_slurm_list(listed: str, first: str) -> None:
    assert first_host(listed) == first


def test_srun_says_which_rank_this_is_and_where_the_ranks_connect() -> None:
    srun = {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_ID": "123456",
    }
    member = membership(srun)
    assert member is not None
    assert (member.rank, member.size, member.local_rank, member.local_size) == (3, 4, 1, 2)
    assert member.address == "n1:23456"
    uneven = membership({**srun, "SLURM_STEP_TASKS_PER_NODE": "1,3"})
    assert uneven is not None
    assert uneven.local_size == 3
    assert global_rank(srun) == 3
    # A script that sbatch or srun runs once starts its own ranks.
    assert membership({**srun, "SLURM_STEP_NUM_TASKS": "1"}) is None
    with pytest.raises(ConfigError, match="to find the others it needs MASTER_ADDR"):
        membership({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": "5"}, "RANK=5 in the environment: WORLD_SIZE=2 makes 1 the largest"),
        ({"RANK": "one"}, "RANK='one' in the environment: not a number from 0 on"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' in the environment: not a number from 1 on"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 in the environment: LOCAL_WORLD_SIZE=2 makes 1"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3: WORLD_SIZE=2 ranks are all there are"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' in the environment: not a number"),
        ({"TRAIN_MEETING_S": "-1"}, "TRAIN_MEETING_S='-1' in the environment: not a number"),
    ],
)
def test_a_place_among_ranks_that_cannot_be_is_refused(
    variables: dict[str, str], says: str
) -> None:
    good = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    good |= {"MASTER_ADDR": "h", "MASTER_PORT": "29500"}
    assert membership(good) is not None
    with pytest.raises(ConfigError, match=re.escape(says)):
        membership(good | variables)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: reset", True),
        ("Gloo connectFullMesh failed with [../third_party/gloo/gloo/rendezvous/x.cc:9] no", True),
        ("Connection closed by the label server", False),
        ("cannot open gloo.txt", False),
    ],
)
def test_a_rank_that_is_gone_is_no_other_error(text: str, lost: bool) -> None:
    assert is_peer_failure(RuntimeError(text)) is lost
    assert not is_peer_failure(ValueError(text))
