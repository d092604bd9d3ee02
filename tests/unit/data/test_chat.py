"""Conversations are encoded as the chat template writes them, and the answers alone are learned."""

import json
import resource
import signal

import pytest

from tests.lib import chats
from tests.lib.chats import CHATML, GENERATION, THOUGHTS, USER, chat_tokenizer, marked
from tests.lib.trl_masks import CASES, STORED, digest
from trainer.data.chat import encode_samples
from trainer.data.conversation import normalize_messages
from trainer.features.hugging_face.chat_encoder import prompt_tokens

ANSWER = {"role": "assistant", "content": "because it is"}
TALK = [USER, ANSWER]


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer(None)


def encode_completion(*parts, **more):
    """What is one sample."""
    (found,) = encode_samples(*parts, **more)
    return found


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def encoded_talk(tokenizer, template, talk=TALK, **more):
    return encode_completion(tokenizer, (), talk, chat_template=template, **more)


def learned(tokenizer, encoded):
    """The text of each run of loss terms."""
    ids, counts = encoded
    runs = [[]]
    for token, counted in zip(ids, counts, strict=True):
        if counted:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


@pytest.mark.parametrize("name", chats.PIECES)
def test_of_200_conversations_the_tokens_of_the_answers_count_and_no_other(tokenizer, name):
    template, pieces_of = chats.PIECES[name]
    for messages in chats.conversations(200):
        ids, counts = encoded_talk(tokenizer, template, messages)
        by_hand = [(ids_of(tokenizer, text), counted) for text, counted in pieces_of(messages)]
        assert ids == [token for piece, _ in by_hand for token in piece]
        assert counts == [counted for piece, counted in by_hand for _ in piece]
        applied = tokenizer.apply_chat_template(messages, chat_template=template)
        assert ids == applied["input_ids"]
        assert ids.count(tokenizer.bos_token_id) == (template in (chats.LLAMA3, chats.MISTRAL))


@pytest.mark.parametrize("case", CASES)
def test_what_counts_of_200_records_is_what_trl_learns(case):
    template, record_of = CASES[case]
    stored, tokenizer = json.loads(STORED.read_text())[case], chat_tokenizer(template)
    texts = []
    for messages in chats.conversations(200):
        record = record_of(messages)
        parts = record.get("prompt", ()), record.get("completion") or record["messages"]
        texts.append(marked(tokenizer, *encode_completion(tokenizer, *parts)))
    assert texts[:2] == stored["first"]
    assert [digest(text) for text in texts] == stored["sha256"]


def test_a_token_that_the_tokenizer_merges_over_the_header_is_refused_or_counts_whole(tokenizer):
    merges = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    with pytest.raises(ValueError, match="message 2, of the assistant, begins inside a token"):
        encoded_talk(tokenizer, merges)
    encoded = encode_completion(tokenizer, "why? ", "because")
    assert learned(tokenizer, encoded) == [" because</s>"]


# As THOUGHTS, with answers marked, and an empty thought in the prompt where it is asked for.
MARKED_THOUGHTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{% if loop.last %}{{ '<think>\n' + (m.thought or '') + '\n</think>\n\n' }}"
    "{% endif %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% if supplies %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
THEN = {"role": "assistant", "content": "so"}


@pytest.mark.parametrize("template", [THOUGHTS, MARKED_THOUGHTS])
def test_each_answer_is_a_sample_where_a_template_writes_earlier_turns_otherwise(
    tokenizer, template
):
    """Its ids begin with those that a model is given at inference, and the rest is learned."""
    talk = [USER, {**ANSWER, "thought": "is it"}, USER, THEN]
    found = encode_samples(tokenizer, (), talk, chat_template=template)
    answers = [learned(tokenizer, each) for each in found]
    assert answers == [
        ["<think>\nis it\n</think>\n\nbecause it is<|im_end|>"],
        ["<think>\n\n</think>\n\nso<|im_end|>"],
    ]
    for (ids, counts), end in zip(found, (1, 3), strict=True):
        given = tokenizer.apply_chat_template(
            talk[:end], chat_template=template, add_generation_prompt=True
        )["input_ids"]
        assert (ids[: len(given)], counts.index(True)) == (given, len(given))
    (last,) = encode_samples(tokenizer, (), talk, chat_template=template, answers="last")
    assert last == found[1]


