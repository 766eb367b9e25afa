"""Conversations: templates, answers found in their text, tokens that are learned, windows."""

import gzip
import json
import re
from dataclasses import replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from written_formats import example, tfrecord_bytes

from shardtrain.data import Chat
from shardtrain.data.best_fit import best_fit
from shardtrain.data.chat_template import ChatTemplate, open_template
from shardtrain.data.chat_tokens import TRAINED
from shardtrain.data.conversations import Answers, make_conversation
from shardtrain.data.huggingface_tokenizer import train_tokenizer
from shardtrain.data.tokenizer import Bytes

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Grüße 📄?"},
    {"role": "assistant", "content": "Hello größer 📄!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Good bye"},
]
HUGGING_FACE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML as most folders have it, without marks of answers."""

FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<thought>{% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Writes the last answer in another way than those before it, as templates of reasoning models do."""


def named(name, answers: Answers = "all"):
    return open_template(name, "bytes", Bytes(), answers)


def answers_in(rendered):
    return [rendered.text[start:stop] for start, stop in rendered.answers]


@pytest.mark.parametrize(
    ("name", "text", "end"),
    [
        ("chatml", "<|im_start|>user\nGrüße 📄?<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"),
        (
            "llama3",
            "<|start_header_id|>user<|end_header_id|>\n\nGrüße 📄?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "<|eot_id|>",
        ),
        ("plain", "Be kind.Grüße 📄?", "\0"),
    ],
)
def test_named_templates_mark_answers_and_their_ends(name, text, end):
    rendered = named(name).render(TALK)
    assert text in rendered.text
    assert answers_in(rendered) == [f"Hello größer 📄!{end}", f"Good bye{end}"]
    assert answers_in(named(name, "last").render(TALK)) == [f"Good bye{end}"]


def test_answers_are_found_by_the_text_before_and_up_to_them():
    found = ChatTemplate(HUGGING_FACE, {}).render([*TALK, {"role": "user", "content": "not answered"}])
    assert answers_in(found) == ["Hello größer 📄!<|im_end|>\n", "Good bye<|im_end|>\n"]
    assert found.text == named("chatml").render(TALK).text


def test_a_template_that_rewrites_earlier_answers_is_refused_but_for_the_last_one():
    with pytest.raises(ValueError, match=r"up to message 2 in another way .*--data\.answers last"):
        ChatTemplate(FORGETFUL, {}).render(TALK)
    assert answers_in(ChatTemplate(FORGETFUL, {}, "last").render(TALK)) == ["<thought>Good bye"]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ ''.__class__.__mro__ }}", "refuses the conversation"),
        ("{{ messages.clear() }}", "refuses the conversation"),
        (
            "{{ raise_exception('roles must alternate') }}",
            r"refuses the conversation \(roles must alternate\)",
        ),
        ("{{ 1 / 0 }}", r"ZeroDivisionError: division by zero"),
        ("{% for %}", "cannot be read: line 1"),
        ("{{" + "(" * 3000 + "1" + ")" * 3000 + "}}", "cannot be read"),
        (
            "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
            "answer within an answer",
        ),
    ],
)
def test_templates_that_are_refused(source, text):
    with pytest.raises(ValueError, match=text):
        ChatTemplate(source, {}).render(TALK)


def test_templates_have_what_those_of_hugging_face_use():
    source = (
        "{{ bos_token }}{{ strftime_now('%d %b %Y') }}{% for t in tools %}{{ t | tojson }}{% endfor %}"
        "{% for m in messages %}{% if m.role != 'user' %}{% continue %}{% endif %}{{ m.content }}{% break %}"
        "{% endfor %}"
    )
    talk = [{"role": "user", "content": "Hi"}]
    found = ChatTemplate(source, {"bos_token": "<s>"}).render(talk, [{"name": "größe"}])
    assert found.text == '<s>26 Jul 2024{"name": "größe"}Hi'


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": json.dumps(TALK)}, TALK),
        (
            {"messages": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        ),
        ({"messages": [{"role": "model", "content": "a"}]}, [{"role": "assistant", "content": "a"}]),
        ({"messages": [{"role": "bot", "content": "a"}]}, [{"role": "assistant", "content": "a"}]),
        (
            {"prompt": "[1]", "completion": "b"},
            [{"role": "user", "content": "[1]"}, {"role": "assistant", "content": "b"}],
        ),
        (
            {"prompt": [{"role": "user", "content": "a"}], "completion": b"b"},
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        ),
        (
            {"messages": [{"role": "user", "name": None, "content": [{"type": "text", "text": "a"}, "b"]}]},
            [{"role": "user", "content": "ab"}],
        ),
    ],
)
def test_records_that_are_conversations(record, messages):
    assert make_conversation(record, "messages").messages == messages


