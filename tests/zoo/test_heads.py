"""Heads: embeddings equal sentence-transformers', classes and rewards transformers'; both layouts are read and written.

The embeddings of test_embeddings are recorded, so that they are tested without torch.
"""

import json
import pathlib
import shutil
import string

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

import convert.tensors
import zoo
from tests.close import close
from tests.zoo import tiny
from tests.zoo.programs import MECHANISMS, MODEL, STACKS, by_mechanism, on_host, same
from zoo import retrieval
from zoo.nn.heads import ClassificationHead, EmbeddingHead, RewardHead, pool
from zoo.surgery import partition_specs, with_head
from zoo.text import questions
from zoo.text.questions import Settings


TEXTS = ["abc", "the quick brown fox jumps over the lazy dog", "x", "hello world"]
PROMPTS = {"query": "ask for ", "document": ""}
ENCODER = {k: v for k, v in tiny.CONFIGS["gemma3-pattern"].items() if k != "rope_scaling"} | dict(
    architectures=["Gemma3TextModel"], use_bidirectional_attention=True, sliding_window=12, pad_token_id=0
)
NAMES = "Transformer", "Pooling", "Dense", "Dense", "Normalize"
# Their modules, in the words of these repositories: Qwen/Qwen3-Embedding-0.6B, google/embeddinggemma-300m.
LASTTOKEN = {
    "word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False,
    "pooling_mode_max_tokens": False, "pooling_mode_mean_sqrt_len_tokens": False,
    "pooling_mode_weightedmean_tokens": False, "pooling_mode_lasttoken": True, "include_prompt": True,
}  # fmt: skip
MEAN = LASTTOKEN | {"pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}


def write_tokenizer(folder):
    """Writes a tokenizer of 64 letters that puts the end, 63, behind each text, as Qwen3-Embedding's does."""
    vocabulary = {character: i for i, character in enumerate(" " + string.ascii_letters + string.digits)} | {
        "<end>": 63
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("$A <end>", special_tokens=[("<end>", 63)])
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    stated = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<end>", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))


def write_embedder(folder, name, config, pooling, dense=()):
    """Writes the checkpoint `name` as one of sentence-transformers, without `model.` and output embeddings.

    `dense` has (out, in, bias, activation) of each `Dense`.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    module = tiny.MODULES[tiny.FAMILIES[name]]
    values = getattr(module, "values", tiny.values)
    tensors = tiny.filled(module.shapes(config), np.random.RandomState(1), values)
    tensors = {key.removeprefix("model."): x for key, x in tensors.items() if not key.startswith("lm_head")}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), "Normalize"]
    modules = [
        {"idx": n, "name": str(n), "path": f"{n}_{kind}" if n else "", "type": f"sentence_transformers.models.{kind}"}
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    random = np.random.RandomState(3)
    for n, (out, width, bias, activation) in enumerate(dense, 2):
        (folder / f"{n}_Dense").mkdir()
        stated = {"in_features": width, "out_features": out, "bias": bias, "activation_function": activation}
        (folder / f"{n}_Dense" / "config.json").write_text(json.dumps(stated))
        made = {"linear.weight": random.standard_normal((out, width))}
        made |= {"linear.bias": random.standard_normal(out)} if bias else {}
        made = {key: (0.3 * x).astype(np.float32) for key, x in made.items()}
        safetensors.numpy.save_file(made, folder / f"{n}_Dense" / "model.safetensors", metadata={"format": "pt"})
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 24, "do_lower_case": False}))
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def embedders(tmp_path_factory):
    """Returns the folders of Qwen3-Embedding's and of EmbeddingGemma's layout, tiny."""
    root, linear = tmp_path_factory.mktemp("embedders"), "torch.nn.modules.linear.Identity"
    dense = ((48, 32, False, linear), (20, 48, True, "torch.nn.modules.activation.Tanh"))
    return {
        "last": write_embedder(root / "last", "qwen3", tiny.CONFIGS["qwen3"], LASTTOKEN),
        "mean": write_embedder(root / "mean", "gemma3-pattern", ENCODER, MEAN, dense),
    }


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """Returns the folder of a classifier with three labels."""
    folder = tiny.write(
        tmp_path_factory.mktemp("classifier"), "qwen3", architectures=["Qwen3ForSequenceClassification"],
        id2label={"0": "no", "1": "yes", "2": "so so"}, label2id={"no": 0, "yes": 1, "so so": 2}, pad_token_id=0,
    )  # fmt: skip
    tensors = {key: x for key, x in tiny.tensors("qwen3").items() if not key.startswith("lm_head")}
    tensors["score.weight"] = np.random.RandomState(4).standard_normal((3, 32)).astype(np.float32)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


def files(folder):
    """Returns the bytes of all tensors below a folder: file and name -> bytes."""
    found = {}
    for path in folder.rglob("*.safetensors"):
        where = path.relative_to(folder).as_posix()
        found |= {(where, t.name): t.view().tobytes() for t in convert.tensors.open_file(path)}
    return found


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_embedders_are_read_and_written(embedders, tmp_path, kind):
    folder = embedders[kind]
    model = on_host(zoo.load(folder, head="embedding"))
    zoo.save(model, tmp_path / "saved")
    assert files(tmp_path / "saved") == files(folder)
    again = zoo.load(tmp_path / "saved", head="embedding")
    assert same(again, model) and again.config == model.config
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == json.loads((folder / "config.json").read_text())["architectures"]
    assert config["sliding_window"] == {"last": None, "mean": 12}[kind], "and not the encoder's half of it"
    for name in "config_sentence_transformers.json", "sentence_bert_config.json", "modules.json":
        assert json.loads((tmp_path / "saved" / name).read_text()) == json.loads((folder / name).read_text())
    pooling = json.loads((tmp_path / "saved" / "1_Pooling" / "config.json").read_text())
    assert pooling == json.loads((folder / "1_Pooling" / "config.json").read_text())


@pytest.mark.live
@pytest.mark.parametrize("kind", ["last", "mean"])
def test_embeddings_are_those_of_sentence_transformers(embedders, tmp_path, kind):
    """Embeddings are equal, of texts with prompts and of texts that are cut; and each reads what the other writes."""
    library = pytest.importorskip("sentence_transformers")
    folder = embedders[kind]
    options = dict(device="cpu", model_kwargs={"attn_implementation": "eager"})
    theirs, ours = library.SentenceTransformer(str(folder), **options), zoo.load(folder, head="embedding")
    tokenizer = zoo.tokenizer(folder)
    for prompt in None, "query":
        want = theirs.encode(TEXTS, prompt_name=prompt)
        found = zoo.embed(ours, tokenizer, TEXTS, prompt_name=prompt, batch=3)
        close(found, want, terms=MODEL)
    want = theirs.encode(TEXTS, truncate_dim=8, normalize_embeddings=True)
    close(zoo.embed(ours, tokenizer, TEXTS, width=8), want, terms=MODEL)
    zoo.save(ours, tmp_path / "ours")
    theirs.save(str(tmp_path / "theirs"))
    again = library.SentenceTransformer(str(tmp_path / "ours"), **options)
    np.testing.assert_array_equal(again.encode(TEXTS, prompt_name="query"), theirs.encode(TEXTS, prompt_name="query"))
    other = zoo.load(tmp_path / "theirs", head="embedding")
    assert other.head.pooling == ours.head.pooling and files(tmp_path / "theirs") == files(folder)
    np.testing.assert_array_equal(zoo.embed(other, tokenizer, TEXTS), zoo.embed(ours, tokenizer, TEXTS))


@pytest.mark.live
def test_classes_are_those_of_transformers(classifier, tmp_path):
    """Logits are equal with padding on either side; and each reads what the other writes."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    load = lambda folder: transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype="float32", attn_implementation="eager"
    ).eval()
    theirs, ours = load(classifier), zoo.load(classifier, head="classification")
    tokens = np.maximum(tiny.TOKENS, 1)
    tokens[0, 30:], tokens[1, :5] = 0, 0
    mask = tokens != 0
    with torch.no_grad():
        want = theirs(torch.tensor(tokens), attention_mask=torch.tensor(mask)).logits.numpy()
    close(ours(jnp.asarray(tokens), segments=jnp.asarray(mask, jnp.int32)), want, terms=MODEL)
    zoo.save(ours, tmp_path / "ours")
    assert files(tmp_path / "ours") == files(classifier)
    again = load(tmp_path / "ours")
    assert again.config.id2label == {0: "no", 1: "yes", 2: "so so"} and again.config.pad_token_id == 0
    theirs.save_pretrained(tmp_path / "theirs")
    other = zoo.load(tmp_path / "theirs", head="classification")
    assert other.head.labels == ("no", "yes", "so so") and same(other.head.score, ours.head.score)


RECORDED = {  # the first numbers of the embeddings of TEXTS, by sentence-transformers 6.2.0
    "last": [
        [-0.163553, -0.075901, -0.004770], [-0.416366, -0.105224, -0.329927],
        [0.390952, -0.103754, -0.170810], [-0.152321, -0.059410, 0.113396],
    ],
    "mean": [
        [0.199054, -0.240033, -0.248255], [-0.241403, 0.184575, 0.040317],
        [-0.257016, 0.259053, -0.151732], [-0.135970, 0.263265, -0.172800],
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_embeddings(embedders, kind):
    """Embeddings are sentence-transformers', whatever shares their batch; widths and prompts are as asked."""
    model, tokenizer = zoo.load(embedders[kind], head="embedding"), zoo.tokenizer(embedders[kind])
    found = zoo.embed(model, tokenizer, TEXTS)
    close(found[:, :3], RECORDED[kind], terms=MODEL, size=1)
    close(np.linalg.norm(found, axis=-1), 1, terms=20)
    if kind == "last":
        return
    close(zoo.embed(model, tokenizer, TEXTS[1]), found[1], terms=MODEL)
    close(
        zoo.embed(model, tokenizer, ["ask for x"]), zoo.embed(model, tokenizer, ["x"], prompt_name="query"), terms=MODEL
    )
    narrow = zoo.embed(model, tokenizer, TEXTS, width=8)
    close(narrow, found[:, :8] / np.linalg.norm(found[:, :8], axis=-1, keepdims=True), terms=40)
    assert zoo.embed(model, tokenizer, []).shape[0] == 0
    with pytest.raises(ValueError, match="has no prompt 'poem'; it has query, document"):
        zoo.embed(model, tokenizer, TEXTS, prompt_name="poem")
    with pytest.raises(ValueError, match="The embeddings have 20 numbers, fewer than width=21"):
        zoo.embed(model, tokenizer, TEXTS, width=21)
    ranked = zoo.rank(model, tokenizer, "fox", TEXTS)
    own = zoo.embed(model, tokenizer, "fox", prompt_name="query")
    close([score for _, score in ranked], sorted(found @ own, reverse=True), terms=40, size=1)
    assert [index for index, _ in ranked] == np.argsort(-(found @ own)).tolist()


def test_an_encoder_does_not_generate(embedders):
    model = zoo.load(embedders["mean"], head="embedding")
    tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    decode = lambda model, at: model.decode(at, model.init_cache(1, 8, jnp.float32), positions=at)
    with pytest.raises(ValueError, match="An encoder sees later tokens, and has no cache"):
        eqx.filter_eval_shape(decode, model, tokens)


@pytest.mark.parametrize("name", by_mechanism(STACKS, MECHANISMS[:4]))
def test_every_family_takes_every_head(folders, load, untyped, tmp_path, name):
    """A head replaces the output embeddings, has a place on meshes, and comes back from files with the same bits."""
    plain = load(name)
    width, key = plain.config.hidden_size, jax.random.key(0)
    for kind, head in {
        "classification": ClassificationHead(width, ("a", "b"), 0, key=key),
        "embedding": EmbeddingHead(),
    }.items():
        model = with_head(plain, head)
        partition_specs(model, zoo.registry.family_of(model).partition_rules)
        zoo.save(on_host(model), tmp_path / kind)
        again = zoo.load(tmp_path / kind, head=kind)
        assert same(again, model) and again.config == model.config
        names = {name for _, name in files(tmp_path / kind)}
        assert not any("lm_head" in name for name in names) and ("score.weight" in names) == (kind != "embedding")
    bare = zoo.load(folders[name], head="embedding")
    assert same(bare, model), "and any language model embeds, by its last token"


@pytest.mark.live
@pytest.mark.parametrize("name", STACKS)
def test_every_family_classifies_as_transformers_does(load, tmp_path, name):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    plain = load(name)
    head = ClassificationHead(plain.config.hidden_size, ("a", "b", "c"), 0, key=jax.random.key(0))
    model = with_head(plain, eqx.tree_at(lambda h: h.score.weight, head, 50 * head.score.weight))
    zoo.save(model, tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    if type(config) not in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        pytest.skip("transformers has no such class")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, dtype="float32", attn_implementation="eager"
    ).eval()
    tokens = np.maximum(tiny.TOKENS, 1)
    tokens[0, 30:] = 0
    with torch.no_grad():
        want = theirs(torch.tensor(tokens), attention_mask=torch.tensor(tokens != 0)).logits.numpy()
    found = forward(model, jnp.asarray(tokens), jnp.asarray(tokens != 0, jnp.int32))
    close(found, want, terms=MODEL)


forward = eqx.filter_jit(lambda model, tokens, segments: model(tokens, segments=segments))


def test_results_are_those_of_the_last_token(classifier):
    """Results are of the rightmost token that is no padding, by segments or by its id, in rows alone and packed."""
    model = zoo.load(classifier, head="classification")
    tokens = np.maximum(tiny.TOKENS, 1)
    ids = np.stack([np.pad(tokens[0, :30], (0, 10)), tokens[1]])  # padded by the id 0
    x = features(model, jnp.asarray(ids), jnp.asarray(np.ones_like(ids)))
    want = np.einsum("be,oe->bo", np.stack([x[0, 29], x[1, 39]]), model.head.score.weight)
    close(forward(model, jnp.asarray(ids), jnp.asarray(np.ones_like(ids))), want, terms=MODEL)
    segments = np.ones_like(tokens)
    segments[0, 30:] = 0
    close(forward(model, jnp.asarray(tokens), jnp.asarray(segments)), want, terms=MODEL)
    rows = np.stack([np.concatenate([tokens[0, :30], tokens[1, :10]]), tokens[1]])
    numbers = jnp.asarray(np.stack([np.repeat([1, 2], [30, 10]), np.ones(40, int)]), jnp.int32)
    found = per_text(model, jnp.asarray(rows), numbers)
    close(found[0, 0], want[0], terms=MODEL)
    close(found[1, 0], want[1], terms=MODEL)
    close(found[0, 1], model.head.score.weight @ x[1, 9], terms=MODEL)


features = eqx.filter_jit(lambda model, tokens, segments: model.hidden(tokens, segments=segments)[0])


@eqx.filter_jit
def per_text(model, tokens, segments):
    x, _, _ = model.hidden(tokens, segments=segments)
    return model.head(x, model.head.members(tokens, segments, 3))


def test_pooling():
    x = jax.random.normal(jax.random.key(0), (1, 4, 3))
    member = jnp.asarray([[[False, True, True, False], [False, False, False, False]]])
    for how, want in ("lasttoken", x[0, 2]), ("cls", x[0, 1]), ("mean", (x[0, 1] + x[0, 2]) / 2):
        found = pool(x, member, how)
        close(found[0, 0], want, terms=4)
        assert not np.any(found[0, 1]), "a text without tokens"


@pytest.fixture(scope="module")
def judge(folders):
    """Returns a language model of 64 letters, whose tokenizer has tokens for "yes" and "no", and that tokenizer."""
    folder = folders["qwen3-tied"].parent / "judge"
    tiny.write(folder, "qwen3-tied", max_position_embeddings=1024)
    characters = [*string.printable[:10], *string.ascii_letters]
    vocabulary = {character: i for i, character in enumerate(characters)} | {"yes": 62, "no": 63}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return zoo.load(folder), zoo.tokenizer(folder)


@pytest.mark.thorough
def test_ranking(judge):
    """A language model judges by "yes" against "no" after Qwen3-Reranker's prompt, and so does that head made of it."""
    model, tokenizer = judge
    texts = ["a fox", "dogs", "a quick brown fox"]
    ranked = zoo.rank(model, tokenizer, "fox", texts, instruction="Find", batch=2)
    assert sorted(index for index, _ in ranked) == [0, 1, 2]
    scores = {index: score for index, score in ranked}
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    for n, text in enumerate(texts):
        question = retrieval.QUESTION.format(instruction="Find", query="fox", text=text)
        ids = [id for part in (retrieval.BEFORE, question, retrieval.AFTER) for id in tokenizer.encode(part)]
        logits = model(jnp.asarray(ids)[None])[0, -1]
        close(scores[n], jax.nn.softmax(logits[jnp.array([63, 62])])[1], terms=MODEL, size=1)
    rows = model.embed_tokens.weight
    head = RewardHead(32, None, key=jax.random.key(0))
    reward = with_head(model, eqx.tree_at(lambda h: h.score.weight, head, rows[62:63] - rows[63:64]))
    again = zoo.rank(reward, tokenizer, "fox", texts, instruction="Find")
    close([score for _, score in again], [score for _, score in ranked], terms=MODEL, size=1)
    assert zoo.rank(model, tokenizer, "fox", []) == []
    several = with_head(model, ClassificationHead(32, ("a", "b"), None, key=jax.random.key(0)))
    with pytest.raises(ValueError, match="The model has the labels a, b: one label ranks texts"):
        zoo.rank(several, tokenizer, "fox", texts)
    with pytest.raises(ValueError, match="has no head for embeddings: load it with head='embedding'"):
        zoo.embed(model, tokenizer, texts)


QUESTIONS = {
    "tone": {"type": "choice", "instructions": "What is the tone?", "criteria": {"calm": None, "pushy": "Presses"}},
    "spam": {"type": "noul", "instructions": "Is it spam?"},
    "urgent": {"type": "score", "instructions": {"ask": "urgent"}, "criteria": ["Can wait", "This week", "Today"]},
}
STATE = {"message": "WIN a FREE iPhone", "n": 3}
YES = Settings.of(pathlib.Path())._replace(
    labels={"choice": string.ascii_uppercase, "score": string.ascii_uppercase, "noul": ("yes", "no")},
    temperature={"choice": 2.0, "score": 1.0, "noul": 0.5},
)


@pytest.mark.thorough
def test_decisions(judge):
    """Each option has the softmax, over the labels of the options alone, of the logits of the next token."""
    model, tokenizer = judge
    found = zoo.decide(model, tokenizer, STATE, QUESTIONS, settings=YES)
    for name, labels, temperature in (("tone", "AB", 2), ("spam", ("yes", "no"), 0.5), ("urgent", "ABC", 1)):
        asked = questions.Question.of(QUESTIONS[name], YES)
        logits = model(jnp.asarray([questions.encode(STATE, asked, tokenizer)]))[0, -1]
        ids = np.array([tokenizer.encode(label)[0] for label in labels])
        p = jax.nn.softmax(logits[ids] / temperature)
        if name == "spam":
            close(found[name]["noul"], float(p[0]), terms=MODEL, size=1)
        else:
            close(list(found[name]["probabilities"].values()), p, terms=MODEL, size=1)
    close(found["urgent"]["score"], sum(n * float(each) for n, each in enumerate(p)), terms=MODEL, size=1)
    assert zoo.decide(model, tokenizer, STATE, {}) == {}
    with pytest.raises(ValueError, match="The labels Yes, No are not distinct single tokens"):
        zoo.decide(model, tokenizer, STATE, {"spam": QUESTIONS["spam"]})
    for wrong in ({"type": "rank"}, {"type": "score"}):
        with pytest.raises(ValueError, match='a question must have the type "choice"'):
            zoo.decide(model, tokenizer, STATE, {"x": wrong}, settings=YES)
    many = {"type": "choice", "criteria": {str(n): None for n in range(27)}}
    with pytest.raises(ValueError, match="a choice has at most 26 options, and this one has 27"):
        zoo.decide(model, tokenizer, STATE, {"x": many}, settings=YES)


@pytest.mark.live
def test_questions_are_those_of_transformers():
    """Prompts and answers are transformers'."""
    theirs = pytest.importorskip("transformers.decision.template_utils")
    config = pytest.importorskip("transformers.decision").DecisionConfig()
    template = theirs._compile_jinja_template(theirs.DECISION_PROMPT)
    more = {
        "ads": {"type": "noul", "criteria": {"true": "ads", "false": None}},
        "one": {"type": "score", "criteria": ["all"]},
    }
    settings = Settings.of(pathlib.Path())
    for name, asked in (*QUESTIONS.items(), *more.items()):
        ours, their = questions.Question.of(asked, settings), theirs.Question.from_request(name, asked, config)
        assert questions.prompt(STATE, ours) == template.render(state=STATE, question=their)
        p = np.random.RandomState(0).dirichlet(np.ones(len(ours.options))).tolist()
        assert ours.answer(p) == their.answer(p)


@pytest.mark.usefixtures("untyped")
def test_what_is_refused(folders, embedders, classifier, tmp_path):
    cases = [
        ("has a head for labels: load it with head='classification'", classifier, {}),
        ("has 3 labels, and a reward is one number", classifier, dict(head="reward")),
        (r"has no score\.weight, so it is no ForSequenceClassification", folders["qwen3"], dict(head="reward")),
        (r"lm_head\.weight\. Without output embeddings a model is loaded with a head", embedders["last"], {}),
        ("head='decision' is none of embedding, classification, reward", folders["qwen3"], dict(head="decision")),
    ]
    for said, folder, options in cases:
        with pytest.raises(ValueError, match=said):
            zoo.load(folder, **options)
    edits = [
        ("modules.json", lambda m: [m[0], *m[2:]], "lists Transformer, Dense, Dense, Normalize; implemented are"),
        ("modules.json", lambda m: [m[0] | {"path": "../x"}], r"has the path '\.\./x', which is no folder beside it"),
        ("modules.json", lambda m: {"a": 1}, "is no list of modules"),
        (
            "1_Pooling/config.json",
            lambda c: c | {"pooling_mode_max_tokens": True},
            "pools by mean, max; implemented is one",
        ),
        ("1_Pooling/config.json", lambda c: c | {"include_prompt": False}, "leaves prompts out of the pooling"),
        (
            "2_Dense/config.json",
            lambda c: c | {"activation_function": "os.system"},
            "has the activation_function 'os.system'",
        ),
        ("2_Dense/config.json", lambda c: c | {"in_features": 31}, "takes 31 features, and gets 32"),
        (
            "2_Dense/config.json",
            lambda c: c | {"use_residual": True},
            "says use_residual=True, which is not implemented",
        ),
    ]
    for n, (name, edit, said) in enumerate(edits):
        folder = shutil.copytree(embedders["mean"], tmp_path / str(n))
        (folder / name).write_text(json.dumps(edit(json.loads((folder / name).read_text()))))
        with pytest.raises(ValueError, match=said):
            zoo.load(folder, head="embedding")
    folder = shutil.copytree(classifier, tmp_path / "labels")
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | {"id2label": {"0": "no"}}))
    with pytest.raises(ValueError, match=r"has the id2label .*, but score\.weight has 3 rows"):
        zoo.load(folder, head="classification")
