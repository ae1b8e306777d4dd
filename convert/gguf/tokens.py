"""Makes tokenizer.json and tokenizer_config.json of a GGUF file's metadata, and the metadata of these.

llama.cpp names a byte-level tokenizer's pre-tokenizer and normaliser by one word, tokenizer.ggml.pre, and hard-codes
them. `PRE` has what the word stands for in the tokenizer.json files of the models that it was made for. Tokenizers of
SentencePiece ("llama") have a score for each token in place of merges: the pair whose result has the highest score is
merged first. Source: src/llama-vocab.cpp of github.com/ggml-org/llama.cpp.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.gguf.container import Opened


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens
SPACE = "▁"
ROLES = {  # key of the metadata, between tokenizer.ggml. and _token_id -> key of tokenizer_config.json
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token", "seperator": "sep_token",
    "mask": "mask_token",
}  # fmt: skip
ENDS = ("eos", "eot", "eom")  # roles of tokens that end a generation
Json = dict[str, Any]


@dataclass(frozen=True)
class Pre:
    """The part of tokenizer.json that a word of llama.cpp's stands for."""

    splits: tuple[str, ...] = ()
    """Regular expressions: a text is cut into their matches and the rest, by one after the other."""
    digits: bool = False
    """Whether digits stand alone."""
    words: bool = False
    """Whether GPT-2's regular expression cuts at last."""
    nfc: bool = False
    """Whether the text is normalised to composed characters first."""
    whole: bool = False
    """Whether a word that is a token is not built by merges."""
    bos: bool = False
    """Whether texts begin with bos if the file does not say."""


CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CL100K = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + TAIL
QWEN = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + TAIL
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = r"[^\r\n\p{L}\p{N}]?" + UPPER + "*" + LOWER + r"+{end}|[^\r\n\p{L}\p{N}]?" + UPPER + "+" + LOWER + "*{end}"
TEKKEN = CASED.replace("{end}", "") + r"|\p{N}" + SLASHES
O200K = CASED.replace("{end}", CONTRACTIONS + "?") + r"|\p{N}{1,3}" + SLASHES
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
    + "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
LLAMA3 = Pre((CL100K,), whole=True, bos=True)
PRE = {
    "llama-bpe": LLAMA3, "llama3": LLAMA3, "llama-v3": LLAMA3, "lfm2": LLAMA3,
    "dbrx": Pre((CL100K,)), "smaug-bpe": Pre((CL100K,)),
    "qwen2": Pre((QWEN,), nfc=True),
    "gpt-4o": Pre((O200K,), whole=True),
    "tekken": Pre((TEKKEN,), whole=True, bos=True),
    "deepseek-v3": Pre(DEEPSEEK),
    "smollm": Pre(digits=True, words=True), "refact": Pre(digits=True, words=True),
    "starcoder": Pre(digits=True, words=True),
    "gpt-2": Pre(words=True), "olmo": Pre(words=True),
}  # fmt: skip


# ======================================================================================================================
# Reading
# ======================================================================================================================


def tokenizer_json(opened: Opened) -> Json:
    """Makes tokenizer.json of the metadata.

    Raises:
        ValueError: the tokenizer's kind or pre-tokenizer is not implemented, or its lists do not fit together; the
            message names the key.
    """
    said = _Said(opened)
    match said.model:
        case "gpt2":
            own = _byte_level(said)
        case "llama":
            own = _sentence_piece(said)
        case other:
            raise ValueError(f"{opened.path} has tokenizer.ggml.model={other!r}; read are gpt2 and llama.")
    before = [said.text("bos")] if said.adds_bos else []
    after = [said.text("eos")] if said.flag("add_eos_token", False) else []
    found: Json = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": said.added(), **own}
    return found | {"post_processor": _template(before, after, said)}