@pytest.mark.parametrize(
    "template", [MARKED_THOUGHTS, MARKED_THOUGHTS.replace("generation %}", "set x = 0 %}")]
)
def test_what_the_generation_prompt_brings_is_not_learned(tokenizer, template):
    """Neither where the template marks it, nor where the answer is what follows its prompt."""
    template = template.replace("{% endset x = 0 %}", "")
    ids, counts = encoded = encoded_talk(
        tokenizer, template, chat_template_kwargs={"supplies": True}
    )
    assert learned(tokenizer, encoded) == ["because it is<|im_end|>"]
    assert tokenizer.decode(ids[: counts.index(True)]).endswith("<think>\n\n</think>\n\n")
    without = encoded_talk(tokenizer, template)
    assert learned(tokenizer, without) == ["<think>\n\n</think>\n\nbecause it is<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, GENERATION])
def test_all_answers_are_learned_or_the_last_or_those_that_a_flag_names(tokenizer, template):
    talk = [USER, {**ANSWER, "weight": 1}, USER, THEN, USER]
    for answers, expected in {
        "all": ["because it is<|im_end|>", "so<|im_end|>"],
        "last": ["so<|im_end|>"],
        "flagged": ["because it is<|im_end|>"],
    }.items():
        encoded = encoded_talk(tokenizer, template, talk, answers=answers)
        assert learned(tokenizer, encoded) == expected


def test_a_token_that_ends_the_conversation_and_no_turn_is_learned_once(tokenizer):
    template = f"{CHATML.removesuffix('{% endif %}')}{{% else %}}{{{{ eos_token }}}}{{% endif %}}"
    answers = learned(tokenizer, encoded_talk(tokenizer, template, TALK * 2))
    assert answers == ["because it is<|im_end|>", "because it is<|im_end|>\n</s>"]


def test_a_long_conversation_is_tokenised_in_the_time_of_its_length(tokenizer, monkeypatch):
    lengths, tokenize = [], tokenizer.__call__

    def counted(_, text, **options):
        lengths.append(len(text))
        return tokenize(text, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", counted)
    encoded_talk(tokenizer, CHATML, 40 * TALK)
    whole, *rest = lengths
    assert len(rest) == 40
    assert sum(rest) < 2 * whole


def test_what_arrow_adds_is_left_out_and_texts_of_content_in_parts_are_joined():
    assert normalize_messages([{**USER, "tool_calls": None}]) == [USER]
    parts = [{"type": "text", "text": "because", "image": None}, {"type": "text", "text": " it is"}]
    assert normalize_messages([{"role": "assistant", "content": parts}]) == [ANSWER]
    call = {"name": "add", "arguments": {"x": None, "y": 1}}
    (read,) = normalize_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert read == {"role": "assistant", "tool_calls": [call]}


def test_tools_and_variables_reach_the_template(tokenizer):
    template = "{{ (tools | tojson) if tools else 'none' }}{{ style }}" + CHATML
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    style = {"style": "short"}
    for given in (tools, json.dumps(tools)):
        ids, _ = encoded_talk(tokenizer, template, tools=given, chat_template_kwargs=style)
        assert tokenizer.decode(ids).startswith(f"{json.dumps(tools)}short<|im_start|>user")
    assert tokenizer.decode(encoded_talk(tokenizer, template)[0])[:4] == "none"


def test_today_is_the_same_day_whenever_a_template_is_rendered(tokenizer):
    """Else the tokens of a record are others tomorrow; a date that is typed counts."""
    head = "\n{% if not day is defined %}{% set day = strftime_now('%d %b %Y, a %A') %}{% endif %}"
    template = head + "  {{- 'Today: ' + day }}\n" + CHATML
    for typed in ({}, {"day": "1 May 2020"}):
        ids, _ = encoded_talk(tokenizer, template, chat_template_kwargs=typed)
        dated = {"chat_template": template, "day": "26 Jul 2024, a Friday", **typed}
        assert ids == tokenizer.apply_chat_template(TALK, **dated)["input_ids"]
        given = {"chat_template": template, **typed}
        prompt, _ = prompt_tokens(tokenizer, USER["content"], "chat", given)
        assert prompt == ids[: len(prompt)]


WRITES = {
    "JSON": ("{{ f.arguments | tojson }}", '{"x": 1}'),
    "joined text": ("{{ 'call ' + f.arguments }}", 'call {"x":1}'),
    "bare text": ("{{ f.arguments }}", '{"x":1}'),
}


@pytest.mark.parametrize("way", WRITES)
def test_a_call_of_a_tool_is_an_answer_with_arguments_as_the_template_takes_them(tokenizer, way):
    """Not so its result; arguments may be JSON text, which some templates write as it is."""
    arguments, expected = WRITES[way]
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for t in m.tool_calls or []"
        "%}{% set f = t.function %}" + arguments + "{% endfor %}{{ (m.content or '') + "
        "'<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    written = [('{"x":1}', expected)]
    if way == "JSON":
        written += [({"x": 1}, expected), ("no JSON", '"no JSON"')]
    for given, shown in written:
        function = {"name": "add", "arguments": given}
        call = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
        talk = normalize_messages([USER, call, {"role": "tool", "content": "2"}, ANSWER])
        answers = learned(tokenizer, encoded_talk(tokenizer, template, talk))
        assert answers == [f"{shown}<|im_end|>", "because it is<|im_end|>"]


def test_of_a_pair_of_texts_the_completion_and_its_end_are_learned(tokenizer):
    ids, _ = encoded = encode_completion(tokenizer, "why?\n", "because it is")
    assert tokenizer.decode(ids) == "<s>why?\nbecause it is</s>"
    assert learned(tokenizer, encoded) == ["because it is</s>"]
    # What the texts bring already is not added again.
    assert encode_completion(tokenizer, "<s>why?\n", "because it is</s>") == encoded
    assert tokenizer.decode(encode_completion(tokenizer, "", "<s>so")[0]) == "<s>so</s>"
    every = encode_completion(tokenizer, "why?\n", "because it is", learns_all=True)
    assert every == (ids, [True] * len(ids))


@pytest.mark.parametrize("template", [CHATML, GENERATION])
def test_of_a_pair_of_messages_the_answers_of_the_completion_are_learned(tokenizer, template):
    given, last = [*TALK, USER], {**ANSWER, "content": "so"}
    encoded = encode_completion(tokenizer, given, [last], chat_template=template)
    assert learned(tokenizer, encoded) == ["so<|im_end|>"]
    assert encoded[0] == encoded_talk(tokenizer, template, [*given, last])[0]
    system = {"role": "system", "content": "be brief"}
    begun = encode_completion(tokenizer, [system], TALK, chat_template=template)
    assert begun == encoded_talk(tokenizer, template, [system, *TALK])


@pytest.mark.parametrize(
    ("messages", "template", "words"),
    [
        ([ANSWER, USER], CHATML, "message 1, of the assistant, is the first; put a message"),
        (
            TALK,
            "{% for m in messages %}{{ m.content }}{% if m.marks %}{% generation %}"
            "{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}",
            "marks no token of the assistant",
        ),
        (TALK, CHATML.partition("{% if")[0], r"begins an answer with '<|im_start|>assistant\\n'"),
        (TALK, "{{ raise_exception('no thanks') }}", "refuses the conversation: no thanks"),
        (TALK, "{{ messages | length }}" + CHATML, "renders what precedes message 2, .* otherwise"),
    ],
)
def test_what_shows_no_answer_is_refused_with_what_to_do(tokenizer, messages, template, words):
    with pytest.raises(ValueError, match=words.replace("|", r"\|")):
        encoded_talk(tokenizer, template, messages)


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "1 s"),
        ("{{ 'x' * 10 ** 9 * 20 }}", "512 MiB"),
        ("{{ 'x' * 10 ** 7 }}{% generation %}{% endgeneration %}x", "10,000,000 characters"),
    ],
)
def test_a_template_that_would_never_end_or_fill_the_memory_is_a_fault(
    template, fault, tokenizer, monkeypatch
):
    if fault == "1 s":  # the others end by themselves, however slow the machine
        monkeypatch.setattr("trainer.data.resource_limits.SECONDS", 1)
    limits, timer = resource.getrlimit(resource.RLIMIT_AS), signal.getitimer(signal.ITIMER_REAL)
    with pytest.raises(ValueError, match=f"^the chat template .* more than {fault}"):
        encoded_talk(tokenizer, template)
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (timer[0] > 0), "pytest's own goes on"
