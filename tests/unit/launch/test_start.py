"""What a process is set to before libraries start."""

import os

import pytest

from trainer.launch.start import ALLOCATOR_SETTINGS, set_process_defaults


@pytest.mark.parametrize("name", [None, *ALLOCATOR_SETTINGS])
def test_segments_of_a_gpu_s_allocator_grow_unless_the_user_set_it(monkeypatch, name):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    for each in ALLOCATOR_SETTINGS:
        monkeypatch.setenv(each, "")
        monkeypatch.delenv(each)
    if name is not None:
        monkeypatch.setenv(name, "max_split_size_mb:64")
    set_process_defaults()
    found = {each: os.environ[each] for each in ALLOCATOR_SETTINGS if each in os.environ}
    if name is None:
        assert found == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    else:
        assert found == {name: "max_split_size_mb:64"}