class _Said:
    """The metadata of a tokenizer."""

    def __init__(self, opened: Opened):
        self.opened, metadata = opened, opened.metadata
        self.model = metadata.get("tokenizer.ggml.model")
        self.tokens: list[str] = list(self.get("tokens"))
        kinds = metadata.get("tokenizer.ggml.token_type")
        self.kinds: list[int] = [NORMAL] * len(self.tokens) if kinds is None else list(map(int, kinds))
        if len(self.kinds) != len(self.tokens):
            raise ValueError(f"{opened.path} has {len(self.tokens):,} tokens and {len(self.kinds):,} token_types.")
        if self.model == "gpt2":
            self.pre = metadata.get("tokenizer.ggml.pre", "default")
            if self.pre not in PRE:
                raise ValueError(
                    f"{opened.path} has tokenizer.ggml.pre={self.pre!r}, whose regular expression is not known here; "
                    f"known are {', '.join(PRE)}. Load the original repository, or put its tokenizer.json and "
                    "tokenizer_config.json in a folder with the file."
                )

    def get(self, key: str) -> Any:
        if (value := self.opened.metadata.get(f"tokenizer.ggml.{key}")) is None:
            raise ValueError(f"{self.opened.path} lacks tokenizer.ggml.{key}.")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.opened.metadata.get(f"tokenizer.ggml.{key}", default))

    @property
    def adds_bos(self) -> bool:
        return self.flag("add_bos_token", True if self.model == "llama" else PRE[self.pre].bos)

    def id(self, role: str) -> int | None:
        """Returns the id of the token in a role, or None."""
        id = self.opened.metadata.get(f"tokenizer.ggml.{role}_token_id")
        if id is not None and not 0 <= id < len(self.tokens):
            raise ValueError(f"{self.opened.path} has tokenizer.ggml.{role}_token_id={id}, which is no token's.")
        return id

    def text(self, role: str) -> str:
        if (id := self.id(role)) is None:
            raise ValueError(f"{self.opened.path} lacks tokenizer.ggml.{role}_token_id, which its texts have.")
        return self.tokens[id]

    def vocab(self) -> dict[str, int]:
        """Returns text -> id of all tokens but those that only fill up the matrix."""
        out: dict[str, int] = {}
        for id, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)):
            if kind != UNUSED or token != f"[PAD{id}]":
                out.setdefault(self.written(token, kind), id)
        return out

    def written(self, token: str, kind: int) -> str:
        """Returns a token as tokenizer.json has it: there a space is ▁ in SentencePiece's runs of spaces."""
        spaces = self.model == "llama" and kind == USER_DEFINED and token.strip(" ") == ""
        return token.replace(" ", SPACE) if spaces else token

    def added(self) -> list[Json]:
        """Returns the tokens that are found in a text before it is cut into others."""
        kinds = enumerate(zip(self.tokens, self.kinds, strict=True))
        phi3 = self.model == "llama" and self.opened.architecture == "phi3"
        plain = ("<unk>", "<s>", "<|endoftext|>")
        return [
            {
                "id": id, "content": self.written(token, kind), "single_word": False, "lstrip": False,
                # llama.cpp, too, knows by the model alone that Phi-3's tokens take the white space after them.
                "rstrip": phi3 and token not in plain, "normalized": False, "special": kind != USER_DEFINED,
            }
            for id, (token, kind) in kinds if kind in (CONTROL, USER_DEFINED, UNKNOWN)
        ]  # fmt: skip


def _byte_level(said: _Said) -> Json:
    pre = PRE[said.pre]
    merges = [tuple(merge.split(" ", 1)) for merge in said.get("merges")]
    vocab = said.vocab()
    for pair in merges:
        if len(pair) != 2 or "".join(pair) not in vocab:
            raise ValueError(f"{said.opened.path} has the merge {' '.join(pair)!r}, whose result is no token.")
    return {
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": _pre_tokenizer(pre),
        "decoder": _byte_level_part(False),
        "model": {"type": "BPE", "ignore_merges": pre.whole, "vocab": vocab, "merges": merges, "byte_fallback": False},
    }


def _pre_tokenizer(pre: Pre) -> Json:
    parts = [{"type": "Digits", "individual_digits": True}] * pre.digits
    splits = [{"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} for regex in
              pre.splits]  # fmt: skip
    return {"type": "Sequence", "pretokenizers": [*parts, *splits, _byte_level_part(pre.words)]}


def _byte_level_part(words: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words}


def _sentence_piece(said: _Said) -> Json:
    vocab, scores = said.vocab(), said.get("scores")
    if len(scores) != len(said.tokens):
        raise ValueError(f"{said.opened.path} has {len(said.tokens):,} tokens and {len(scores):,} scores.")
    pieces = {said.written(token, kind): float(score) for token, kind, score in
              zip(said.tokens, said.kinds, scores, strict=True) if kind in (NORMAL, USER_DEFINED)}  # fmt: skip
    prefix = said.flag("add_space_prefix", True)
    unknown = said.id("unknown")
    if unknown is None and UNKNOWN in said.kinds:
        unknown = said.kinds.index(UNKNOWN)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    normalizers = [*[{"type": "Prepend", "prepend": SPACE}] * prefix, replace]
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *[strip] * prefix],
        },
        "model": {
            "type": "BPE", "unk_token": None if unknown is None else said.tokens[unknown], "fuse_unk": True,
            "byte_fallback": BYTE in said.kinds, "vocab": vocab, "merges": merges_of(pieces),
        },
    }  # fmt: skip


