"""What a run begins with on the screen: few lines, also where much is asked for."""

from pathlib import Path

import pytest

from tests.lib.chats import CHATML, chat_tokenizer, conversations
from tests.lib.hf_toys import save_llama, write_lines
from tests.lib.run_support import only_run, read_json, shell

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
CHAT = "model=hf model.path=model adapter=lora adapter.r=2 data=hf data.path=chat.jsonl"
JOBS = [
    CHAT + " batch=ramp 'batch.stages={0:8,32:16}' parallel.ranks=2 scheduler.warmup=1",
    "model=resnet data=digits batch.global=32 parallel.ranks=2",
]
ASKED = ["batch", "model", "data", "objective", "steps", "learning rate"]
COMPUTED = ["cut", "largest", "memory", "time", "device", "BatchNorm"]


@pytest.mark.parametrize("job", JOBS)
def test_eight_lines_say_what_was_asked_for_and_six_how_it_is_computed(
    job, own_folder, monkeypatch, capsys
):
    monkeypatch.setenv("COLUMNS", "80")
    chat_tokenizer(CHATML).save_pretrained("model")
    save_llama(Path("model"), 400, max_position_embeddings=512)
    talk = [*conversations(40), conversations(1)[0] * 8]
    write_lines(Path("chat.jsonl"), [{"messages": each, "id": 1} for each in talk])
    assert shell(f"plan {job} accum=auto steps=4 device=cpu") == 0
    blocks = [block.splitlines()[1:] for block in capsys.readouterr().out.split("\n\n")]
    asked, computed, details = blocks[:3]
    # Beside the output, of which a plan has none.
    assert len(asked) < 8
    assert len(computed) <= 6
    for block, labels in ((asked, ASKED), (computed, COMPUTED)):
        assert {line[2:15].strip() for line in block} <= {*labels, ""}
    plan = read_json(only_run() / "plan.json")
    assert plan["cap_source"] in " ".join(" ".join(details).split())
    assert {"accum_steps", "cap_source", "optimizer_reason", "cadences"} <= plan.keys()
