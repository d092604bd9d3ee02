"""A folder with a folder for each class is a data set, and augmentations follow id and epoch."""

from contextlib import suppress
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image

from tests.lib.picture_toys import save_processor
from trainer.core.errors import ConfigError, DataError
from trainer.data.joined import MixtureSource
from trainer.data.loader import Loader, Request
from trainer.data.view import DataView
from trainer.features.mixture.mixture import Mixture
from trainer.features.vision.augment import Augment
from trainer.features.vision.digits import Digits
from trainer.features.vision.images import ImageFolders
from trainer.features.vision.pixels import open_image


class Shift:
    """Rolls an image by a number of pixels that it draws."""

    def __call__(self, image):
        return image.roll(int(torch.randint(1, 8, ())), -1)


def write(path: Path, value: int = 100) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (12, 8), value).save(path)


def test_a_folder_per_class_gives_images_of_one_size_with_the_mean_taken_off(tmp_path):
    picture = Image.new("RGB", (16, 8))
    picture.paste((255, 51, 0), (4, 0, 12, 8))  # the centre, which is not cut off
    (tmp_path / "dog").mkdir()
    picture.save(tmp_path / "dog/a.png")
    write(tmp_path / "cat/deep/b.JPG")
    write(tmp_path / ".hidden/c.png")
    (tmp_path / "cat/notes.txt").write_text("no image")
    data = ImageFolders(str(tmp_path), size=4, mean=(0.5, 0.0, 0.0), std=(1.0, 2.0, 1.0))
    (train,) = data.splits().values()
    assert (len(train), train.num_classes, train.label_names) == (2, 2, ["cat", "dog"])
    assert train.name_of(1).endswith("dog/a.png")
    image = train[1]["pixel_values"]
    assert image.shape == (3, 4, 4)
    assert image[:, 2, 2].tolist() == pytest.approx([0.5, 0.1, 0.0])
    assert [int(train[i]["labels"]) for i in range(2)] == [0, 1]
    again = ImageFolders(str(tmp_path)).splits()["train"]
    assert again.fingerprint == train.fingerprint
    write(tmp_path / "cat/new.png")
    assert ImageFolders(str(tmp_path)).splits()["train"].fingerprint != train.fingerprint


def test_folders_train_and_val_are_parts_and_a_class_may_be_called_train(tmp_path):
    for name in ("train/cat", "train/dog", "val/dog", "test/dog"):
        write(tmp_path / "parted" / name / "a.png")
    parts = ImageFolders(str(tmp_path / "parted"), size=4).splits()
    assert {name: len(part) for name, part in parts.items()} == {"train": 2, "held_out": 1}
    assert int(parts["held_out"][0]["labels"]) == 1
    for name in ("plane", "train"):
        write(tmp_path / "flat" / name / "a.png")
    assert ImageFolders(str(tmp_path / "flat")).splits()["train"].label_names == ["plane", "train"]


def test_bad_folders_are_named(tmp_path):
    with pytest.raises(DataError, match="holds no folder for each class"):
        ImageFolders(str(tmp_path))
    write(tmp_path / "train/cat/a.png")
    with pytest.raises(DataError, match="train: cat is the only class"):
        ImageFolders(str(tmp_path))
    write(tmp_path / "train/dog/a.png")
    write(tmp_path / "val/cow/a.png")
    with pytest.raises(DataError, match=r"val/cow: no class of the training data \(cat, dog\)"):
        ImageFolders(str(tmp_path))
    with pytest.raises(ConfigError, match=r"data.std=\[0, 1, 1\]: needs a number each"):
        ImageFolders(str(tmp_path), std=(0, 1, 1))
    with pytest.raises(ConfigError, match=r"data\.augment: .flip. is not callable"):
        Digits(augment="flip")


