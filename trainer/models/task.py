"""Tell what a model is made for: as it declares, or as its class is named."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

Task = str

# Ends of class names in transformers and peft; the first that fits counts.
_TASKS: Mapping[str, str] = {
    "LMHeadModel": "causal_lm",
    "ForCausalLM": "causal_lm",
    "ForMaskedLM": "masked_lm",
    "ForSeq2SeqLM": "seq2seq_lm",
    "ForSequenceClassification": "sequence_classification",
    "ForAudioClassification": "sequence_classification",
    "ForVideoClassification": "image_classification",
    "ForImageClassification": "image_classification",
    "ForTokenClassification": "token_classification",
    "ForQuestionAnswering": "question_answering",
    "ForMultipleChoice": "multiple_choice",
    "ForConditionalGeneration": "image_text_to_text",
}


def task_of(module: nn.Module) -> str | None:
    """Tell what a model is made for; None where nothing says it.

    What counts first is an attribute `task` of the module with one of the words of `_TASKS`; then
    the name of its class, or of one that it inherits from; of an adapter, the model inside it.
    An encoder-decoder is one by `config.is_encoder_decoder`.
    """
    declared = getattr(module, "task", None)
    if isinstance(declared, str) and declared in _TASKS.values():
        return declared
    names = [kind.__name__ for kind in type(module).__mro__]
    task = next((t for n in names for end, t in _TASKS.items() if n.endswith(end)), None)
    is_encoder_decoder = getattr(getattr(module, "config", None), "is_encoder_decoder", None)
    if task in {None, "image_text_to_text"} and is_encoder_decoder is True:
        return "seq2seq_lm"
    inner = getattr(module, "get_base_model", None)  # peft's
    return task_of(inner()) if task is None and callable(inner) else task
