"""Formats to exact tokens and masks; packing; epochs; states; the survey."""

import hashlib
import json
import pathlib

import grain
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from tests.train.batching import batches
from tests.zoo import test_tiktoken
from train.data.packing import encode, fingerprint, survey
from train.data.records import Record, open_records
from zoo.text.tokenizer import Tokenizer


SHARED = pathlib.Path(__file__).parents[3] / "shared" / "data"
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """Returns a tokenizer with one token a byte, after four special ones, so that ids are readable."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokens = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    core.add_special_tokens(SPECIAL)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    core.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"eos_token_id": [1, 3]}')
    return Tokenizer(folder)


def learnt(tokenizer: Tokenizer, fields, **options) -> tuple[str, str]:
    """Returns the text of a record as it is encoded, and the same with a dot for each token that is not a target."""
    ((ids, mask, *_),) = encode(Record("here", fields), tokenizer, vocab_size=260, **options)
    shown = [tokenizer.decode([i], special=True) for i in ids]
    return "".join(shown), "".join(text if on else "." for text, on in zip(shown, mask, strict=True))


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "hi", "arguments": {}}}]}
SHARE = [{"from": "system", "value": "S"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
HEAD = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "fields, text, mask",
    [
        ({"text": "abc"}, "<s>abc</s>", "<s>abc</s>"),
        ({"text": "abc</s>", "id": 7}, "<s>abc</s>", "<s>abc</s>"),
        ({"text": "abc", "continues": True}, "<s>abc", "<s>abc"),
        ({"text": ""}, "<s></s>", "<s></s>"),
        ({"prompt": "Q: ", "completion": "A"}, "<s>Q: A</s>", "....A</s>"),
        ({"prompt": "", "completion": "A\n"}, "<s>A\n</s>", ".A\n</s>"),
        ({"prompt": "Q", "completion": ""}, "<s>Q</s>", "..</s>"),
        ({"messages": CHAT, "text": None}, HEAD + "yo<|im_end|>\n", "." * 21 + "yo<|im_end|>."),
        ({"text": "abc", "messages": None}, "<s>abc</s>", "<s>abc</s>"),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, HEAD + "yo<|im_end|>\n", "." * 21 + "yo<|im_end|>."),
        (
            {"prompt": [*CHAT, CHAT[0]], "completion": CHAT[1:]},
            HEAD + "yo<|im_end|>\n" + HEAD + "yo<|im_end|>\n",
            "." * (21 + 4 + 21) + "yo<|im_end|>.",
        ),
        (
            {"conversations": SHARE},
            "<|im_start|>system\nS<|im_end|>\n" + HEAD + "yo<|im_end|>\n",
            "." * (11 + 21) + "yo<|im_end|>.",
        ),
        ({"messages": [CHAT[0] | {"role": "human"}, CHAT[1] | {"role": "model"}]},
         HEAD + "yo<|im_end|>\n", "." * 21 + "yo<|im_end|>."),
        ({"conversations": CHAT}, HEAD + "yo<|im_end|>\n", "." * 21 + "yo<|im_end|>."),
        ({"messages": [CHAT[0] | {"content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}, CHAT[1]]},
         HEAD + "yo<|im_end|>\n", "." * 21 + "yo<|im_end|>."),
        (
            {"messages": CHAT, "tools": '[{"a": 1}]'},
            '[{"a": 1}]\n' + HEAD + "yo<|im_end|>\n",
            "." * (11 + 21) + "yo<|im_end|>.",
        ),
    ],
)  # fmt: skip
def test_formats(tokenizer, fields, text, mask):
    assert learnt(tokenizer, fields) == (text, mask)
    assert learnt(tokenizer, fields, completions_only=False)[0] == text
    whole = learnt(tokenizer, fields, completions_only=False)[1]
    assert whole in (text, text.replace("<s>", ".", 1))  # no token predicts the first one


def test_a_message_of_weight_0_is_not_learnt(tokenizer):
    """A message of weight 0, as in OpenAI's format, is not learnt; only the assistant's messages have weights."""
    again = [CHAT[0] | {"weight": 0}, CHAT[1] | {"weight": 0}, CHAT[0] | {"weight": 1}, CHAT[1] | {"weight": 1}]
    text = HEAD + "yo<|im_end|>\n" + HEAD + "yo<|im_end|>\n"
    assert learnt(tokenizer, {"messages": again}) == (text, "." * (21 + 4 + 21) + "yo<|im_end|>.")
    assert learnt(tokenizer, {"messages": again[:2]})[1] == "." * 25
    with pytest.raises(ValueError, match=r"^here: a message has the weight 0, but with --no-completions-only all are"):
        learnt(tokenizer, {"messages": again}, completions_only=False)


@pytest.mark.parametrize(
    "fields, problem",
    [
        ({"question": "a", "id": 1}, r"the record has question \(str\), id \(int\), but must have messages \(a list"),
        ({}, "the record has no keys, but must have"),
        ({"text": ["a", "b"]}, r"the record has text \(list\)"),
        ({"prompt": "a", "completion": CHAT}, r"prompt \(str\), completion \(list\), but"),
        ([1], "a record must be a JSON object, not a list"),
        ({"messages": []}, "the list of messages is empty"),
        ({"messages": [CHAT[0], {"content": "x"}]}, "message 2 must have role and content, or from and value"),
        ({"conversations": [{"from": "robot", "value": "x"}]}, "message 1 is by 'robot', which is no role; .* user"),
        ({"messages": [CHAT[0], {"role": "AI", "content": "x"}]}, "message 2 is by 'AI', which is no role"),
        ({"messages": [CHAT[0], CHAT[1] | {"weight": 0.5}]}, "message 2 has the weight 0.5, which must be 0 or 1"),
        ({"messages": [{"role": "user"}]}, "refuses the messages"),
        (
            {"messages": [*CHAT, CHAT[0], CHAT[1] | {"reasoning": "hm"}]},
            "leaves out the reasoning of message 4, by 'assistant'",
        ),
        ({"messages": [CHAT[0], CALL, CHAT[1]]}, "leaves out the tool calls of message 2, by 'assistant'"),
        ({"messages": CHAT, "tools": "{"}, "Expecting property name"),
        ({"text": "a" + SPECIAL[1] + "\xad"}, "token 259 is beyond the model's vocabulary of 259; is .* the model's"),
    ],
)
def test_bad_records_are_named(tokenizer, fields, problem):
    for completions_only in True, False:
        with pytest.raises(ValueError, match="^data.jsonl, line 3: .*" + problem):
            encode(Record("data.jsonl, line 3", fields), tokenizer, vocab_size=259, completions_only=completions_only)


def forgetful(tokenizer: Tokenizer) -> Tokenizer:
    """Returns a tokenizer whose template drops the text before | in all answers except the last."""
    made = Tokenizer(tokenizer.folder)
    said = "{{ m.content if loop.last or m.role == 'user' else m.content.split('|')[-1] }}"
    made.chat_template = CHATML.replace("' + m.content + '", f"' }}}}{said}{{{{ '")
    return made


def test_a_chat_whose_answers_are_written_differently_later_on(tokenizer):
    """A chat whose template shortens earlier answers becomes one example for each answer: in rows, in the survey, and
    when a run resumes.
    """
    forgets = forgetful(tokenizer)
    records = [
        Record("here", {"messages": [CHAT[0], {"role": "assistant", "content": "hm|yo"}] * 3}),
        Record("", {"text": "t"}),
    ]
    prompts = ["yo<|im_end|>\n".join([HEAD] * n) for n in (1, 2, 3)]
    texts = [prompt + "hm|yo<|im_end|>" for prompt in prompts[:2]] + [prompts[2] + "hm|yo<|im_end|>\n"]
    examples = encode(records[0], forgets, vocab_size=260)
    assert [forgets.decode(example.ids, special=True) for example in examples] == texts
    learnt = [[i for i, on in zip(example.ids, example.mask, strict=True) if on] for example in examples]
    assert [forgets.decode(ids, special=True) for ids in learnt] == ["hm|yo<|im_end|>"] * 3
    found = survey(grain.MapDataset.source(records), forgets, vocab_size=260, seq_len=128)
    assert (found.sampled, found.several, found.shortened, found.unlearnt) == (2, 1, 0, 0)
    assert survey(grain.MapDataset.source(records), tokenizer, vocab_size=260, seq_len=128).several == 0
    made = batches(
        grain.MapDataset.source(records), forgets, vocab_size=260, seq_len=128, batch=1, packing="off", epochs=1
    )
    first, *others = rows = list(made)
    assert [int(row["loss_mask"].sum()) for row in rows] == [6, 6, 6, 2]
    iterator = iter(made)
    np.testing.assert_equal(next(iterator), first)
    again = iter(made)
    again.set_state(json.loads(json.dumps(iterator.get_state())))
    np.testing.assert_equal(list(again), others)


def source(*texts: str, completion: bool = False) -> grain.MapDataset:
    fields = [{"prompt": "", "completion": text} if completion else {"text": text} for text in texts]
    return grain.MapDataset.source([Record(f"record {i + 1}", field) for i, field in enumerate(fields)])


def random_texts(count: int, longest: int) -> list[str]:
    """Returns distinct texts that begin with their number."""
    lengths = np.random.default_rng(0).integers(1, longest, count)
    return [f"{i:03}" + "".join(chr(97 + (i + j) % 26) for j in range(n)) for i, n in enumerate(lengths)]


def documents(tokenizer: Tokenizer, made: list[dict[str, np.ndarray]], seq_len: int) -> list[str]:
    """Returns each segment's text, with its first token and all of its targets, and checks every batch."""
    found = []
    for batch in made:
        assert set(batch) == {"tokens", "targets", "loss_mask", "segments", "positions"}
        assert all(x.dtype == np.int32 and x.shape[1:] == (seq_len,) for x in batch.values())
        for tokens, targets, mask, segments, positions in zip(*(batch[k] for k in (
            "tokens", "targets", "loss_mask", "segments", "positions")), strict=True):  # fmt: skip
            used = int((segments > 0).sum())
            assert not any(x[used:].any() for x in (tokens, targets, mask, segments, positions))  # padding at the end
            for segment in range(1, segments.max(initial=0) + 1):
                at = np.flatnonzero(segments == segment)
                assert len(at) and (np.diff(at) == 1).all() and (positions[at] == np.arange(len(at))).all()
                assert (tokens[at][1:] == targets[at][:-1]).all() and mask[at].all()
                found.append(tokenizer.decode([int(tokens[at[0]]), *targets[at].tolist()], special=True))
    return found


