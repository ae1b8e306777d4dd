"""Constrained decoding: only allowed tokens are drawn, other rows are as alone, and drafts change nothing."""

import numpy as np
import pytest
import tokenizers

import zoo
from tests.close import close
from tests.zoo.programs import MODEL, forward
from tests.zoo.test_harmony import ANALYSIS, SPECIAL
from tests.zoo.test_tokenizer import folder
from zoo.generation.constraints import AbstractConstraint, Delayed
from zoo.generation.engine import Engine
from zoo.generation.grammar import Grammars
from zoo.generation.sampling import Sampling
from zoo.generation.speculative import ModelDraft


PROMPT = [5, 9, 200, 31, 7]


@pytest.fixture(scope="module")
def model():
    return zoo.load("tiny", dtype="float32")


class Sets(AbstractConstraint):
    """Allows the tokens of these sets in turn."""

    def __init__(self, vocab, sets):
        self.vocab, self.sets, self.seen = vocab, sets, []

    def allowed(self):
        words = np.zeros(-(-self.vocab // 32), np.uint32)
        for token in self.sets[len(self.seen) % len(self.sets)]:
            words[token // 32] |= np.uint32(1 << token % 32)
        return words

    def push(self, token):
        assert token in self.sets[len(self.seen) % len(self.sets)]
        self.seen.append(token)

    @property
    def complete(self):
        return False


SETS = [{3, 31, 32, 2047}, {64}, set(range(0, 2048, 7)), {1000, 1001}]


def run(model, *submissions, draft=None):
    """Returns the completions of submissions (sampling, constraint), decoded together."""
    engine = Engine(model, batch=4, max_tokens=64, stride=4, draft=draft)
    submit = lambda sampling, each: engine.submit(PROMPT, sampling, constrained=[each] if each else (), top=2)[0]
    made = [submit(*submission) for submission in submissions]
    while not engine.idle:
        engine.step()
    return made


@pytest.fixture(scope="module")
def draft(model):
    return ModelDraft(model, 2)


@pytest.mark.parametrize("drafted", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_only_allowed_tokens_are_drawn(model, draft, drafted):
    """Rows with and without constraints share a batch, and each has the tokens of the model's own distribution. The
    likeliest tokens are those without the constraint, like log-probabilities.
    """
    new, used = Sampling(max_new_tokens=12), {"draft": draft} if drafted else {}
    warm = Sampling(max_new_tokens=12, temperature=1.0, seed=3, top_p=0.9)
    first, second = Sets(2048, SETS), Sets(2048, SETS)
    greedy, drawn, free, free_warm = run(model, (new, first), (warm, second), (new, None), (warm, None), **used)
    for completion in greedy, drawn:
        assert len(completion.tokens) == 12 and np.isfinite(completion.logprobs).all()
        assert all(token in SETS[n % 4] for n, token in enumerate(completion.tokens))
    assert first.seen == greedy.tokens[:-1]  # the last token needs no next one
    assert [free.tokens, free_warm.tokens] == [each.tokens for each in run(model, (new, None), (warm, None), **used)]
    tokens = [*PROMPT]
    for n, token in enumerate(greedy.tokens):
        logits = after(model, tokens)
        allowed = sorted(SETS[n % 4])
        assert token == allowed[int(logits[allowed].argmax())]
        logs = logits - np.log(np.exp(logits).sum())
        assert list(greedy.likeliest[n]) == np.argsort(-logits)[:2].tolist()
        close(
            [*greedy.likeliest[n].values(), greedy.logprobs[n]],
            logs[[*greedy.likeliest[n], token]],
            terms=MODEL,
            size=np.abs(logits).max(),
        )
        tokens.append(token)


def after(model, tokens):
    """Returns the logits after these tokens, by the forward pass."""
    padded = np.zeros((1, 32), int)
    padded[0, : len(tokens)] = tokens
    return np.asarray(forward(model, padded))[0, len(tokens) - 1]


def bits(words):
    return {n for n in range(32 * len(words)) if int(words[n // 32]) >> n % 32 & 1}


def test_constraints_that_begin_later():
    """A constraint waits for a token, at once or after one that opens, or for ever."""
    inner = lambda: Sets(64, [{1}, {2}])
    plain = Delayed(inner(), {})
    assert bits(plain.allowed()) == {1} and not plain.complete
    opened = Delayed(inner(), {40: 41, 50: None})
    assert bits(opened.allowed()) == {1, 40, 50}
    opened.push(40)
    assert opened.allowed() is None and not opened.complete
    for token in 1, 50, 41:
        opened.push(token)
    assert bits(opened.allowed()) == {1}
    opened.push(1)
    assert bits(opened.allowed()) == {2}
    never = Delayed(inner(), {40: 41, 50: None})
    never.push(50)
    assert never.allowed() is None and never.complete
    waits = Delayed(inner(), {40: 41}, until=41)
    assert waits.allowed() is None
    waits.push(41)
    assert bits(waits.allowed()) == {1}  # what opens may only come first


def test_the_answer_of_a_chat(tmp_path):
    """The grammar is for the answer: reasoning before it, calls of tools, and other channels are free."""
    pytest.importorskip("llguidance")
    path = folder(tmp_path / "tags", "{{ messages[0].content }}{# <tool_call> </think> #}")
    reading = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    reading.add_tokens(["<think>", "</think>", "<tool_call>"])
    reading.save(str(path / "tokenizer.json"))
    tokenizer = zoo.tokenizer(path)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    grammar, prompt = grammars.compile("regex", "[0-9]+"), tokenizer.encode("a")
    digits = {id for digit in "0123456789" for id in tokenizer.encode(digit)}
    think, close, call = (tokenizer.control(token) for token in ("<think>", "</think>", "<tool_call>"))
    allowed = bits(grammars.answer(grammar, prompt).allowed())
    assert digits <= allowed and think in allowed and call not in allowed
    answer = grammars.answer(grammar, prompt, tools=[{}])
    assert {think, call} <= bits(answer.allowed())
    for token in think, *tokenizer.encode("abc"), close:
        answer.push(token)
    assert bits(answer.allowed()) & {think, call, *tokenizer.encode("abc")} == set()
    answer.push(min(digits))
    assert answer.complete and {*tokenizer.eos} <= bits(answer.allowed())
    assert grammars.answer(grammar, tokenizer.encode("a<think>")).allowed() is None
    with pytest.raises(ValueError, match="and no token closes it"):
        plain = zoo.tokenizer(folder(tmp_path / "plain", "{# [/THINK] #}"))
        Grammars(plain, plain.vocab_size).answer(grammar, plain.encode("a[THINK]"))
    with pytest.raises(ValueError, match="unclosed group"):
        grammars.compile("regex", "(a")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "before",
    [
        f"{ANALYSIS}<|start|>assistant<|channel|>final <|constrain|>json<|message|>",
        " to=self<|message|>Hm.<|end|><|start|>assistant to=user<|message|>",
    ],
)
def test_the_final_channel(tmp_path, before):
    pytest.importorskip("llguidance")
    path = folder(tmp_path / "channels", "a")
    reading = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    reading.add_special_tokens(SPECIAL)
    reading.save(str(path / "tokenizer.json"))
    tokenizer = zoo.tokenizer(path)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    answer = grammars.answer(grammars.compile("choice", ["yes", "no"]), [1])
    for token in tokenizer.encode(before):
        assert answer.allowed() is None
        answer.push(token)
    texts = {tokenizer.decode([id]) for id in bits(answer.allowed())}
    assert {text[:1] for text in texts} == {"y", "n"} and all("yes".startswith(t) or "no".startswith(t) for t in texts)
    for token in tokenizer.encode("no"):
        answer.push(token)
    assert answer.complete
