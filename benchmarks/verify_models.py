"""Small configs of the classes of transformers, made from its own auto mappings.

A config begins as its class's default, and every size that is known by name is made small, also in
the configs within it. What then cannot be built, or does not run on such samples, is left out, with
its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from verify_samples import FIRST_WORD, IMAGE, NUM_LABELS, VOCABULARY, Samples

MOST_PARAMETERS = 8_000_000

KINDS: Mapping[str, tuple[str, str]] = {
    "causal_lm": ("CausalLM", "CAUSAL_LM"),
    "masked_lm": ("MaskedLM", "MASKED_LM"),
    "seq2seq_lm": ("Seq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM"),
    "sequence_classification": ("SequenceClassification", "SEQUENCE_CLASSIFICATION"),
    "token_classification": ("TokenClassification", "TOKEN_CLASSIFICATION"),
    "question_answering": ("QuestionAnswering", "QUESTION_ANSWERING"),
    "multiple_choice": ("MultipleChoice", "MULTIPLE_CHOICE"),
    "image_classification": ("ImageClassification", "IMAGE_CLASSIFICATION"),
    "audio_classification": ("AudioClassification", "AUDIO_CLASSIFICATION"),
    "image_text_to_text": ("ImageTextToText", "IMAGE_TEXT_TO_TEXT"),
}
"""By kind: as the auto class that builds it is called, and the mapping of its model types."""

_NAMES: Sequence[tuple[int, str]] = (
    (
        32,
        "hidden_size n_embd d_model dim embed_dim hidden_dim encoder_hidden_size width "
        "embedding_size decoder_hidden_size emb_dim projection_dim text_embed_dim d_embed "
        "num_mel_bins_hidden lru_width output_dim out_hidden_size vision_dim "
        "projector_hidden_size",
    ),
    (
        48,
        "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner "
        "ffn_hidden_size d_inner feed_forward_proj_size encoder_intermediate_size "
        "decoder_intermediate_size",
    ),
    (
        16,
        "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
        "moe_shared_expert_intermediate_size conv_dim_short mlp_hidden_size",
    ),
    (
        8,
        "head_dim attention_head_dim d_kv global_head_dim kv_lora_rank q_lora_rank v_head_dim "
        "linear_key_head_dim linear_value_head_dim index_head_dim kv_channels swa_head_dim "
        "hidden_size_per_layer_input",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
        "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
        "qk_rope_head_dim qk_nope_head_dim num_experts n_routed_experts num_local_experts "
        "linear_num_value_heads encoder_num_attention_heads decoder_num_attention_heads "
        "attention_heads moe_num_experts state_size ssm_state_size mamba_d_state "
        "index_n_heads index_topk attention_window "
        "rotary_dim",
    ),
    (
        2,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
        "num_decoder_layers num_encoder_layers encoder_num_hidden_layers "
        "decoder_num_hidden_layers num_key_value_heads num_kv_heads num_experts_per_tok "
        "num_experts_per_token moe_topk moe_k linear_num_key_heads depth num_block_layers "
        "encoder_depth layers mask_time_length",
    ),
    (
        1,
        "n_group topk_group n_shared_experts first_k_dense_replace num_nextn_predict_layers",
    ),
    (
        VOCABULARY,
        "vocab_size text_vocab_size src_vocab_size tgt_vocab_size vocab_size_per_layer_input",
    ),
    (
        64,
        "max_position_embeddings n_positions n_ctx max_source_positions max_target_positions "
        "max_seq_len seq_length max_sequence_length max_seq_length max_length",
    ),
    (
        IMAGE,
        "image_size img_size input_size",
    ),
)
SIZES = {name: size for size, names in _NAMES for name in names.split()}
SPECIAL: dict[str, Any] = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
SPECIAL |= {"default_language": "en_XX"}
DERIVED = (
    "qk_head_dim",
    "per_layer_config",
    "num_feat_extract_layers",
    "out_features",
    "stage_names",
)
"""What a config computes from others, and is left out."""


class CannotBuildError(Exception):
    """No small config of a class was found that transformers builds and runs."""


def shrink(values: Mapping[str, Any], dropped: tuple[str, ...] = ()) -> dict[str, Any]:
    """Make small what is known by name, in a config that was written as a dict.

    Args:
        values: as `to_dict` gives them.
        dropped: names that are left to the config's own default.
    """
    layers = 2 if "vision_config" in values or "vision_feature_layer" in values else 1
    for name, value in values.items():
        if name.endswith(("layer_types", "layers_block_type", "layers_type")) and value:
            layers = max(layers, min(4, len(set(map(str, value)))))
    small: dict[str, Any] = {}
    for name, value in values.items():
        if (
            name == "embed_dim"
            and isinstance(heads := values.get("num_heads"), list)
            and isinstance(value, int)
        ):
            small[name] = 8 * heads[0]
            continue
        if name in dropped or name in DERIVED or name in ("id2label", "label2id", "dtype"):
            continue
        small[name] = _shrunk(name, value, layers, dropped)
    if "qk_rope_head_dim" in small:
        small["head_dim"] = small["qk_rope_head_dim"]
    return small


def _shrunk(name: str, value: Any, layers: int, dropped: Sequence[str]) -> Any:  # noqa: ANN401 - any config
    if name == "rope_parameters" or value is None or isinstance(value, bool):
        return SPECIAL.get(name, value) if value is None else value
    if isinstance(value, Mapping):
        return shrink(value, dropped)
    if name in SPECIAL:
        return SPECIAL[name]
    if name.endswith(("_token_id", "_token_index", "_token_idx")) and isinstance(value, int):
        return value if 0 <= value < FIRST_WORD else 3 + value % (FIRST_WORD - 3)
    if name.endswith(("layer_types", "layers_block_type", "layers_type")):
        kinds = list(dict.fromkeys(value))
        return [*kinds, *[kinds[-1]] * layers][:layers]
    if isinstance(value, list | tuple):
        return _shrunk_list(name, list(value), layers)
    size = SIZES.get(name)
    if size is None or not isinstance(value, int):
        return value
    return layers if size == 2 and "layer" in name else min(value, size)


def _shrunk_list(name: str, values: list[Any], layers: int) -> list[Any]:
    is_numbers = bool(values) and all(type(v) is int for v in values)
    if is_numbers and name in ("depths", "layers", "num_layers", "num_blocks", "depth"):
        return [min(v, 1) for v in values]
    if is_numbers and name in SIZES and SIZES[name] == IMAGE:
        return [IMAGE] * len(values)
    if is_numbers and name == "intermediate_size":
        return [SIZES[name]] * layers
    if is_numbers and name == "conv_dim":
        return [16] * len(values)
    if is_numbers and name == "attention_window":
        return [SIZES[name]] * 2
    if is_numbers and name.endswith("hidden_sizes") and min(values) >= 32:
        return [v // 4 for v in values]
    if name.endswith("token_id") and is_numbers:
        return [v % FIRST_WORD for v in values]
    return values


ATTEMPTS: Sequence[tuple[str, ...]] = (
    (),
    ("head_dim",),
    ("head_dim", "layer_types"),
    ("num_key_value_heads",),
    ("layer_types", "mlp_layer_types", "layers_block_type"),
)


@final
@dataclass(frozen=True, kw_only=True)
class Model:
    """A small config of one class, as it is in a folder.

    Attributes:
        name: the class.
        kind: what it is made for, one of `KINDS`.
        folder: with its config.json.
    """

    name: str
    kind: str
    folder: Path

    def build(self, *, draws: bool = True) -> nn.Module:
        """Build it with random weights, in training mode; without what draws, where asked."""
        import transformers  # noqa: PLC0415 - seconds

        config = transformers.AutoConfig.from_pretrained(self.folder)
        if not draws:
            config = type(config)(**_without_draws(config.to_dict()))
        for each in _configs(config):
            each._experts_implementation = "eager"  # others know no float64
        builder = auto_class(self.kind)
        module: nn.Module = builder.from_config(config)
        for part in module.modules():
            if isinstance(part, nn.Dropout) and not draws:
                part.p = 0.0  # some have a rate that no config says
        return module.train()

    def samples(self) -> Samples:
        """Give what it is trained on."""
        return Samples(kind=self.kind, folder=str(self.folder))

    def lines(self) -> list[str]:
        """Give the overrides of `train verify`: model and data."""
        data = ["data._target_=verify_samples.Samples", f"data.kind={self.kind}"]
        data += [f"data.folder={self.folder}"]
        if self.kind == "audio_classification":  # no task of model=hf
            model = [
                "model._target_=transformers.AutoModelForAudioClassification.from_config",
                "model.config._target_=transformers.AutoConfig.from_pretrained",
                f"model.config.pretrained_model_name_or_path={self.folder}",
            ]
        else:
            model = ["model=hf", f"model.config={self.folder}", f"model.task={self.kind}"]
        if self.kind == "masked_lm":  # the data hide words already
            model.append("objective=token_classify")
        return [*model, *data]


def _configs(config: Any) -> Iterator[Any]:  # noqa: ANN401 - of any class
    yield config
    for name in getattr(config, "sub_configs", ()):
        if (inner := getattr(config, name, None)) is not None:
            yield from _configs(inner)


def _without_draws(values: Mapping[str, Any]) -> dict[str, Any]:
    """Switch off dropout and noise in a config that was written as a dict."""
    quiet: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            quiet[name] = _without_draws(value)
        elif isinstance(value, float) and any(w in name for w in ("drop", "jitter", "pdrop")):
            quiet[name] = 0.0
        else:
            quiet[name] = False if name == "apply_spec_augment" else value
    return quiet


def auto_class(kind: str) -> Any:  # noqa: ANN401 - of transformers
    """Give the class that builds models of a kind."""
    import transformers  # noqa: PLC0415 - seconds

    return getattr(transformers, f"AutoModelFor{KINDS[kind][0]}")


def models(
    kind: str, root: Path, limit: int, is_wanted: Callable[[str], bool]
) -> Iterator[Model | tuple[str, str]]:
    """Make a small config of every class of a kind.

    Args:
        kind: one of `KINDS`.
        root: folder for the configs.
        limit: how many classes, spread over the mapping.
        is_wanted: by the name of a class.

    Yields:
        The models, and what cannot be built: class and reason.
    """
    from transformers.models.auto import modeling_auto  # noqa: PLC0415

    mapping = f"MODEL_FOR_{KINDS[kind][1]}_MAPPING_NAMES"
    types: dict[str, str] = {}
    for model_type, names in getattr(modeling_auto, mapping).items():
        types.setdefault(names if isinstance(names, str) else names[0], model_type)
    count = min(limit, len(types))
    chosen = {i * len(types) // count for i in range(count)}
    for i, (name, model_type) in enumerate(types.items()):
        if i not in chosen or not is_wanted(name):
            continue
        try:
            config = small_config(name, model_type, kind)
        except CannotBuildError as error:
            yield name, str(error)
            continue
        folder = root / kind / name
        config.save_pretrained(folder)
        yield Model(name=name, kind=kind, folder=folder)


def small_config(name: str, model_type: str, kind: str) -> Any:  # noqa: ANN401 - of any class
    """Find a small config that the class can be built from.

    Raises:
        CannotBuildError: with what the first attempt failed for.
    """
    import transformers  # noqa: PLC0415 - seconds

    builder, faults = auto_class(kind), list[str]()
    for dropped in ATTEMPTS:
        try:
            kind_of_config = transformers.CONFIG_MAPPING[model_type]
            config = kind_of_config(**shrink(kind_of_config().to_dict(), dropped))
            config.architectures = [name]
            config.num_labels = 2 if kind == "question_answering" else NUM_LABELS
            with torch.device("meta"):
                module = builder.from_config(config)
            size = sum(p.numel() for p in module.parameters())
            if size > MOST_PARAMETERS:
                faults.append(f"{size / 1e6:.0f}M parameters, more than a tiny model has")
                continue
            if kind == "seq2seq_lm" and not config.is_encoder_decoder:
                raise CannotBuildError("it takes sound, and is no encoder-decoder")
            config.architectures = [type(module).__name__]
            return config
        except Exception as error:  # whatever a class makes of odd sizes
            faults.append(" ".join(f"{type(error).__name__}: {error}".split())[:120])
    raise CannotBuildError(faults[0])