@pytest.mark.parametrize("packing", ["fit", "off"])
def test_whole_examples_in_rows(tokenizer, packing):
    texts = random_texts(150, 40)
    made = list(
        batches(source(*texts), tokenizer, vocab_size=260, seq_len=64, batch=4, packing=packing, seed=1, epochs=1)
    )
    assert sorted(documents(tokenizer, made, 64)) == [f"<s>{text}</s>" for text in texts]
    rows = np.concatenate([batch["segments"] for batch in made])
    assert len(rows) % 4 == 0
    rows = rows[rows.any(1)]
    if packing == "off":
        assert len(rows) == 150 and rows.max() == 1
    else:
        assert (rows > 0).mean() > 0.9


def test_nothing_is_lost_where_documents_are_cut(tokenizer):
    texts = [*random_texts(60, 40), "z" * 1000]
    made = list(batches(source(*texts), tokenizer, vocab_size=260, seq_len=64, batch=4, packing="concat", epochs=1))
    segments = np.concatenate([batch["segments"] for batch in made]).ravel()
    total = sum(len(text) + 1 for text in texts)
    assert (segments > 0).sum() == total and segments[:total].all()
    # A piece that continues in the next row starts there with the last target of the row before.
    pieces = documents(tokenizer, made, 64)
    joined = pieces[0]
    for piece in pieces[1:]:
        joined += piece if joined.endswith("</s>") else piece[1:]
    assert joined == "".join(f"<s>{text}</s>" for text in texts)