def test_a_file_that_is_no_image_is_named(tmp_path):
    write(tmp_path / "cat/a.png")
    write(tmp_path / "dog/a.png")
    (tmp_path / "cat/b.png").write_bytes(b"no image")
    (part,) = ImageFolders(str(tmp_path)).splits().values()
    view = DataView(part)
    assert view.lengths.sum() == 3, "no file is read for it"
    with pytest.raises(DataError, match=r"cat/b.png: UnidentifiedImageError"):
        view.read(1, seed=0, epoch=0)


def test_files_are_images_by_what_they_hold_and_the_others_are_counted(tmp_path):
    for name in ("cat/a.jfif", "dog/b.avif"):
        write(tmp_path / name)
    write(tmp_path / "cat/c.png")
    (tmp_path / "cat/c.png").rename(tmp_path / "cat/no_suffix")
    for name in ("cat/d.heic", "cat/e.txt", "dog/f.txt"):
        (tmp_path / name).write_text("BM, as some images begin")
    (part,) = ImageFolders(str(tmp_path)).splits().values()
    names = ["a.jfif", "no_suffix", "b.avif"]
    assert [Path(part.name_of(i)).name for i in range(len(part))] == names
    assert part[1]["pixel_values"].shape == (3, 64, 64)
    *_, shown = part.describe_records(None)
    assert shown.text == "passed over: 1 .heic file, 2 .txt files"
    (tmp_path / "cow").mkdir()
    (tmp_path / "cow/g.heic").write_text("no image")
    fault = r"cow: no image of AVIF, .* \(1 \.heic file\); convert them, or remove"
    with pytest.raises(DataError, match=fault):
        ImageFolders(str(tmp_path))


def test_an_image_of_another_format_starts_no_program(tmp_path, monkeypatch):
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    file = tmp_path / "x.png"
    Image.new("RGB", (8, 8)).save(file, format="EPS")
    with pytest.raises(OSError, match="cannot identify image file"):
        open_image(file)
    with Image.open(file) as image, suppress(OSError):  # the control
        image.load()
    assert [path.name for path in tmp_path.iterdir()].count("started") == 1


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")  # once a process
def test_an_image_of_too_many_pixels_is_refused(tmp_path):
    Image.new("1", (13_000, 13_000)).save(tmp_path / "x.png")
    with pytest.raises(ValueError, match="13000 x 13000 is above 89,478,485 pixels; shrink it"):
        open_image(tmp_path / "x.png")


