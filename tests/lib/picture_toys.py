"""Draw digits into a folder with a folder for each class, and save what processes images."""

from pathlib import Path

import numpy as np
import transformers
import yaml
from PIL import Image

from trainer.config.option_files import data_dir
from trainer.features.hugging_face.tokenizers import byte_tokenizer


def draw_pictures(folder: Path, count: int = 60) -> None:
    """Write the first digits of scikit-learn, enlarged to 16 x 16: `folder/7/7-13.png`."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - a second

    digits = load_digits()
    for i in range(count):
        path = folder / str(digits.target[i]) / f"{digits.target[i]}-{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = (digits.images[i] * (255 / 16)).astype(np.uint8).repeat(2, 0).repeat(2, 1)
        Image.fromarray(pixels).save(path)


def save_processor(folder: Path, side: int = 20, **settings: list[float]) -> Path:
    """Write the preprocessor_config.json of a ViT."""
    size = {"height": side, "width": side}
    transformers.ViTImageProcessorPil(size=size, **settings).save_pretrained(folder)
    return folder


def save_vit(folder: Path, side: int = 20, **settings: list[float]) -> None:
    """Write a ViT of one layer with random weights, and what processes its images."""
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes = small | {"num_attention_heads": 2, "image_size": side, "patch_size": 10}
    config = transformers.ViTConfig(**sizes)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    save_processor(folder, side, **settings)


def save_llava(folder: Path, image_size: int = 16, patch_size: int = 4) -> None:
    """Write a LLaVA with random weights that reads bytes, and what processes its images."""
    recipe = yaml.safe_load((data_dir("recipes") / "image_text.yaml").read_text())
    sizes = {"image_size": image_size, "patch_size": patch_size}
    settings = recipe["model"]["config"]
    settings["vision_config"] |= sizes
    settings["text_config"] |= {"max_position_embeddings": 1024}
    config = transformers.AutoConfig.for_model(**settings)
    model = transformers.LlavaForConditionalGeneration(config)
    sampled = {"do_sample": True, "top_p": 0.9, "max_new_tokens": 5}
    model.generation_config = transformers.GenerationConfig(**sampled)
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    pixels = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": image_size}, crop_size=image_size, image_mean=[0.1, 0.2, 0.3]
    )
    shape = {"patch_size": patch_size, "vision_feature_select_strategy": "default"}
    transformers.LlavaProcessor(pixels, tokenizer, **shape).save_pretrained(folder)
