"""The keys of the interface: which there are, and that schema and option files agree on them."""

import importlib
import inspect
import re

import pytest
import yaml

from tests.lib.config_support import CONF, checked, options
from trainer.config import trackers
from trainer.config.components import COMPONENTS, FEATURES, GROUPS, extra_keys
from trainer.config.keys import KEYS
from trainer.config.messages import flat
from trainer.config.option_files import OWN, load_yaml
from trainer.config.run_config import to_plain
from trainer.config.validate import from_plain
from trainer.features.hugging_face.data_set import HuggingFaceData

PRIMARY = load_yaml(CONF / "config.yaml")


OPTIONS = {
    str(folder.relative_to(CONF)): sorted(file.stem for file in folder.glob("*.yaml"))
    for folder in CONF.rglob("*")
    if folder.is_dir() and "hydra" not in folder.parts  # groups of Hydra itself
}

NEEDS = {
    "accum=budget": {"accum.max_tokens": 4096},
    "accum=fixed": {"accum.micro": 8},
    "adapter=lora": {"init": "outputs/base"},
    "batch=noise_ramp": {"batch.max": 1024},
    "batch=ramp": {"batch.stages": {0: 64, 20000: 256}},
    "data=hf": {"data.path": "notes.jsonl"},
    "data=images": {"data.path": "photos"},
    "data=mixture": {"data.sources": {"code": {"path": "code.jsonl", "weight": 3}}},
    "data=text": {"data.path": "notes.txt"},
    "data=tokens": {"data.path": "tokens.bin", "data.vocab_size": 256},
    "objective=distill": {"objective.teacher": "outputs/base"},
}
"""Values without which an option means nothing."""

# What the program passes to a constructor itself, or adds to a cut while it runs.
GIVEN = {
    "ImageText": {"tokenizer", "model_path", "learns"},
    "ConstantSize": {"global_batch"},
    "NoiseRamp": {"global_batch", "unit"},
    "Ramp": {"global_batch"},
    "TwoPass": {"objective"},
    "by_coupling": {"objective"},
    "Auto": {"max_tokens", "single_sample_cap", "cost", "cap_after_failure"},
    "Budget": {"cap_after_failure"},
    "MaskedLM": {"tokenizer"},
    "HuggingFaceData": {
        "objective",
        "tokenizer",
        "task",
        "max_positions",
        "model_labels",
        "label_names",
        "seed",
        "on_bad",
        "learns",
        "trained_format",
    },
    "ImageFolders": {"label_names", "model_path", "learns"},
    "Lora": {"others"},
    "StdlibText": {"split", "seed", "root"},
    "Text": {"split", "seed", "on_bad", "learns"},
    "TokenWindows": {"split"},
    "hugging_face": {"label_kind", "label_names", "new_token_ids", "pad_token_id"},
    "hugging_face_tokenizer": {"model"},
    "tokenizer_of_model": {"model"},
}


def test_every_key_has_a_doc_and_the_default_of_its_option_file():
    known = flat(options("model=gpt2")[0])
    for key in KEYS.keys() - set(GROUPS):
        assert KEYS[key].doc, key
        assert key not in known or known[key] == KEYS[key].default, key
    for key in flat(options()[0]):
        sections = (*COMPONENTS, *trackers.options())
        assert key in KEYS or any(key.startswith(f"{path}.") for path in sections), key


# Groups do not depend on each other, so that one composition shows an option of each.
@pytest.mark.parametrize("turn", range(max(map(len, OPTIONS.values()))))
def test_every_option_composes_validates_and_survives_the_way_to_its_file(turn):
    values, choices = {}, []
    for group, names in OPTIONS.items():
        if group not in {"preset", "trackers"}:
            option = names[min(turn, len(names) - 1)]
            choices.append(f"{group}={option}")
            values |= NEEDS.get(choices[-1], {})
            if option == OWN:
                values[f"{group.replace('/', '.')}._target_"] = "my_package.Mine"
    config = checked(values, *choices)
    plain = to_plain(config)
    assert config.choices.items() >= dict(each.split("=") for each in choices).items()
    assert to_plain(from_plain(plain)) == plain


def test_option_files_say_what_they_choose_and_their_keys_are_their_constructors_arguments():
    for file in (CONF / "config.yaml", *sorted(CONF.glob("*/**/*.yaml"))):
        lines = file.read_text().splitlines()
        assert lines[0].startswith("# "), file
        begin = next((i for i, line in enumerate(lines) if line.startswith("command:")), 0)
        for line in lines[begin : lines.index("hydra:") if begin else None]:
            if re.match(r"\s*\w+: \S", line) and "_target_" not in line:
                assert " # " in line, line
        keys = yaml.safe_load(file.read_text())
        module, _, name = str(keys.pop("_target_", "")).rpartition(".")
        if module and "hydra" not in file.parts:  # those are built by Hydra and Optuna
            made = getattr(importlib.import_module(module), name)
            known = inspect.signature(made).parameters.keys()
            group = file.parent.name
            shared = PRIMARY.get(group, {}) if group in FEATURES else {}  # by all of its options
            own = {*extra_keys(group), *shared}
            if name == "Mixture":  # its other settings are of its sources
                source = inspect.signature(HuggingFaceData).parameters.keys()
                known |= source - GIVEN["HuggingFaceData"] - {"path", "subset", "part"}
            # A share is held out of a class that takes no holdout itself, too.
            by_trainer = {"holdout"} - known if file.parent.name == "data" else set()
            if module == "torch.optim":
                by_trainer = {"groups", "layer_decay"}
                # A step inside a graph of CUDA or of autograd is another step than ours.
                known -= {"params", "capturable", "differentiable"}
            assert keys.keys() - own - by_trainer == known - own - GIVEN.get(name, set()), file