def merges_of(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Returns all pairs of pieces that are a piece together, in the order in which SentencePiece joins them.

    Those with the higher score come first, and among equal ones those that begin with a longer piece.
    """
    pairs = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            if piece[:cut] in scores and piece[cut:] in scores:
                pairs.append((-score, -cut, cut - len(piece), piece[:cut], piece[cut:]))
    pairs.sort(key=lambda pair: pair[:3])
    return [(first, second) for *_, first, second in pairs]


def _template(before: Sequence[str], after: Sequence[str], said: _Said) -> Json | None:
    """Makes the post-processor that puts tokens around a text."""
    special = {token: {"id": token, "ids": [said.tokens.index(token)], "tokens": [token]} for token in
               (*before, *after)}  # fmt: skip
    part = lambda letter, number: [
        *({"SpecialToken": {"id": token, "type_id": number}} for token in before),
        {"Sequence": {"id": letter, "type_id": number}},
        *({"SpecialToken": {"id": token, "type_id": number}} for token in after),
    ]
    template = {"type": "TemplateProcessing", "single": part("A", 0), "pair": [*part("A", 0), *part("B", 1)]}
    return template | {"special_tokens": special} if special else None


def tokenizer_config(opened: Opened) -> Json:
    """Makes tokenizer_config.json of the metadata: the tokens with a role, and the chat template."""
    said, metadata = _Said(opened), opened.metadata
    out: Json = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    out |= {name: said.tokens[id] for role, name in ROLES.items() if (id := said.id(role)) is not None}
    template = metadata.get("tokenizer.chat_template")
    named = [{"name": name, "template": metadata[f"tokenizer.chat_template.{name}"]} for name in
             metadata.get("tokenizer.chat_templates", ())]  # fmt: skip
    if named:
        default = [{"name": "default", "template": template}] if template is not None else []
        template = default + named
    return out | ({} if template is None else {"chat_template": template})


def ends(opened: Opened) -> list[int]:
    """Returns the ids that end a generation, as far as the metadata names them."""
    said = _Said(opened)
    return list(dict.fromkeys(id for role in ENDS if (id := said.id(role)) is not None))


# ======================================================================================================================
# Writing
# ======================================================================================================================


def metadata(
    found: Json,
    settings: Json,
    template: Any,
    *,
    roles: Mapping[str, int],
    size: int,
    adds: tuple[bool, bool],
    architecture: str,
) -> dict[str, Any]:
    """Makes the metadata of a tokenizer.

    Args:
        found: the object in tokenizer.json.
        settings: that in tokenizer_config.json.
        template: the chat template, or None.
        roles: ids of tokens by their role, such as "bos"; they come before those of tokenizer_config.json.
        size: the number of rows of the embedding. Rows without a token get one that is unused.
        adds: whether a text gets bos before it, and eos after it.
        architecture: general.architecture of the file.

    Raises:
        ValueError: llama.cpp has no word for the tokenizer, or its tokens are more than `size`; the message says why.
    """
    model, added = found["model"], {token["id"]: token for token in found.get("added_tokens", ())}
    if model.get("type") != "BPE":
        raise ValueError(f"A tokenizer of the type {model.get('type')} is not written to GGUF; one of BPE is.")
    tokens = {id: token for token, id in model["vocab"].items()} | {id: t["content"] for id, t in added.items()}
    if (largest := max(tokens)) >= size:
        raise ValueError(
            f"The token {tokens[largest]!r} has the id {largest}; the model has {size} rows of embeddings."
        )
    bytes_, pieces = bool(model.get("byte_fallback")), bool(model.get("byte_fallback"))
    kinds = [UNUSED] * size
    for id, token in tokens.items():
        if id in added:
            kinds[id] = CONTROL if added[id]["special"] else USER_DEFINED
        elif bytes_ and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            kinds[id] = BYTE
        else:
            kinds[id] = NORMAL
        if pieces and token == model.get("unk_token"):
            kinds[id] = UNKNOWN
    _check_added(added.values(), architecture, pieces)
    texts = [tokens.get(id, f"[PAD{id}]") for id in range(size)]
    out: dict[str, Any] = {"model": "llama" if pieces else "gpt2", "pre": "default"}
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    if pieces:
        out |= _pieces(found, texts, kinds, merges)
    else:
        out |= {"pre": _word(found), "merges": [" ".join(pair) for pair in merges]}
    out |= {"tokens": _spaced(texts, kinds) if pieces else texts, "token_type": np.array(kinds, np.int32)}
    ids = {token: id for id, token in tokens.items()}
    for role, name in ROLES.items():
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if token in ids:
            out[f"{role}_token_id"] = ids[token]
    out |= {f"{role}_token_id": id for role, id in roles.items()}
    out |= {"add_bos_token": adds[0], "add_eos_token": adds[1]}
    named = {f"tokenizer.ggml.{key}": value for key, value in out.items()}
    if isinstance(template, list):
        every = {entry["name"]: entry["template"] for entry in template}
        template = every.pop("default", None)
        named |= {f"tokenizer.chat_template.{name}": text for name, text in every.items()}
        named |= {"tokenizer.chat_templates": list(every)} if every else {}
    return named | ({} if template is None else {"tokenizer.chat_template": template})


def _check_added(added: Any, architecture: str, pieces: bool) -> None:
    """Raise ValueError if an added token takes white space beside it, which a file cannot say."""
    phi3 = pieces and architecture == "phi3"
    for token in added:
        strips = phi3 and token["content"] not in ("<unk>", "<s>", "<|endoftext|>")
        if token.get("lstrip") or token.get("single_word") or bool(token.get("rstrip")) != strips:
            raise ValueError(f"The token {token['content']!r} takes white space beside it, which GGUF cannot say.")


def _spaced(texts: Sequence[str], kinds: Sequence[int]) -> list[str]:
    """Returns tokens as llama.cpp looks for them in a text: with spaces in runs of spaces."""
    runs = lambda token, kind: kind == USER_DEFINED and token.strip(SPACE) == ""
    return [token.replace(SPACE, " ") if runs(token, kind) else token for token, kind in
            zip(texts, kinds, strict=True)]  # fmt: skip


def _word(found: Json) -> str:
    """Returns llama.cpp's word for a byte-level tokenizer: the first of `PRE` that is the same."""
    normalizer, parts = found.get("normalizer"), found.get("pre_tokenizer") or {}
    inside = normalizer.get("normalizers", [normalizer]) if normalizer else []
    parts = parts.get("pretokenizers", [parts])
    plain = lambda part: {key: value for key, value in part.items() if key not in ("trim_offsets",)}
    for word, pre in PRE.items():
        like = [plain(part) for part in _pre_tokenizer(pre)["pretokenizers"]]
        same = like == [plain(part) for part in parts] and inside == [{"type": "NFC"}] * pre.nfc
        if same and bool(found["model"].get("ignore_merges")) == pre.whole:
            return word
    raise ValueError(
        f"llama.cpp has no word known here for the pre-tokenizer {json.dumps(found.get('pre_tokenizer'))[:300]} with "
        f"the normaliser {json.dumps(normalizer)}; known are {', '.join(PRE)}."
    )


def _pieces(
    found: Json, texts: Sequence[str], kinds: Sequence[int], merges: Sequence[tuple[str, ...]]
) -> dict[str, Any]:
    """Makes the scores of SentencePiece's tokens: minus the place of the first merge that makes one."""
    normalizer = found.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prefix = steps[:1] == [{"type": "Prepend", "prepend": SPACE}]
    if steps[prefix:] != [replace]:
        raise ValueError(f"GGUF cannot say the normaliser {json.dumps(normalizer)[:300]}.")
    places: dict[str, int] = {}
    for place, (first, second) in enumerate(merges):
        places.setdefault(first + second, place)
    scores = np.array([-places.get(token, len(merges)) for token in texts], np.float32)
    pieces = {token: float(score) for token, score, kind in zip(texts, scores, kinds, strict=True) if kind in
              (NORMAL, USER_DEFINED)}  # fmt: skip
    if set(merges_of(pieces)) != set(merges):
        raise ValueError(
            "The tokenizer's merges do not follow from scores of its tokens, by which GGUF would say them."
        )
    return {"scores": scores, "add_space_prefix": prefix}