def test_long_examples(tokenizer):
    """A text is split into several pieces; a completion loses its end."""
    options = dict(vocab_size=260, seq_len=16, batch=2, epochs=1, packing="off")
    text = "".join(chr(97 + i % 26) for i in range(50))
    made = documents(tokenizer, list(batches(source(text), tokenizer, **options)), 16)
    assert made == ["<s>" + text[:16], text[15:32], text[31:48], text[47:] + "</s>"]
    made = documents(tokenizer, list(batches(source(text, completion=True), tokenizer, **options)), 16)
    assert made == ["<s>" + text[:16]]
    found = survey(source(text, "a", completion=True), tokenizer, vocab_size=260, seq_len=16)
    assert (found.shortened, found.unlearnt) == (1, 0)
    # There are 14 tokens before the completion, or 17, and the row has room for 16 targets.
    for prompt, unlearnt in ("p" * 15, 0), ("p" * 16, 1):
        record = Record("here", {"prompt": prompt, "completion": "c"})
        records = grain.MapDataset.source([record, Record("there", {"text": "t"})])
        found = survey(records, tokenizer, vocab_size=260, seq_len=16)
        assert (found.shortened, found.unlearnt) == (1, unlearnt)
    with pytest.raises(ValueError, match="nothing to learn in the 1 records looked at: here"):
        survey(grain.MapDataset.source([record]), tokenizer, vocab_size=260, seq_len=16)