def marked(*marks):
    """A conversation whose answers have these fields beside role and content."""
    answers = [{"role": "assistant", "content": f"answer {i}", **each} for i, each in enumerate(marks)]
    return [message for each in answers for message in ({"role": "user", "content": "a"}, each)]


@pytest.mark.parametrize("template", ["chatml", "hugging face"])
@pytest.mark.parametrize(
    ("mark", "learned"),
    [
        ({"weight": 0}, {"weight": 1}),
        ({"weight": 0.0}, {"weight": 1.0}),
        ({"weight": "0"}, {"weight": "1"}),
        ({"train": False}, {"train": True}),
        ({"trainable": False, "weight": 0}, {"trainable": True, "weight": 1}),
        ({"loss_mask": 0}, {"loss_mask": 1}),
        ({"lossMask": "False"}, {"lossMask": "True"}),
        ({"loss": False}, {"loss": None}),
        ({"masked": True}, {"masked": False}),
    ],
    ids=str,
)
def test_an_answer_that_is_marked_is_not_learned(mark, learned, template):
    found = make_conversation({"messages": marked(mark, {}, learned)}, "messages")
    assert all(each.keys() == {"role", "content"} for each in found.messages)
    made = named(template) if template == "chatml" else ChatTemplate(HUGGING_FACE, {})
    rendered = made.render(found.messages, None, found.learned)
    assert [text[:8] for text in answers_in(rendered)] == ["answer 1", "answer 2"]
    assert "answer 0" in rendered.text
    # the last answer is the last one, learned or not
    last = make_conversation({"messages": marked({}, mark)}, "messages")
    assert named("chatml", "last").render(last.messages, None, last.learned).answers == []


@pytest.mark.parametrize("name", ["jsonl", "parquet"])
def test_a_row_that_is_marked_is_not_learned_or_refused(name, tmp_path):
    talk = marked({}, {})
    marks = [
        {"loss_mask": 0, "train": None, "Weight": None},
        {"loss_mask": 1},
        {},
        {"train": False},
        {"Weight": 0.0},
        {"Weight": 0.5},
    ]
    marks.append({"train": True, "loss_mask": 0})
    folder = write(tmp_path / "talks", [{"messages": talk} | each for each in marks], name)
    with pytest.raises(
        ValueError, match=r"row 5: the row has Weight 0\.5; say whether it is learned by weight 1"
    ):
        chat(folder).train(tmp_path / "run")
    data = chat(folder, on_error="skip", heldout_fraction=0, packing="alone")
    assert len(data.train(tmp_path / "run")) == 2
    text = data.summary(tmp_path / "run")
    assert "left out 3 without an answer that is learned; skipped 2 that cannot be read" in text
    side = {"prompt": "a", "completion": "b", "weight": 0}
    assert make_conversation(side, "messages").learned == [False, False]


def test_a_template_that_marks_not_every_answer_is_refused_where_one_is_not_learned():
    source = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
    with pytest.raises(ValueError, match=r"marks 1 answers of 2, so it is not known which of them"):
        ChatTemplate(source, {}).render(TALK, None, [True, True, True, True, False])


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"messages": marked({"weight": 2})}, "messages[1] has weight 2; say whether it is learned"),
        ({"messages": marked({"train": "some"})}, "messages[1] has train 'some'; say whether"),
        ({"messages": marked({"loss_mask": [0, 1]})}, "messages[1] has loss_mask [0, 1]; say whether"),
        ({"messages": marked({"mask": 1})}, "messages[1] has mask 1; say whether"),
        ({"messages": marked({"weight": 1, "train": False})}, "weight 1 and train False, which contradict"),
        (
            {"messages": [{"role": "user", "content": "a", "weight": 1}]},
            "messages[0] has weight 1 and role user, and only messages of the role assistant are learned",
        ),
        ({"mesages": []}, r"no field 'messages' \(did you mean 'mesages'\?\), nor prompt and completion"),
        ({"messages": []}, "messages is []; it is a list of messages"),
        ({"messages": "Hi"}, "messages is text, and no JSON"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] has content None; it is text"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\] has role None; it is text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "parts of it that are text"),
        ({"messages": [{"role": "user", "content": "a\0"}]}, "a character that no text has"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "no valid Unicode at character 0"),
        (
            {"messages": [{"role": "user", "content": "a", "name": "\ufdd0"}]},
            "name of messages[0] has a character",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"\ufdd1": 1}}]}]},
            "tool_calls of messages[0] has a character that no text has",
        ),
        (
            {"messages": TALK, "tools": [{"name": "f", "description": "\0"}]},
            "tools has a character that no text has",
        ),
        ({"messages": TALK, "tools": '[{"name": "\\ufdd0"}]'}, "tools has a character that no text has"),
    ],
)
def test_records_that_are_no_conversation(record, text):
    with pytest.raises(ValueError, match=text if "(" in text or "\\" in text else re.escape(text)):
        make_conversation(record, "messages")


