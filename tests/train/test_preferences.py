"""Preferences: formats to exact tokens and masks, pairs in rows, KTO's mismatched completions, states; and DPO."""

import json
import pathlib

import grain
import numpy as np
import pytest

from tests.train import test_data
from tests.train.batching import batches
from tests.train.test_data import CHAT
from train.data.preferences import PAIRS, PREFERENCES, completions, encode_pairs, survey
from train.data.records import Record, open_records


tokenizer = test_data.tokenizer  # a fixture
SHARED = pathlib.Path(__file__).parents[3] / "shared" / "data"
OTHER = [CHAT[0], {"role": "assistant", "content": "no"}]
END = "<|im_end|>"


def shown(tokenizer, fields, other=None, **options) -> list[str]:
    """Returns both documents of a record's pairs, with a dot for each token that is not learnt."""
    record, other = Record("here", fields), Record("there", other or fields)
    pairs = encode_pairs(record, other, tokenizer, vocab_size=260, **{"unpaired": False, **options})
    text = lambda example: "".join(
        tokenizer.decode([i], special=True) if on else "." for i, on in zip(example.ids, example.mask, strict=True)
    )
    return [text(example) for pair in pairs for example in pair[:2]]


CHATS = ["." * 21 + "yo" + END + ".", "." * 21 + "no" + END + "."]


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"prompt": "Q: ", "chosen": "yes", "rejected": "no"}, ["....yes</s>", "....no</s>"]),
        ({"prompt": "", "chosen": "yes", "rejected": "no"}, [".yes</s>", ".no</s>"]),
        ({"chosen": "Q: yes", "rejected": "Q: no"}, ["... yes</s>", "... no</s>"]),
        ({"prompt": None, "chosen": "Q:yes", "rejected": "Q:no"}, ["...yes</s>", "...no</s>"]),
        ({"chosen": "yes", "rejected": "no"}, [".yes</s>", ".no</s>"]),
        ({"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": OTHER[1:]}, CHATS),
        ({"chosen": CHAT, "rejected": OTHER}, CHATS),
        ({"prompt": "hi", "chosen": CHAT, "rejected": OTHER, "score": 3}, CHATS),
        (
            {
                "chosen": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}],
                "rejected": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "no"}],
            },
            CHATS,
        ),
        (
            {"chosen": [*CHAT, *CHAT], "rejected": [*CHAT, *OTHER]},
            ["." * (21 + 4) + chat for chat in CHATS],
        ),
        (
            {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": OTHER[1:], "tools": '[{"a": 1}]'},
            ["." * 11 + chat for chat in CHATS],
        ),
    ],
)
def test_formats(tokenizer, fields, expected):
    assert shown(tokenizer, fields) == expected


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"prompt": "Q", "chosen": "A"}, r"here: the record has prompt \(str\), chosen \(str\), but must have chosen"),
        ({}, "here: the record has no keys, but must have chosen and rejected"),
        ([1], "here: the record has no keys"),
        (
            {"prompt": "Q", "chosen": CHAT[1:], "rejected": OTHER[1:]},
            "must have chosen and rejected .* of the same kind",
        ),
        ({"prompt": CHAT[:1], "chosen": "yo", "rejected": "no"}, "must have chosen and rejected .* of the same kind"),
        ({"chosen": CHAT, "rejected": CHAT}, "here: chosen and rejected are the same"),
        ({"chosen": "Q: yes", "rejected": "Q: yes, but"}, "here: chosen and rejected are the same, or one begins"),
        ({"prompt": "Q", "completion": "A", "label": 1}, "label .true or false."),
        (
            {"prompt": "Q", "completion": "A", "label": True},
            "here has a completion and a label, which only train.dpo --loss",
        ),
        ({"prompt": [], "chosen": [], "rejected": []}, "here: the list of messages is empty"),
        ({"prompt": "Q", "chosen": "A", "rejected": "\N{SNOWMAN}"}, "here: token 2.. is beyond the model's vocabulary"),
    ],
)
def test_bad_records(tokenizer, fields, message):
    with pytest.raises(ValueError, match=message):
        encode_pairs(Record("here", fields), Record("there", {}), tokenizer, vocab_size=230, unpaired=False)


