"""Images are learned from the command line: digits, models for them, and classes of one's own."""

import sys
from pathlib import Path

import numpy as np
import pytest
import transformers
from PIL import Image

from tests.lib.nightly import nightly, slow
from tests.lib.picture_toys import draw_pictures, save_llava, save_vit
from tests.lib.run_support import TOYS, read_json, shell
from trainer import train
from trainer.features.vision.pixels import open_image, pixels_of

MINE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))

    def forward(self, x):
        return self.body(x)


class Flip:  # mirrors every second image, by draws of its own
    def __init__(self):
        self.draws = torch.Generator()

    def __call__(self, image):
        is_mirrored = int(torch.randint(2, (), generator=self.draws))
        return image.flip(-1) if is_mirrored else image
"""
OWN_IMAGES = f"data._target_={TOYS}.Images model.num_classes=4"
QUICK = ["wandb.mode=disabled", "checkpoint.every=null", "eval.every=null", "log.every=100"]


@pytest.fixture(autouse=True)
def classes(own_folder, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("painting.py").write_text(MINE)


@pytest.mark.nightly
def test_digits_are_learned_by_a_small_resnet():
    run = train(["data=digits", "model=resnet", "accum=auto", *QUICK])
    assert run.result["metrics"]["accuracy"] >= 0.97
    plan = read_json(run.folder / "plan.json")
    assert plan["num_held_out"] == 359
    assert plan["num_samples"] == 1438


@pytest.mark.parametrize(
    "line",
    [
        "data=digits model._target_=painting.Net",
        slow(f"{OWN_IMAGES} model=vit model.patch_size=3 model.depth=1"),
    ],
)
def test_models_and_images_of_one_s_own_meet_the_built_in_ones_whatever_their_names(line):
    size = 512 if "digits" in line else 32
    run = train([*line.split(), f"batch.global={size}", "optimizer.lr=2e-2", "steps=12", *QUICK])
    assert run.result["metrics"]["accuracy"] > 0.8


@pytest.mark.slow
def test_draws_that_go_on_from_image_to_image_are_named_by_verify(capsys):
    draw_pictures(Path("pictures"))
    line = "data=images data.path=pictures data.size=16 model=vit model.depth=1 model.width=16 "
    line += "model.num_heads=2 batch.global=16 accum=fixed accum.micro=3 precision=fp32"
    shell(f"verify {line} data.augment=[painting.Flip] {' '.join(QUICK)}")
    assert "generator that no seed governs" in " ".join(capsys.readouterr().out.split())


def test_a_plan_draws_images_and_names_the_picture(capsys):
    draw_pictures(Path("pictures"))
    data = "data=images data.path=pictures data.size=32"
    assert shell(f"plan {data} model=resnet batch.global=32 data.show=5") == 0
    (path,) = Path("outputs").glob("*/*/samples.png")
    assert str(path) in capsys.readouterr().out.replace("\n", "")
    with Image.open(path, formats=["PNG"]) as image:
        assert image.size == (3 * 132, 2 * 148)
        tile = np.asarray(image)[:128, :128]
    # A tile is the image itself, scaled by a whole number.
    assert (tile[::4, ::4] == tile[3::4, 3::4]).all()
    assert tile.std() > 0


@pytest.mark.parametrize("typed", ["", nightly("data.std=[1,1,1]")])
def test_an_export_makes_the_pixels_that_were_trained_on(typed):
    save_vit(Path("vit"), image_mean=[0.5, 0.4, 0.3])
    draw_pictures(Path("pictures"), 20)
    line = f"model=hf model.path=vit data=images data.path=pictures batch.global=4 {typed} steps=1"
    line += " model.ignore_mismatched_sizes=true"
    run = train([*line.split(), *QUICK])
    assert shell(f"export run={run.folder} export.to=out") == 0
    image = open_image(Path("pictures/7/7-7.png"))
    pipeline = transformers.pipeline("image-classification", "out")
    theirs = pipeline.image_processor(image, return_tensors="pt")
    ours = pixels_of(std=[1, 1, 1] if typed else None, model_path="vit")(image)
    # Where something is typed it is another processor, which does not round as ours does.
    assert (theirs["pixel_values"][0] - ours).abs().max() <= (2 / 255 if typed else 0)
    assert ours.mean() != pytest.approx(float(pixels_of()(image).mean()), abs=0.1)


@pytest.mark.nightly
def test_an_export_of_a_model_of_images_and_text_has_its_processor_and_generation_settings():
    save_llava(Path("llava"))
    line = "model=hf model.path=llava data=image_text tokenizer=hf batch.global=4 steps=1"
    run = train([*line.split(), "data.holdout=0.99", "accum=fixed", "accum.micro=4", *QUICK])
    assert shell(f"export run={run.folder} export.to=out") == 0
    for name in ("processor_config.json", "generation_config.json", "chat_template.jinja"):
        assert Path("out", name).read_text() == Path("llava", name).read_text()
    found = transformers.AutoProcessor.from_pretrained("out")
    assert isinstance(found, transformers.LlavaProcessor)
    assert found.image_processor.image_mean == (0.1, 0.2, 0.3)