def talks(number):
    """Conversations of different lengths; the answers are in capitals."""
    random = np.random.default_rng(0)
    for i in range(number):
        sizes = random.integers(1, 30, 2 * int(random.integers(1, 4)))
        yield [
            {"role": ("user", "assistant")[n % 2], "content": chr(ord("aA"[n % 2]) + i % 26) * int(size)}
            for n, size in enumerate(sizes)
        ]


def write(folder, rows, name="jsonl"):
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if name == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet", row_group_size=7)
    elif name == "tfrecord":
        records = [example(messages=[json.dumps(row["messages"]).encode()]) for row in rows]
        (folder / "a.tfrecord").write_bytes(tfrecord_bytes(records))
    else:
        path = folder / f"a.{name}"
        path.write_bytes(gzip.compress(lines) if name.endswith("gz") else lines)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("talks"), [{"messages": each} for each in talks(60)])


def chat(folder, **options):
    return Chat(**{"paths": (folder,), "template": "plain", "seq": 64, "heldout_fraction": 0.2, **options})


def rows_of(source):
    return [source[i] for i in range(len(source))]


def pieces(sample):
    """The conversations of a window: (text, the text of targets that count)."""
    inputs, targets = sample["tokens"][:-1], sample["tokens"][1:]
    segments = sample.get("segments", np.zeros(len(inputs), int))
    for number in range(segments.max() + 1):
        mine = segments == number
        counted = targets[mine & (sample["weights"] > 0)]
        yield bytes(inputs[mine].astype(np.uint8)), bytes(counted.astype(np.uint8))


@pytest.mark.parametrize("packing", ["separate", "alone"])
def test_every_conversation_is_in_one_window_and_its_answers_are_learned(packing, folder, tmp_path):
    data = chat(folder, seq=1000, packing=packing)
    train, heldout = data.train(tmp_path), data.heldout(tmp_path)
    expected = []
    for talk in talks(60):
        text = "".join(m["content"] + "\0" * (m["role"] == "assistant") for m in talk)
        learned = "".join(m["content"] + "\0" for m in talk if m["role"] == "assistant")
        expected.append((text.encode(), learned.encode()))
    for source, wanted in ((train, expected[:48]), (heldout, expected[48:])):
        samples = rows_of(source)
        assert ("segments" in samples[0]) == (packing == "separate")
        assert {x.dtype.name for x in samples[0].values()} == {"int32", "float32"}
        assert {x.shape for name, x in samples[0].items() if name != "tokens"} == {(1000,)}
        found = [piece for sample in samples for piece in pieces(sample) if piece[1]]
        if packing == "alone":
            found = [
                (text[: len(one[0])], learned) for (text, learned), one in zip(found, wanted, strict=True)
            ]
        assert sorted(found) == sorted(wanted)
        assert sum(s["weights"].sum() for s in samples) == sum(len(learned) for _, learned in wanted)


def test_formats_give_the_same_windows_and_processes_share_the_tokens(folder, tmp_path):
    rows = [{"messages": each} for each in talks(60)]
    prints = {chat(folder).train(tmp_path).fingerprint}
    for name in ("parquet", "jsonl.gz", "tfrecord"):
        other = chat(write(tmp_path / name, rows, name), format=None)
        prints.add(other.train(tmp_path / "run").fingerprint)
    assert len(prints) == 1
    (made,) = tmp_path.glob("chat-*/tokens.npy")
    before = made.stat().st_mtime_ns
    again = chat(folder).train(tmp_path)
    assert made.stat().st_mtime_ns == before
    assert made.stat().st_mode & 0o077 == 0
    # one that was killed before its record, or lost a part, is made again
    for lost in ("record.json", "extents.npy"):
        (made.parent / lost).unlink()
        assert chat(folder).train(tmp_path).fingerprint == again.fingerprint
    assert made.stat().st_mtime_ns != before
    others = [chat(folder, **change) for change in ({"seq": 63}, {"answers": "last"}, {"packing": "alone"})]
    assert again.fingerprint not in {other.train(tmp_path).fingerprint for other in others}


def test_windows_are_full():
    random = np.random.default_rng(0)
    lengths = np.clip(np.exp(random.normal(5.5, 0.9, 5000)), 10, 2049).astype(int)
    order, ends = best_fit(lengths, 2049)
    assert sorted(order) == list(range(5000))
    sizes = np.add.reduceat(lengths[order], [0, *ends[:-1]])
    assert sizes.max() <= 2049
    assert sizes.sum() / (len(ends) * 2049) > 0.995
    assert [len(each) for each in best_fit(np.full(3, 6), 10)] == [3, 3]