def test_completions_of_several_answers_that_are_written_differently_later_on(tokenizer):
    fields = {"prompt": CHAT[:1], "chosen": [CHAT[1], *CHAT], "rejected": OTHER[1:]}
    assert len(shown(tokenizer, fields)) == 2
    fields["chosen"] = [CHAT[1] | {"content": "hm|yo"}, *CHAT]
    with pytest.raises(ValueError, match=r"here: a completion has several answers, which the chat template"):
        shown(test_data.forgetful(tokenizer), fields)


def test_kto_puts_other_completions_after_a_prompt(tokenizer):
    record = {"prompt": "Q: ", "completion": "yes", "label": True}
    other = {"prompt": "Which? ", "completion": "this", "label": False}
    assert shown(tokenizer, record, other, unpaired=True) == ["....yes</s>", "....this</s>"]
    pair = {"prompt": "Q: ", "chosen": "yes", "rejected": "no"}
    assert shown(tokenizer, pair, other, unpaired=True) == ["....yes</s>", "....this</s>", "....no</s>", "....this</s>"]
    assert [c.desirable for c in completions(Record("here", pair))] == [True, False]
    with pytest.raises(ValueError, match="here is text, but there has messages"):
        shown(tokenizer, record, {"chosen": CHAT, "rejected": OTHER}, unpaired=True)


# ======================================================================================================================
# Batches.
# ======================================================================================================================


def count(batch) -> int:
    return sum(batch["segments"].max(axis=1)) // 2


@pytest.fixture
def records():
    """Returns pairs of many lengths, whose texts identify them."""
    random = np.random.RandomState(0)
    text = lambda i, side: f"{i:02}{side}" + "x" * random.randint(9)
    fields = [{"prompt": f"{i:02}?", "chosen": text(i, "+"), "rejected": text(i, "-")} for i in range(40)]
    return grain.MapDataset.source([Record(f"record {i}", each) for i, each in enumerate(fields)])


def documents(tokenizer, batch):
    """Yields (row, segment, text of the learnt targets) of all documents."""
    for row in range(len(batch["tokens"])):
        for segment in range(1, batch["segments"][row].max() + 1):
            here = batch["segments"][row] == segment
            assert batch["positions"][row][here].tolist() == list(range(here.sum()))
            assert np.array_equal(batch["tokens"][row][here][1:], batch["targets"][row][here][:-1])
            learnt = batch["targets"][row][here & (batch["loss_mask"][row] > 0)]
            prompt = tokenizer.decode(batch["tokens"][row][here][: here.sum() - len(learnt) + 1].tolist())
            yield row, segment, prompt, tokenizer.decode(learnt.tolist()), set(batch["desirable"][row][here].tolist())


def test_pairs_are_neighbours(tokenizer, records):
    found, sizes = [], []
    for batch in batches(records, tokenizer, kind=PREFERENCES, vocab_size=260, seq_len=64, batch=3, epochs=1, seed=0):
        assert all(a.dtype == np.int32 and a.shape == (3, 64) for a in batch.values())
        assert not any(batch[name][batch["segments"] == 0].any() for name in ("loss_mask", "desirable"))
        listed = list(documents(tokenizer, batch))
        assert count(batch) == len(listed) // 2
        for chosen, rejected in zip(listed[::2], listed[1::2], strict=True):
            assert chosen[0] == rejected[0] and chosen[1] + 1 == rejected[1] and chosen[1] % 2
            number = chosen[3][:2]
            assert chosen[2] == rejected[2] == number + "?"
            assert chosen[3][2] == "+" and rejected[3][:3] == number + "-"
            found.append(int(number))
        sizes.append((batch["segments"] > 0).mean())
    assert sorted(found) == list(range(40)) and found != sorted(found)
    assert np.mean(sizes[:-1]) > 0.8


