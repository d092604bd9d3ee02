"""Which rank a launcher says that a process is."""

import re

import pytest

from trainer.core.errors import ConfigError
from trainer.launch.membership import first_host, global_rank, membership

AT = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4", **AT}
SRUN = {
    **{"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"},
    **{"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_NODELIST": "n[1-2]"},
    "SLURM_JOB_ID": "123456",
}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (TORCHRUN, (5, 8, 2, 4, "a:1")),
        (SRUN, (3, 4, 1, 2, "n1:23456")),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1,3"}, (3, 4, 1, 3, "n1:23456")),
        ({**SRUN, **AT}, (3, 4, 1, 2, "a:1")),
        ({"RANK": "1", "WORLD_SIZE": "2", **AT}, (1, 2, 1, 2, "a:1")),
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        # A script that sbatch or srun runs once starts its own ranks.
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, None),
    ],
)
def test_torchrun_and_srun_say_which_rank_a_process_is(environment, place):
    found = membership(environment)
    if found is None:
        assert place is None
    else:
        numbers = (found.rank, found.size, found.local_rank, found.local_size)
        assert (*numbers, found.address) == place
        assert global_rank(environment) == found.rank


@pytest.mark.parametrize(
    "variables",
    [
        *({"RANK": "8"}, {"RANK": "one"}, {"WORLD_SIZE": "0"}, {"LOCAL_RANK": "4"}),
        *({"LOCAL_WORLD_SIZE": "9"}, {"MASTER_PORT": "http"}, {"TRAIN_MEETING_S": "-1"}),
    ],
)
def test_a_place_among_ranks_that_cannot_be_is_refused(variables):
    ((name, value),) = variables.items()
    with pytest.raises(ConfigError, match=re.escape(f"{name}=")) as caught:
        membership(TORCHRUN | variables)
    assert value in str(caught.value)
    assert caught.value.is_own
    with pytest.raises(ConfigError, match="set MASTER_ADDR and MASTER_PORT as well"):
        membership({"RANK": "1", "WORLD_SIZE": "2"})


def test_jobs_that_share_a_port_do_not_meet_but_all_ranks_of_one_do():
    jobs = [{}, {"TORCHELASTIC_RUN_ID": "a"}, {"TORCHELASTIC_RUN_ID": "b"}]
    # What one machine says of itself alone, the ranks on another need not know.
    own = [{"SLURM_JOB_ID": "7"}, {**jobs[2], "TORCHELASTIC_RESTART_COUNT": "1"}]
    found = [membership(TORCHRUN | each) for each in (*jobs, *own)]
    names = [member.job for member in found if member is not None]
    assert len(set(names)) == len(jobs)
    assert names[len(jobs) :] == [names[0], names[2]]


def test_the_first_machine_of_a_slurm_list():
    lists = ("gpu1", "gpu1,gpu2", "gpu[03-05,9],head", "head,gpu[1-2]", "r[1-2]n.x", "a[7,9]")
    assert [*map(first_host, lists)] == ["gpu1", "gpu1", "gpu03", "head", "r1n.x", "a7"]