def test_a_model_s_own_processor_makes_the_pixels(tmp_path):
    folder = save_processor(tmp_path / "vit", image_mean=[0.5] * 3, image_std=[0.5, 0.25, 0.5])
    for name in ("cat", "dog"):
        write(tmp_path / "photos" / name / "a.png", value=255)
    with Image.open(tmp_path / "photos/cat/a.png", formats=["PNG"]) as image:
        rgb = image.convert("RGB").resize((13, 7))
        rgb.putpixel((3, 4), (9, 99, 199))
    rgb.save(tmp_path / "photos/dog/a.png")

    def part(**typed):
        data = ImageFolders(str(tmp_path / "photos"), model_path=str(folder), **typed)
        return data.splits()["train"]

    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    theirs = processor(rgb, return_tensors="pt")["pixel_values"]
    for typed in ({}, {"size": 20}, {"processor": str(folder), "mean": [0.5] * 3}):
        data = part(**typed)
        assert data[1]["pixel_values"].equal(theirs[0])
        assert data[0]["pixel_values"].amax((1, 2)).tolist() == [1, 2, 1], "white"
    (said,) = data.describe_records(None)
    words = "20 x 20 pixels, mean 0.5 0.5 0.5, std 0.5 0.25 0.5, by ViTImageProcessorPil"
    assert said.text == words
    other = part(size=8)  # is cut, and not squeezed, and normalised as the model takes it
    assert other[0]["pixel_values"].equal(torch.tensor([1.0, 2, 1])[:, None, None].expand(3, 8, 8))
    assert other.fingerprint != data.fingerprint
    plain = part(size=20, mean=[0.0] * 3, std=[1.0] * 3)
    assert plain[0]["pixel_values"].equal(torch.ones(3, 20, 20))
    (folder / "preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"data\.processor=.*vit: cannot be used: "):
        part()


def images(loader: Loader, ids: tuple[int, ...], epoch: int = 0) -> torch.Tensor:
    return loader.load(Request(ids, epoch, 1))["pixel_values"]


def test_augmentations_follow_seed_sample_and_epoch_alone_and_spare_what_is_evaluated():
    data = DataView(Digits(augment=[Shift()]))

    def loader_of(num_workers: int = 0, seed: int = 0) -> Loader:
        made = Loader(data, num_workers=num_workers, seed=seed)
        made.augment_with(data.facts.augment)
        return made

    loader, with_workers = loader_of(), loader_of(num_workers=1)
    before = torch.random.get_rng_state()
    whole = images(loader, (3, 1, 2))
    assert torch.random.get_rng_state().equal(before)
    assert torch.cat([images(loader, (i,)) for i in (3, 1, 2)]).equal(whole), "whatever the cut"
    (loaded,) = with_workers.stream(iter([Request((3, 1, 2), 0, 1)]))
    with_workers.close()
    assert loaded["pixel_values"].equal(whole)
    assert not images(loader, (3, 1, 2), epoch=1).equal(whole)
    assert not images(loader_of(seed=1), (3, 1, 2)).equal(whole)
    plain = torch.stack([data.dataset[i]["pixel_values"] for i in (3, 1, 2)])
    assert (plain.min(), plain.max()) == (0, 1)
    assert images(loader.of(data, 0), (3, 1, 2)).equal(plain)
    assert not whole.equal(plain)


def test_an_augmentation_sees_pixels_from_0_to_1_whatever_is_taken_off_them():
    seen = []
    augment = Augment([lambda image: seen.append(image) or image], (0.5,), (0.25,))
    sample = {"pixel_values": torch.tensor([[[-2.0, 2.0]]]), "labels": torch.tensor(1)}
    found = augment(sample)
    assert seen[0].flatten().tolist() == [0.0, 1.0]
    assert found["pixel_values"].equal(sample["pixel_values"])


def test_a_mixture_refuses_what_it_would_not_change():
    source = MixtureSource(train=DataView(Digits(augment=[Shift()])), held_out=None, weight=1.0)
    with pytest.raises(ConfigError, match=r"data\.sources\.code\.augment: a mixture changes no"):
        Mixture({"code": source})


def test_without_classes_every_image_of_a_folder_counts_and_a_broken_one_waits_for_its_turn(
    tmp_path,
):
    write(tmp_path / "b.png")
    write(tmp_path / "a/c.png")
    (tmp_path / "a/0.png").write_text("no image")
    (data,) = ImageFolders(str(tmp_path), size=4, label_names=["x"], learns=False).splits().values()
    assert [data.name_of(i) for i in range(len(data))] == ["a/0.png", "a/c.png", "b.png"]
    loader = Loader(data, num_workers=0, seed=0)
    fields = loader.load(Request(ids=(1, 2), epoch=0, pad_to=1))
    assert {name: field.shape for name, field in fields.items()} == {"pixel_values": (2, 3, 4, 4)}
    with pytest.raises(DataError, match=r"a/0\.png: no image of AVIF.*WEBP$"):
        loader.load(Request(ids=(0,), epoch=0, pad_to=1))
    Image.effect_noise((64, 64), 50).save(tmp_path / "b.png")
    (tmp_path / "b.png").write_bytes((tmp_path / "b.png").read_bytes()[:2000])
    with pytest.raises(DataError, match=r"data: b\.png: image file is truncated$"):
        loader.load(Request(ids=(2,), epoch=0, pad_to=1))
    (tmp_path / "c").mkdir()
    (tmp_path / "c/notes.txt").write_text("no image")
    with pytest.raises(DataError, match="no image of AVIF"):
        ImageFolders(str(tmp_path / "c"), learns=False)
