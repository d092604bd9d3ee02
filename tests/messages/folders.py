"""Models and data that lines of the tables need, as small as they can be."""

import json
import shutil
from pathlib import Path

from tests.lib.heads import Head, save_causal_model, save_tokens
from tests.lib.hf_toys import TEMPLATE, TEXTS, save_llama, save_tokenizer, write_lines
from tests.lib.run_support import go


def faulty_models(here: Path) -> None:
    """A model that is whole, token data, and copies of the model that cannot be built."""
    save_causal_model(here / "model")
    save_tokens(here / "data")
    config = json.loads((here / "model" / "config.json").read_text())
    for folder, changes in (
        ("odd", {"architectures": None}),
        ("kernel", {"attn_implementation": "someone/kernel"}),
        ("deep", {"n_layer": 1_000_000_000}),
        ("classes", {"num_labels": 1_000_000_000}),
        ("nameless", {"architectures": [5]}),
        ("labels", {"id2label": 5}),
        ("headless", {"n_head": 0}),
        ("elsewhere", {"transformers_weights": "other.safetensors"}),
        ("adapter", {}),
        ("quantised", {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
        ("pickle", {}),
        ("outside", {}),
        ("own", {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}),
    ):
        (here / folder).mkdir()
        (here / folder / "config.json").write_text(json.dumps(config | changes))
    base = '{"base_model_name_or_path": "llama"}'
    (here / "adapter" / "adapter_config.json").write_text(base)
    for folder, file in (("pickle", "pytorch_model.bin"), ("outside", "../model.safetensors")):
        index = {"metadata": {}, "weight_map": {"transformer.wte.weight": file}}
        (here / folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copytree(here / "model", here / "cut")
    file = here / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:500])


def llama_and_texts(here: Path) -> None:
    """A causal model with its tokenizer, and files of texts, completions and labels."""
    save_llama(here / "llama")
    save_tokenizer(here / "llama", chat_template=TEMPLATE)
    write_lines(here / "corpus.jsonl", [{"text": text} for text in TEXTS])
    write_lines(here / "pairs.jsonl", [{"prompt": text, "completion": "so"} for text in TEXTS])
    write_lines(
        here / "flags.jsonl",
        [{"text": text, "label": [0, 1] if i != 1 else 1} for i, text in enumerate(TEXTS)],
    )
    (here / "scored.csv").write_text("sentence1,sentence2,score\n" + "a,b,1\n" * 20)
    (here / "reviews.csv").write_text("review,sentiment\ngood,1\nbad,0\n")
    (here / "latin.csv").write_bytes("text,label\ncaf\xe9,1\n".encode("latin-1"))


def parts_of_data(here: Path) -> None:
    """Data sets of two parts to train on, of none, and of one."""
    import datasets  # noqa: PLC0415 - seconds

    for folder, names in {"apart": "train_a train_b", "letters": "a b", "one": "train"}.items():
        parts = {name: datasets.Dataset.from_dict({"text": [name]}) for name in names.split()}
        datasets.DatasetDict(parts).save_to_disk(here / folder)


def runs_to_read(here: Path) -> None:
    """Finished runs of one step: one that held nothing out, and one of a classifier of images."""
    go("steps=1 data.holdout=0").folder.rename(here / "run")
    toys = "model._target_=tests.lib.run_toys.Vision data._target_=tests.lib.run_toys.Images"
    go(f"steps=1 {toys}").folder.rename(here / "pictures")


def runs_of_a_name(here: Path) -> None:
    """Three runs, two of one name, a sweep, a link to a run, and a folder of none."""
    for name, text in {
        "day/1-first": "command: train\nname: first\n",
        "day/2-first": "command: train\nname: first\n",
        "day/3-other": "command: train\nname: other\n",
        "multirun/day/4-swept/0": "command: train\nname: swept\n",
    }.items():
        records = here / "outputs" / name / ".hydra"
        records.mkdir(parents=True)
        (records / "started.json").write_text(json.dumps({"started": int(records.parent.name[0])}))
        (records.parent / "config.yaml").write_text(text)
    (here / "outputs" / "latest").symlink_to(here / "outputs" / "day" / "3-other")
    (here / "outputs" / "day" / "notes").mkdir()


def llama_and_tokens(here: Path) -> None:
    """A causal model of two layers, and token data for it."""
    deep = {"num_hidden_layers": 2}
    Head("LlamaForCausalLM", "LlamaConfig", "causal", deep).build().save_pretrained(here / "llama")
    save_tokens(here / "causal")