@pytest.mark.parametrize("packing", ["fit", "concat", "off"])
def test_a_record_without_a_target_takes_no_segment(tokenizer, packing):
    records = grain.MapDataset.source([Record("", {"text": "", "continues": True}), Record("", {"text": "a"})])
    made = list(batches(records, tokenizer, vocab_size=260, seq_len=4, batch=1, packing=packing, epochs=1))
    assert documents(tokenizer, made, 4) == ["<s>a</s>"] and len(made) == 1


def first_tokens(tokenizer: Tokenizer, made: list[dict[str, np.ndarray]], seq_len: int) -> list[int]:
    return [int(text[3:6]) for text in documents(tokenizer, made, seq_len)]


def test_epochs_and_seeds(tokenizer):
    texts = random_texts(40, 20)

    def order(**options) -> list[int]:
        made = batches(source(*texts), tokenizer, vocab_size=260, seq_len=32, batch=4, packing="off", **options)
        return first_tokens(tokenizer, list(made), 32)

    assert order(epochs=1) == list(range(40))
    two = order(epochs=2, seed=5)
    assert sorted(two[:40]) == sorted(two[40:]) == list(range(40)) and two[:40] != two[40:] != list(range(40))
    assert two == order(epochs=2, seed=5) != order(epochs=2, seed=6)
    endless = iter(batches(source(*texts), tokenizer, vocab_size=260, seq_len=32, batch=4, seed=5))
    seen = [next(endless) for _ in range(60)]
    assert first_tokens(tokenizer, seen, 32).count(7) > 2


@pytest.mark.parametrize("packing", ["fit", "concat", "off"])
def test_every_state_goes_on_exactly(tokenizer, packing):
    texts = [*random_texts(12, 30), "y" * 90]
    made = batches(source(*texts), tokenizer, vocab_size=260, seq_len=32, batch=2, packing=packing, seed=3, epochs=2)
    iterator, states, expected = iter(made), [], []
    while True:
        states.append(json.dumps(iterator.get_state()))
        batch = next(iterator, None)
        if batch is None:
            break
        expected.append(batch)
    assert len(expected) > 8
    used = iter(made)
    next(used)
    for i, state in enumerate(states):
        iterator = iter(made) if i % 2 else used  # a fresh iterator, or one that was elsewhere
        iterator.set_state(json.loads(state))
        assert json.dumps(iterator.get_state()) == state
        np.testing.assert_equal(list(iterator), expected[i:])


def test_an_error_within_the_pipeline_reaches_the_loop(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"wrong": "b"}\n')
    records, _ = open_records(tmp_path, holdout=0.0)
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: the record has wrong \(str\)"):
        list(batches(records, tokenizer, vocab_size=260, seq_len=4, batch=1, epochs=1))