def test_each_completion_of_kto_is_put_after_one_other_prompt(tokenizer, records):
    def both(seed):
        for batch in batches(
            records,
            tokenizer,
            kind=PREFERENCES,
            vocab_size=260,
            seq_len=64,
            batch=3,
            epochs=1,
            seed=seed,
            unpaired=True,
        ):
            listed = list(documents(tokenizer, batch))
            yield from zip(listed[::2], listed[1::2], strict=True)

    found = list(both(0))
    assert len(found) == 80
    for own, other in found:
        assert own[2] == other[2] == own[3][:2] + "?" and own[3][:2] != other[3][:2]
        assert own[3][2] == other[3][2] == ("+" if own[4] == {1} else "-") and own[4] == other[4]
    assert sorted(own[3] for own, _ in found) == sorted(other[3] for _, other in found)
    matches = lambda pairs: {(own[2], other[3]) for own, other in pairs}
    assert len(matches(both(1)) - matches(found)) > 40  # another seed has other matches


def test_ends_are_cut_fairly(tokenizer):
    long = lambda n: {"prompt": "Q", "chosen": "a" * n[0], "rejected": "b" * n[1]}
    sizes = [(30, 2), (2, 30), (30, 30), (11, 12), (3, 3)]
    source = grain.MapDataset.source([Record("here", long(n)) for n in sizes])
    found = {
        tuple(np.bincount(row["segments"][0], row["loss_mask"][0])[1:].astype(int))
        for row in batches(source, tokenizer, kind=PREFERENCES, vocab_size=260, seq_len=20, batch=1, epochs=1)
    }
    # Each document also has a start token and the Q, of which one is a target, and an end token if it is not cut.
    assert found == {(15, 3), (3, 15), (9, 9), (4, 4)}
    counts = survey(source, tokenizer, vocab_size=260, seq_len=20)
    assert (counts.shortened, counts.unlearnt, counts.records) == (4, 0, 5)
    assert counts.lengths == {"min": 12, "median": 38, "95%": 66, "max": 66}


def test_pairs_without_completions_are_left_out_and_counted(tokenizer):
    prompts = ["Q", "Q" * 30, "P"]
    source = grain.MapDataset.source([Record("here", {"prompt": p, "chosen": "a", "rejected": "b"}) for p in prompts])
    options = dict(vocab_size=260, seq_len=20)
    (row,) = batches(source, tokenizer, kind=PREFERENCES, **options, batch=1, epochs=1)
    assert count(row) == 2
    found = survey(source, tokenizer, **options)
    assert (found.shortened, found.unlearnt) == (1, 1) and found.fill == (row["segments"] > 0).mean()
    with pytest.raises(ValueError, match="nothing to learn in the 1 records looked at: in here and the others"):
        survey(source[1:2], tokenizer, **options)


def test_a_row_has_only_so_many_pairs(tokenizer):
    fields = {"prompt": "", "chosen": "a", "rejected": "b"}
    source = grain.MapDataset.source([Record("here", fields)] * 100)
    (batch,) = batches(source, tokenizer, kind=PREFERENCES, vocab_size=260, seq_len=512, batch=8, epochs=1)
    assert batch["segments"].max() == 2 * PAIRS and count(batch) == 100


@pytest.mark.parametrize("unpaired", [False, True])
def test_a_state_goes_on_exactly(tokenizer, records, unpaired):
    data = batches(
        records, tokenizer, kind=PREFERENCES, vocab_size=260, seq_len=64, batch=2, epochs=3, seed=1, unpaired=unpaired
    )
    iterator = iter(data)
    for _ in range(4):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    expected = list(iterator)
    again = iter(data)
    again.set_state(state)
    for old, new in zip(expected, again, strict=True):
        assert all(np.array_equal(old[name], new[name]) for name in old)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared")
@pytest.mark.parametrize("name", ["dpo_2_column", "dpo_3_column"])
def test_files_as_they_are(tokenizer, name):
    records, _ = open_records(SHARED / "preference" / f"{name}.json")
    found = survey(records, tokenizer, vocab_size=260, seq_len=512)
    assert found.sampled == len(records) and found.shortened == found.unlearnt == 0
    text = "Updating parameters in the opposite direction of the gradient is how gradient descent works.</s>"
    assert shown(tokenizer, records[0].fields)[0].lstrip(".").strip() == text
