"""`train generate` continues what is typed, or lines of stdin, and reads no data."""

import io
import json
from pathlib import Path

import pytest
import transformers

from tests.lib.hf_toys import TEXTS, save_job_files
from tests.lib.run_support import entries, go, shell
from trainer import train
from trainer.data.text import Text
from trainer.features.generate.written_text import WrittenText

SIZES = "model=gpt_tiny model.width=16 model.num_heads=2 model.num_layers=1"
ODD = """f(x, y): "it's" ${a}, [b"""
HF = "model=hf data=hf batch.global=8 steps=2 optimizer.lr=3e-3"


def text_run() -> tuple[str, str]:
    """Train on a file that is gone then; gives what is typed, and what follows."""
    Path("corpus.txt").write_text("\n\n".join(TEXTS))
    line = f"{SIZES} data=text data.path=corpus.txt data.max_length=40 steps=2 eval.every=null"
    run = go(f"{line} optimizer.lr=3e-2 'log.generate=[{TEXTS[0]}]' log.generate_tokens=6")
    Path("corpus.txt").unlink()
    (entry,) = entries(run, "generated.jsonl")
    return f"generate run={run.folder} generate.tokens=6", entry["text"]


def test_a_prompt_is_taken_as_typed_and_lines_of_stdin_are_continued_alike(capfd, monkeypatch):
    line, expected = text_run()
    ended = capfd.readouterr().out
    assert "\n  train generate run=outputs/" in ended
    assert "train predict" not in ended
    assert shell(f"{line} 'prompt={TEXTS[0]}'") == 0
    assert capfd.readouterr().out == f"{expected}\n", "as at the evaluation behind the last step"
    assert shell(f"{line} prompt={json.dumps(ODD)}") == 0
    alone = capfd.readouterr().out
    lines = io.TextIOWrapper(io.BytesIO(f"{TEXTS[0]}\r\n\n{ODD}\n".encode()))
    monkeypatch.setattr("sys.stdin", lines)
    assert shell(line) == 0
    shown = capfd.readouterr()
    assert shown.out == f"{expected}\n{alone}"
    assert shown.err.endswith(f"> {TEXTS[0]}\n> {ODD}\n")
    folder = line.split()[1].removeprefix("run=")
    train({"command": "generate", "run": folder, "prompt": TEXTS[0], "generate": {"tokens": 6}})
    assert capfd.readouterr().out == f"{expected}\n"
    drawn = list[str]()
    for seed in (0, 0, 1):
        assert shell(f"{line} prompt=a generate.temperature=2 seed={seed}") == 0
        drawn.append(capfd.readouterr().out)
    assert drawn[0] == drawn[1] != drawn[2]
    for typed, fault in (
        ("prompt=", "prompt: is empty; type a text to continue"),
        (f"prompt={'a' * 39}", "has 40 tokens; 1 to 39 leave room for one that follows"),
        ("prompt=a\udcff", "prompt: is not UTF-8"),
        ("", "prompt: stdin has no line with a text; type prompt='...'"),
    ):
        assert shell(f"{line} {typed}") == 2
        shown = capfd.readouterr()
        assert not shown.out
        assert fault in shown.err.splitlines()[-1]
    given = f"\xff\n{TEXTS[0]}\n".encode("latin1")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
    assert shell(f"{line} generate.temperature=1e-310") == 2
    shown = capfd.readouterr()
    assert shown.out == f"{expected}\n", "of other lines the likeliest tokens"
    assert "warning: line 1 of stdin: is not UTF-8" in shown.err


@pytest.mark.slow
def test_an_encoder_decoder_writes_a_target_and_a_tokenizer_that_is_gone_is_missed(capfd):
    save_job_files("t5")
    run = go(f"{HF} model.path=t5 data.path=summaries.jsonl optimizer.lr=1")
    assert shell(f"export run={run.folder} export.to=out") == 0
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained("out")
    tokenizer = transformers.AutoTokenizer.from_pretrained("out")
    ids = tokenizer(TEXTS[3], return_tensors="pt")
    found = model.generate(**ids, do_sample=False, max_new_tokens=9)[0]
    capfd.readouterr()
    line = f"generate run={run.folder} 'prompt={TEXTS[3]}' generate.tokens=9"
    assert shell(line) == 0
    assert capfd.readouterr().out == f"{tokenizer.decode(found, skip_special_tokens=True)}\n"
    for file in Path("t5").glob("token*"):
        file.unlink()
    assert shell(line) == 2
    assert "its weights are for a tokenizer of 320 ids, and none is there" in capfd.readouterr().err


def test_text_is_written_as_it_comes_in_whole_characters_and_safely_to_a_terminal():
    writes = list[str]()

    class Terminal(io.StringIO):
        def write(self, text):
            writes.append(text)
            return len(text)

        def isatty(self):
            return True

    written = WrittenText(Text.decode, "né".encode(), Terminal())
    for token in "aé\x1b[2J\n".encode():
        written.put(token)
    written.put(0xE2)
    assert written.end() == 9
    assert writes == ["a", "é", "\\x1b", "[", "2", "J", "\n", "\N{REPLACEMENT CHARACTER}\n"]