def test_long_conversations_are_truncated_or_left_out_and_counted(tmp_path):
    def pair(prompt, completion):
        return {"prompt": prompt, "completion": completion}

    rows = [
        pair("a" * 4, "B" * 20),
        pair("c" * 30, "D"),
        pair("e", "F"),
        {"messages": TALK[:2]},
        pair("g", "H"),
    ]
    data = chat(write(tmp_path / "data", rows), seq=10, heldout_fraction=0)
    assert [p for s in rows_of(data.train(tmp_path)) for p in pieces(s) if p[1]] == [
        (b"aaaaBBBBBB", b"BBBBBBB"),
        (b"eF\0", b"F\0"),
        (b"gH\0", b"H\0"),
    ]
    assert data.heldout(tmp_path) is None
    assert data.summary(tmp_path) == (
        "chat: 1 jsonl; 4 conversations, 63 tokens, 27 of them in answers; 2 windows of 10 tokens,"
        " 77.3% full; truncated 2 that are longer than a window; 1 of these have no answer within it"
        " and are left out; left out 1 without an answer that is learned"
    )
    skipping = replace(data, too_long="skip")
    assert len(skipping.train(tmp_path)) == 1
    assert "left out 2 that are longer than a window; left out 1 without" in skipping.summary(tmp_path)
    with pytest.raises(ValueError, match=r"none of 4 conversations .* holds 2 tokens, the longest has 32"):
        replace(skipping, seq=1).train(tmp_path)


def test_rows_that_cannot_be_read_are_named_or_skipped(tmp_path):
    path = write(tmp_path / "data", [{"messages": TALK}, {"text": "a"}, {"messages": TALK}]) / "a.jsonl"
    with path.open("ab") as file:
        file.write(b"{")
    with pytest.raises(
        ValueError, match=r"a\.jsonl, row 1: it has no field 'messages' .*--data\.on-error skip"
    ):
        chat(path).train(tmp_path)
    data = chat(path, on_error="skip", heldout_fraction=0)
    assert data.train(tmp_path).num_skipped == 2
    assert "skipped 2 that cannot be read: " in data.summary(tmp_path)
    nothing = write(tmp_path / "none", [{"messages": TALK[:1]}])
    with pytest.raises(
        ValueError, match=r"no conversation in 1 files, .* has an answer .*\(1 have no message"
    ):
        chat(nothing).train(tmp_path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A folder as Hugging Face has it: a tokenizer with special tokens, and a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["hello good bye user assistant be kind größer"] * 9, 300, folder / "tokenizer.json")
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.save(str(folder / "tokenizer.json"))
    about = {"eos_token": {"content": "<|im_end|>"}, "bos_token": None, "chat_template": HUGGING_FACE}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def test_the_tokenizers_own_template_and_tokens_across_characters(tokenizer, tmp_path):
    path = write(tmp_path / "data", [{"messages": TALK}])
    data = chat(path, tokenizer=str(tokenizer), template="tokenizer", heldout_fraction=0, packing="alone")
    (sample,) = rows_of(data.train(tmp_path))
    library = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    text = ChatTemplate(HUGGING_FACE, {}).render(TALK).text
    ids = library.encode(text).ids
    assert sample["tokens"][: len(ids)].tolist() == ids
    learned = sample["tokens"][1:][sample["weights"] > 0].tolist()
    decoded = library.decode(learned, skip_special_tokens=False)
    assert decoded == "Hello größer 📄!<|im_end|>\nGood bye<|im_end|>\n"
    assert data.vocab == library.get_vocab_size() < TRAINED
    # the newer place of the template comes first
    (tokenizer / "chat_template.jinja").write_text(FORGETFUL)
    try:
        with pytest.raises(ValueError, match=r"row 0: the chat template writes the text up to message 2"):
            data.train(tmp_path)
    finally:
        (tokenizer / "chat_template.jinja").unlink()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"template": "tokenizer"},
            "bytes has no chat template .*--data.template chatml, llama3, plain, FILE",
        ),
        ({"template": "chatlm"}, r"no chat template 'chatlm' \(did you mean 'chatml'\?\)"),
        ({"answers": "first"}, "answers is 'first'; allowed: all, last"),
        ({"paths": ()}, "there are no paths; give files"),
        ({"packing": "joined"}, "packing is 'joined'; allowed: separate, alone"),
    ],
)
def test_options_that_are_refused(options, text, folder, tmp_path):
    with pytest.raises(ValueError, match=text):
        chat(folder, **options).train(tmp_path)
