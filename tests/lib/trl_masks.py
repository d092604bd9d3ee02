"""Write tests/unit/data/trl_masks.json: which tokens TRL learns of the same 200 records, in text.

Run where TRL is installed (1.16 wrote the file): `python -m tests.lib.trl_masks`. A record's
text has brackets around its loss terms, so that another version of the BPE trainer changes nothing.
Its SHA-256 is stored, and of the first two the text. Let whoever changes the records run it again.
"""

import hashlib
import json
import tempfile
from pathlib import Path

from tests.lib.chats import GENERATION, LLAMA3, chat_tokenizer, conversations, marked

STORED = Path(__file__).parents[1] / "unit" / "data" / "trl_masks.json"


def text_pair(messages):
    question, answer = (m["content"] for m in messages[-2:])
    return {"prompt": f"### Question\n{question}\n### Answer\n", "completion": answer}


def message_pair(messages):
    return {"prompt": messages[:-1], "completion": messages[-1:]}


CASES = {  # a template, and records
    "messages": (GENERATION, lambda messages: {"messages": messages}),
    "text_pairs": (None, text_pair),
    "message_pairs": (LLAMA3, message_pair),
}


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def masks_of(case):
    import trl  # noqa: PLC0415 - no test needs it
    from datasets import Dataset  # noqa: PLC0415 - as trl
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - as trl

    template, record_of = CASES[case]
    tokenizer = chat_tokenizer(template)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=400, num_attention_heads=1, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        args = trl.SFTConfig(
            folder,
            max_length=None,
            assistant_only_loss=case == "messages",
            report_to=[],
            use_cpu=True,
            bf16=False,
        )
        records = Dataset.from_list([record_of(messages) for messages in conversations(200)])
        trainer = trl.SFTTrainer(model, args, train_dataset=records, processing_class=tokenizer)
        for sample in trainer.train_dataset:
            batch = trainer.data_collator([sample])
            ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
            yield marked(tokenizer, ids, [label != -100 for label in labels])


def main():
    content = {}
    for case in CASES:
        texts = list(masks_of(case))
        content[case] = {"first": texts[:2], "sha256": [digest(text) for text in texts]}
    STORED.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
