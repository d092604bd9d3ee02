"""Write small files to try the recipes of text with, from the standard library of this machine.

    python recipes/example_data.py examples

Nothing is downloaded. The folder gets, of the docstrings of the standard library,

* corpus.jsonl: `text`, a docstring,
* chat.jsonl: `messages`, a question about a function and the first sentence of its docstring,
* topics.csv: `text` and `label`, a docstring and the package that it comes from,
* summaries.jsonl: `document` and `summary`, a docstring and its first sentence,
* similar.csv: `sentence1`, `sentence2` and a `score`: a first sentence with what follows it (5),
  with that of another docstring of its module (3), and with that of one of another package (0),
* preferences.jsonl: `prompt`, `chosen`, `rejected`: a question, its answer and a later paragraph,
* reports.jsonl: `document` and `summary`, made-up reports of the weather and what they say,
* entities.jsonl: `tokens` and `tags`, words of a docstring, in which Python's own errors, types and
  values are entities,
* tokenizer/: byte-pair encoding of 2,048 ids, trained on them, with a chat template.
"""

from __future__ import annotations

import ast
import builtins
import csv
import inspect
import json
import random
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SIMILAR = 400  # first sentences of which pairs are made
TOPICS = 6  # packages, those with most docstrings
LEAST = 40  # characters of a docstring
REPORTS = 2000  # reports of the weather
REPORTED = (
    ("Aberdeen", "Bergen", "Cork", "Dover", "Esbjerg", "Faro", "Gdansk", "Hull", "Izmir", "Jena"),
    ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    ("clear", "cloudy", "grey", "stormy", "red", "full of snow"),
    ("north", "north-east", "east", "south-east", "south", "south-west", "west", "north-west"),
)
ASIDES = (
    "Ferries to the islands ran on time.",
    "The harbour was quiet.",
    "Readers sent more letters than usual.",
    "A train came ten minutes late.",
    "The market opened at eight.",
)
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '</s>' }}"
    "{% endgeneration %}{% else %}{{ message.content + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def docstrings() -> Iterator[tuple[str, str, str]]:
    """Yield package, dotted name and docstring of each documented function and class, once."""
    root, seen = Path(sysconfig.get_paths()["stdlib"]), set[str]()
    for file in sorted(root.rglob("*.py")):
        module = ".".join(file.relative_to(root).with_suffix("").parts)
        if "packages" in module or "test" in module:
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            text = inspect.cleandoc(ast.get_docstring(node) or "")
            if len(text) >= LEAST and text not in seen:
                seen.add(text)
                yield module.partition(".")[0], f"{module}.{node.name}", text


def similar(found: list[tuple[str, str, str]]) -> Iterator[tuple[str, str, int]]:
    """Yield two texts and how near each other they are, from 0 to 5."""
    draw, modules = random.Random(0), dict[str, list[str]]()
    parts = [(p, n.rpartition(".")[0], *t.partition("\n\n")[::2]) for p, n, t in found]
    parts = [each for each in parts if len(each[3]) >= LEAST]
    for _, module, first, _ in parts:
        modules.setdefault(module, []).append(first)
    for package, module, first, rest in draw.sample(parts, min(len(parts), SIMILAR)):
        yield first, rest, 5
        near = [text for text in modules[module] if text != first]
        if near:
            yield first, draw.choice(near), 3
        far = draw.choice(parts)
        if far[0] != package:
            yield first, far[2], 0


def tagged(text: str) -> dict[str, list[str]]:
    """Tag the words of a text: errors, types and values of Python, of which several may follow."""
    tokens, tags = re.findall(r"\w+|[^\w\s]", text), list[str]()
    for token in tokens:
        kind, thing = "O", getattr(builtins, token, None)
        if token in {"True", "False", "None"}:
            kind = "VALUE"
        elif isinstance(thing, type):
            kind = "ERROR" if issubclass(thing, BaseException) else "TYPE"
        is_inside = kind != "O" and tags and tags[-1].endswith(f"-{kind}")
        tags.append(kind if kind == "O" else f"{'I' if is_inside else 'B'}-{kind}")
    return {"tokens": tokens, "tags": tags}


def reports(count: int) -> Iterator[dict[str, str]]:
    """Yield reports of the weather, whose sentences have any order, and what is to be known."""
    draw = random.Random(0)
    for _ in range(count):
        place, day, sky, wind = (draw.choice(words) for words in REPORTED)
        degrees, others = draw.randint(1, 30), draw.sample(ASIDES, 2)
        sentences = [
            f"On {day} the sky over {place} was {sky}.",
            f"At noon the thermometer stood at {degrees} degrees.",
            f"The wind came from the {wind}.",
            *others,
        ]
        draw.shuffle(sentences)
        summary = f"{place}, {day}: {sky}, {degrees} degrees, wind from the {wind}."
        yield {"document": " ".join(sentences), "summary": summary}


def main(folder: Path) -> None:
    """Write the files."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    found = [*docstrings()]
    first, last = dict[str, str](), dict[str, str]()
    for _, _, text in found:
        first[text], _, rest = text.partition("\n\n")
        first[text] = first[text].replace("\n", " ")
        last[text] = " ".join(rest.rpartition("\n\n")[2].split())
    records = {
        "corpus": [{"text": text} for _, _, text in found],
        "chat": [
            {
                "messages": [
                    {"role": "user", "content": f"What is {name}?"},
                    {"role": "assistant", "content": first[text]},
                ]
            }
            for _, name, text in found
        ],
        "preferences": [
            {
                "prompt": [{"role": "user", "content": f"What is {name}?"}],
                "chosen": [{"role": "assistant", "content": first[text]}],
                "rejected": [{"role": "assistant", "content": last[text]}],
            }
            for _, name, text in found
            if last[text]
        ],
        "summaries": [
            {"document": text, "summary": first[text]}
            for _, _, text in found
            if text != first[text]
        ],
    }
    records["reports"] = [*reports(REPORTS)]
    entities = [tagged(text) for _, _, text in found]
    records["entities"] = [each for each in entities if {*each["tags"]} != {"O"}]
    for name, entries in records.items():
        lines = "".join(json.dumps(entry) + "\n" for entry in entries)
        (folder / f"{name}.jsonl").write_text(lines)
    topics = {name for name, _ in Counter(package for package, _, _ in found).most_common(TOPICS)}
    with (folder / "topics.csv").open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["text", "label"])
        rows.writerows((text, package) for package, _, text in found if package in topics)
    with (folder / "similar.csv").open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["sentence1", "sentence2", "score"])
        rows.writerows(similar(found))
    special = ["<s>", "</s>", "<pad>", "<mask>", "<|user|>", "<|assistant|>", "<|system|>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        (text for _, _, text in found),
        trainers.BpeTrainer(
            vocab_size=2048,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        mask_token="<mask>",
        model_max_length=256,
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")
    counts = ", ".join(f"{name} {len(entries):,}" for name, entries in records.items())
    print(f"{folder}: {counts}, topics of {', '.join(sorted(topics))}")  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "examples"))