def test_survey(tokenizer):
    records = grain.MapDataset.source(
        [Record(f"record {i}", {"prompt": "Q", "completion": "x" * i, "id": i}) for i in range(20)]
        + [Record("last", {"text": "t" * 50})]
    )
    found = survey(records, tokenizer, vocab_size=260, seq_len=16)
    assert (found.records, found.sampled) == (21, 21)
    assert found.keys == {"prompt": 20, "completion": 20, "id": 20, "text": 1}
    assert found.lengths == {"min": 3, "median": 13, "95%": 22, "max": 52}
    assert (found.shortened, found.unlearnt) == (5, 0)  # 18 to 22 tokens where 17 fit
    assert [tokenizer.decode(e.ids) for e in found.examples] == ["Q", "Q" + "x" * 10, "t" * 50]
    assert found.examples[1].mask == [0, 0] + [1] * 11
    rows = (sum(min(i + 2, 16) for i in range(20)) + 51) / 16
    assert rows / found.fill == pytest.approx(round(rows / found.fill)) and rows / found.fill < 1.25 * rows
    small = survey(records, tokenizer, vocab_size=260, seq_len=16, sample=5, packing="off")
    assert (small.records, small.sampled, small.keys["id"]) == (21, 5, 4)
    assert survey(records, tokenizer, vocab_size=260, seq_len=16, packing="concat").shortened == 0


def test_fingerprint(tokenizer, tmp_path):
    for name in "train", "valid":
        (tmp_path / f"{name}.jsonl").write_text('{"text": "a"}\n')
    first = fingerprint(tmp_path, tokenizer, seed=1, batch=2)
    assert json.loads(json.dumps(first)) == first and first["files"].keys() == {"train.jsonl", "valid.jsonl"}
    assert first == fingerprint(str(tmp_path), tokenizer, seed=1, batch=2)
    assert first != fingerprint(tmp_path, tokenizer, seed=2, batch=2)
    of_one = fingerprint(tmp_path / "train.jsonl", tokenizer)["files"]
    assert of_one == {"train.jsonl": hashlib.sha256(b'{"text": "a"}\n').hexdigest()}
    (tmp_path / "train.jsonl").write_text('{"text": "b"}\n')  # of equal size
    assert first != fingerprint(tmp_path, tokenizer, seed=1, batch=2)


def test_the_fingerprint_takes_in_all_that_makes_tokens(tokenizer, tmp_path):
    """The fingerprint covers tokenizers by tiktoken.model, without tokenizer.json, and the tokens around texts."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    kimi = test_tiktoken.write(tmp_path)
    found = [fingerprint(tmp_path / "a.jsonl", Tokenizer(kimi)), fingerprint(tmp_path / "a.jsonl", tokenizer)]
    renamed = {id: "<|renamed|>" for id in test_tiktoken.SPECIAL}
    found.append(fingerprint(tmp_path / "a.jsonl", Tokenizer(test_tiktoken.write(tmp_path, renamed))))
    (kimi / "tiktoken.model").write_text("\n".join((kimi / "tiktoken.model").read_text().splitlines()[:-1]))
    found.append(fingerprint(tmp_path / "a.jsonl", Tokenizer(kimi)))
    for eos, bos in ([3], None), ([4], None), ([4], 5):
        (kimi / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        changed = Tokenizer(kimi)
        changed.bos = bos
        found.append(fingerprint(tmp_path / "a.jsonl", changed))
    assert len({json.dumps(each) for each in found}) == len(found) == 7


def test_halves_of_surrogate_pairs_are_named(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b\\ud83d"}\n')
    records, _ = open_records(tmp_path / "a.jsonl", holdout=0.0)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: The text has half of a surrogate pair, .* at character 1"):
        survey(records, tokenizer, vocab_size=260, seq_len=16)


@pytest.mark.skipif(not SHARED.exists(), reason=f"needs {SHARED}")
def test_real_data_and_tokenizer():
    tokenizer = Tokenizer(SHARED / "aidreams260k")
    records, held_out = open_records(SHARED / "text" / "tinyshakespeare.txt")
    options = dict(vocab_size=512, seq_len=128, epochs=1)
    assert len(list(batches(held_out, tokenizer, batch=8, **options))) > 10
    found = survey(records[:4], tokenizer, vocab_size=512, seq_len=128)
    assert found.fill > 0.95 and found.shortened == 0
    with pytest.raises(ValueError, match=r"tinyshakespeare.txt, bytes 0 to \d+: token \d+ is beyond the model's"):
        survey(records[:4], tokenizer, vocab_size=300, seq_len=128)
    chunks = list(batches(open_records(SHARED / "c4")[1][:6], tokenizer, batch=2, packing="concat", **options))
    assert np.mean([batch["segments"] > 0 for batch in chunks[:-1]]) == 1
