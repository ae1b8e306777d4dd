"""Hashes of everything that a change must preserve if it only moves code: `python -m tests.fingerprints --out FILE`.

It prints a line `name sha256` for each of these. A tree with the same numbers prints the same lines, so that `diff`
compares two trees:

- `names`: zoo names, their configs, and the repositories that they stand for;
- `checkpoints`: for each of `tests.zoo.tiny`, the loaded weights, their places on a mesh, logits, gradients of packed
  documents, logits of decoding, and every file that `zoo.save` writes; also for quantised ones;
- `vision`: the same for models with vision, preprocessed pixels, and the text generated about an image;
- `kernels`: outputs and gradients of each operation, by each implementation that runs on a CPU;
- `generation`: tokens, log-probabilities and rendered chats;
- `help`: options of the scripts;
- `scripts`: losses, exports and checkpoints of short runs, and what the tools write.

`begin FOLDER` leaves such runs half done. `resume FOLDER` continues them, perhaps in another tree, and prints how the
results compare with those of the uninterrupted runs. It does not change FOLDER.

The numbers come only through public names and the commands of scripts, which outlive a move of modules. Hashes are
equal only on one machine, with the same Python and the same packages.
"""

# ruff: noqa: E402 (JAX reads the environment when it starts)

import argparse
import contextlib
import datetime
import functools
import hashlib
import importlib
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any


# Programs are compiled with few optimizations, in one LLVM module each.
FLAGS = "--xla_cpu_parallel_codegen_split_count=1"
if metadata.version("jaxlib") < "0.11":
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
SCRATCH = pathlib.Path(tempfile.mkdtemp(prefix="fingerprints-"))
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "JAX_COMPILATION_CACHE_DIR": str(SCRATCH / "compiled"),  # for this run only
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count=4 {FLAGS}",
    "TPU_LOG_DIR": "disabled",
    "HF_HUB_OFFLINE": "1",
    "HF_HOME": str(SCRATCH / "hub"),
    "XDG_CACHE_HOME": str(SCRATCH / "cache"),
    "COLUMNS": "200",
    "TOKENIZERS_PARALLELISM": "false",
}

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import yaml
from orbax.checkpoint.experimental import v1 as ocp

import kernels
import zoo
from kernels import Causal, Chunk, Slots, Spans, Stacked, Tokens, Window
from tests.zoo import tiny
from zoo.nn.model import Images


ROOT = pathlib.Path(__file__).parents[1]
Value = str | bytes | Mapping[str, Any]  # a text, or arrays and texts by their names
Found = Iterator[tuple[str, Callable[[], Value]]]  # names, each with the function that makes its value


# ======================================================================================================================
# Values
# ======================================================================================================================


def digest(value: Value) -> str:
    """Returns the SHA-256 of a value. For arrays it covers names, dtypes and shapes, too, in the order of the names."""
    found = hashlib.sha256()
    for name, item in sorted(value.items()) if isinstance(value, Mapping) else [("", value)]:
        if isinstance(item, str | bytes):
            found.update(f"{name}\n".encode() + (item.encode() if isinstance(item, str) else item))
        else:
            item = np.asarray(item)
            found.update(f"{name} {item.dtype} {item.shape}\n".encode() + np.ascontiguousarray(item).tobytes())
    return found.hexdigest()


def keep(folder: pathlib.Path, name: str, value: Value) -> None:
    """Writes a value into a folder, for comparisons of two trees that need more than hashes."""
    path = folder / re.sub(r"[^\w.=-]+", "_", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(value, bytes):
        path.write_bytes(value)
    elif isinstance(value, str):
        path.with_name(f"{path.name}.txt").write_text(value)
    else:
        texts = {n: x for n, x in value.items() if isinstance(x, str | bytes)}
        arrays = {n: np.asarray(x) for n, x in value.items() if n not in texts}
        raw = {n: x if x.dtype.kind in "biufc" else x.view(f"u{x.dtype.itemsize}") for n, x in arrays.items()}
        np.savez(path.with_name(f"{path.name}.npz"), **{n.replace("/", "|"): x for n, x in raw.items()})
        for n, x in texts.items():
            keep(folder, f"{name} {n}", x)


def leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by their paths."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def plain(text: str, **places: pathlib.Path) -> str:
    """Returns a text with paths of this machine replaced by names: `places`, the tree, and the scratch folder."""
    for name, path in (places | dict(ROOT=ROOT, SCRATCH=SCRATCH)).items():
        text = text.replace(str(path), name)
    return text


def files(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the contents of a folder without a model card, which has the commit: tensors, and bytes of others."""
    found: dict[str, Any] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "README.md"):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            found |= {f"{name} {tensor}": a for tensor, a in tensors(path.read_bytes()).items()}
        else:
            found[name] = plain(path.read_text(errors="surrogateescape")).encode(errors="surrogateescape")
    return found


def tensors(data: bytes) -> dict[str, Any]:
    """Returns the tensors of a safetensors file; those whose dtype numpy lacks are returned as bytes."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    found: dict[str, Any] = {"metadata": repr(header.pop("__metadata__", None))}
    for name, about in header.items():
        dtype, (start, stop) = about["dtype"], about["data_offsets"]
        kind = {"F32": np.float32, "F16": np.float16, "I32": np.int32, "I64": np.int64}.get(dtype, np.uint8)
        found[f"{name} {dtype} {about['shape']}"] = np.frombuffer(data[end + start : end + stop], kind)
    return found


def refused(call: Callable[[], Any]) -> str:
    """Returns the error with which a call is refused, or else the result's repr."""
    try:
        return repr(call())
    except (OSError, ValueError, ImportError) as error:
        return plain(f"{type(error).__name__}: {error}")


def once(make: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that calls `make` only once: later calls return, or raise, what the first did."""
    known: list[tuple[Any, Exception | None]] = []

    def call() -> Any:
        if not known:
            try:
                known.append((make(), None))
            except Exception as error:
                known.append((None, error))
        value, error = known[0]
        if error is not None:
            raise error
        return value

    return call


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(np.random.RandomState(seed).standard_normal(shape), dtype)


def words(count: int, letters: str = "abcdefghijklmnopqrstuvwxyz", seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    return ["".join(chance.choices(letters, k=chance.randint(3, 9))) for _ in range(count)]


# ======================================================================================================================
# Names
# ======================================================================================================================


def names() -> Found:
    yield "in order", lambda: "\n".join(zoo.names())
    yield "sorted", lambda: "\n".join(sorted(zoo.names()))
    yield "nothing", lambda: refused(lambda: zoo.load("qwen3-0.6"))
    for name in zoo.names():
        # The repository is not on this machine, so these calls end in an error that names it.
        calls = [] if name == "tiny" else [zoo.tokenizer, zoo.load]
        parts = [lambda name=name: plain(repr(zoo.config(name))), *(functools.partial(call, name) for call in calls)]
        yield name, lambda parts=parts: "\n".join([parts[0](), *map(refused, parts[1:])])
    yield "parts", lambda: "\n".join(f"{n} {dict(getattr(zoo, n).FAMILY.parts)}" for n in sorted(tiny.MODULES))


# ======================================================================================================================
# Checkpoints
# ======================================================================================================================

TOKENS = jnp.asarray(tiny.TOKENS)
SEGMENTS = jnp.asarray(np.array([[1] * 17 + [2] * 19 + [0] * 4, [1] * 40]))
QUANTIZED = {"llama": ("int8", "fp8", "nf4"), "qwen3_moe-dense-new": ("int8", "nf4"), "deepseek3": ("fp8",)}
PREFILLED, DECODED = 23, 5


@eqx.filter_jit
def computed(model: Any) -> dict[str, Any]:
    """Returns logits, gradients and router reports of packed documents, and logits of a prefill and a decode step.

    The last document fills a row.
    """

    def loss(model: Any) -> tuple[jax.Array, Any]:
        x, _, reports = model.hidden(TOKENS, segments=SEGMENTS)
        total, sums = kernels.cross_entropy(model.unembed, x, jnp.roll(TOKENS, -1, axis=1), SEGMENTS)
        return total, (model.unembed(x), sums, reports)

    lengths, index = jnp.array([[5], [PREFILLED]]), jnp.arange(PREFILLED)[None]
    cache = model.init_cache(2, TOKENS.shape[1], jnp.float32)
    given = jnp.where(index < lengths, index, -1)
    prefill, cache = model.decode(TOKENS[:, :PREFILLED], cache, positions=given)

    def step(cache: Any, n: jax.Array) -> tuple[Any, jax.Array]:
        now = jnp.take_along_axis(TOKENS, lengths + n, axis=1)
        logits, cache = model.decode(now, cache, positions=lengths + n)
        return cache, logits

    _, rest = jax.lax.scan(step, cache, jnp.arange(DECODED))
    (total, (logits, *told)), gradients = eqx.filter_value_and_grad(loss, has_aux=True)(model)
    return dict(logits=logits, gradients=(total, told, gradients), decode=(prefill, rest))


def checkpoints() -> Found:
    for name in tiny.CONFIGS:
        folder = tiny.write(SCRATCH / "checkpoints" / name, name)
        load = once(functools.partial(zoo.load, folder))
        results = once(lambda load=load: computed(load()))
        yield f"{name} loaded", lambda load=load: leaves(load()) | {"config": plain(repr(load().config))}
        yield f"{name} placed", lambda folder=folder: placed(zoo.load(folder, mesh="fsdp=2,tensor=2"))
        for kind in ("logits", "gradients", "decode"):
            yield f"{name} {kind}", lambda kind=kind, results=results: leaves(results()[kind])
        if name == tiny.MODULES[tiny.FAMILIES[name]].STACK:
            yield f"{name} called", lambda load=load: leaves(eqx.filter_jit(lambda m: m(TOKENS))(load()))
        yield f"{name} saved", lambda load=load: saved(load())
    for name, formats in QUANTIZED.items():
        folder = SCRATCH / "checkpoints" / name
        for form in formats:
            load = once(functools.partial(zoo.load, folder, quantize=form))
            yield f"{name} {form} loaded", lambda load=load: leaves(load())
            yield f"{name} {form} logits", lambda load=load: leaves(eqx.filter_jit(lambda m: m(TOKENS))(load()))
    yield "deepseek3 saved in fp8", lambda: saved(zoo.load(SCRATCH / "checkpoints" / "deepseek3"), fp8=True)
    yield "llama bfloat16 saved", lambda: saved(zoo.load(SCRATCH / "checkpoints" / "llama", dtype="bfloat16"))
    yield "llama inspected", lambda: plain(repr(zoo.inspect(str(SCRATCH / "checkpoints" / "llama"))))
    yield "tiny fingerprint", lambda: zoo.fingerprint("tiny")


def placed(model: Any) -> Value:
    """Returns the sharding of each weight on a mesh."""
    return "\n".join(f"{path} {getattr(leaf.sharding, 'spec', None)}" for path, leaf in sorted(leaves(model).items()))


def saved(model: Any, **options: Any) -> Value:
    """Returns the files that `zoo.save` writes for a model."""
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        zoo.save(model, folder, **options)
        return files(pathlib.Path(folder))


# ======================================================================================================================
# Models that see
# ======================================================================================================================

CHAT = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
CHAT += "{% if p.type == 'image' %}MARKER{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
QWEN = dict(
    depth=5, hidden_size=16, intermediate_size=24, num_heads=2, in_channels=3, patch_size=2, temporal_patch_size=2,
    spatial_merge_size=2, out_hidden_size=32, num_position_embeddings=9, hidden_act="gelu_pytorch_tanh",
    initializer_range=0.02,
)  # fmt: skip
QWEN_IDS = dict(
    image_token_id=60, video_token_id=61, vision_start_token_id=62, vision_end_token_id=59, tie_word_embeddings=False
)
QWEN_PIXELS = dict(
    image_processor_type="Qwen2VLImageProcessorFast", patch_size=2, temporal_patch_size=2, merge_size=2,
    size=dict(shortest_edge=64, longest_edge=1024), image_mean=[0.5] * 3, image_std=[0.5] * 3,
)  # fmt: skip
QWEN_TOKENS = ("<|vision_start|><|image_pad|><|vision_end|>", {"<|image_pad|>": 60, "<|vision_start|>": 62})
QWEN_TOKENS[1]["<|vision_end|>"] = 59
# Name of a checkpoint in tests/zoo/tiny -> its config.json except the text model's, its preprocessor_config.json, what
# its template writes for an image and the ids of those tokens, the pixels of a patch, and the grids of three images.
SEEING: dict[str, Any] = {
    "gemma3-pattern": (
        dict(
            model_type="gemma3", architectures=["Gemma3ForConditionalGeneration"], boi_token_index=61,
            eoi_token_index=62, image_token_index=60, mm_tokens_per_image=9,
            vision_config=dict(
                model_type="siglip_vision_model", hidden_size=24, intermediate_size=40, num_hidden_layers=3,
                num_attention_heads=2, image_size=12, patch_size=2, num_channels=3, layer_norm_eps=1e-3,
                hidden_act="gelu_pytorch_tanh", attention_dropout=0.0, vision_use_head=False,
            ),
        ),
        dict(size=dict(height=12, width=12), image_seq_length=9, patch_size=2, image_mean=[0.5] * 3),
        ("<start_of_image>", {"<start_of_image>": 61, "<end_of_image>": 62, "<image_soft_token>": 60}),
        12,
        [[6, 6]] * 3,
        9,
    ),
    "llama4": (
        dict(
            model_type="llama4", architectures=["Llama4ForConditionalGeneration"], boi_token_index=57,
            eoi_token_index=62, image_token_index=60,
            vision_config=dict(
                model_type="llama4_vision_model", hidden_size=24, intermediate_size=96, num_hidden_layers=2,
                num_attention_heads=2, num_channels=3, image_size=12, patch_size=2, pixel_shuffle_ratio=0.5,
                projector_input_dim=40, projector_output_dim=40, vision_output_dim=40, rope_theta=100.0,
                norm_eps=1e-5, hidden_act="gelu", attention_dropout=0.0, projector_dropout=0.0,
                multi_modal_projector_bias=False, vision_feature_layer=-1, initializer_range=0.02,
                vision_feature_select_strategy="default",
            ),
        ),
        dict(
            image_processor_type="Llama4ImageProcessorFast", size=dict(height=12, width=12), max_patches=4,
            patch_size=2, resize_to_max_canvas=False, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        ),
        (
            "<|image|>",
            {
                "<|image_start|>": 57, "<|tile_x_separator|>": 58, "<|tile_y_separator|>": 59, "<|image|>": 61,
                "<|patch|>": 60, "<|image_end|>": 62,
            },
        ),
        12,
        [[6, 6]] * 3,
        9,
    ),
    "mistral": (
        dict(
            architectures=["Mistral3ForConditionalGeneration"], image_token_index=60, model_type="mistral3",
            multimodal_projector_bias=False, projector_hidden_act="gelu", spatial_merge_size=2,
            vision_feature_layer=-1,
            vision_config=dict(
                attention_dropout=0.0, head_dim=8, hidden_act="silu", hidden_size=16, image_size=32,
                initializer_range=0.02, intermediate_size=40, model_type="pixtral", num_attention_heads=2,
                num_channels=3, num_hidden_layers=2, patch_size=2, rope_theta=100.0,
            ),
        ),
        dict(
            image_processor_type="PixtralImageProcessorFast", size=dict(longest_edge=32),
            patch_size=dict(height=2, width=2), spatial_merge_size=2,
        ),
        ("[IMG]", {"[IMG]": 60, "[IMG_BREAK]": 61, "[IMG_END]": 62}),
        12,
        [[4, 6], [6, 2], [2, 8]],
        None,
    ),
    "qwen3_vl": (
        QWEN_IDS | dict(
            model_type="qwen3_vl", architectures=["Qwen3VLForConditionalGeneration"],
            vision_config=QWEN | dict(model_type="qwen3_vl", deepstack_visual_indexes=[1]),
        ),
        QWEN_PIXELS, QWEN_TOKENS, 24, [[4, 6], [2, 8], [6, 4]], None,
    ),
    "qwen3_5": (
        QWEN_IDS | dict(
            model_type="qwen3_5", architectures=["Qwen3_5ForConditionalGeneration"],
            vision_config=QWEN | dict(model_type="qwen3_5", deepstack_visual_indexes=[]),
        ),
        QWEN_PIXELS, QWEN_TOKENS, 24, [[4, 6], [2, 8], [6, 4]], None,
    ),
}  # fmt: skip


def seeing(name: str) -> pathlib.Path:
    """Writes a tiny checkpoint with vision: the family's initial weights, and all files that chats need."""
    outer, pixels, (marker, ids), *_ = SEEING[name]
    folder = SCRATCH / "seeing" / name
    folder.mkdir(parents=True, exist_ok=True)
    inner = {k: v for k, v in tiny.CONFIGS[name].items() if k not in ("architectures", "tie_word_embeddings")}
    config = dict(torch_dtype="float32", eos_token_id=2) | outer | dict(text_config=inner)
    (folder / "config.json").write_text(json.dumps(config))
    tiny.write_tokenizer(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = {t: i for t, i in tokenizer["model"]["vocab"].items() if i not in ids.values()} | ids
    common = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    tokenizer["model"]["vocab"] = vocabulary
    tokenizer["added_tokens"] += [dict(id=i, content=token, **common) for token, i in ids.items()]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    chat = dict(chat_template=CHAT.replace("MARKER", marker))
    (folder / "tokenizer_config.json").write_text(json.dumps(chat))
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    config = zoo.config(folder)
    family = importlib.import_module(type(config).__module__).FAMILY
    zoo.save(family.init_model(config, key=jax.random.key(1), parts=("vision",)), folder)
    return folder


@eqx.filter_jit
def seen(model: Any, tokens: jax.Array, images: Images) -> tuple[jax.Array, Any]:
    """Returns logits of rows with images, and the gradients of their sum."""

    def loss(model: Any) -> tuple[jax.Array, jax.Array]:
        logits = model(tokens, images=images)
        return jnp.sum(jax.nn.log_softmax(logits)[..., 0]), logits

    return eqx.filter_grad(loss, has_aux=True)(model)


def images_of(name: str) -> tuple[jax.Array, Images]:
    """Returns rows of tokens with no image, with one, and with two, and these images."""
    *_, pixels, grids, features = SEEING[name]
    grids, chance = np.array(grids), np.random.RandomState(4)
    counts = [features or int(np.prod(grid)) // 4 for grid in grids]
    tokens, image, feature = chance.randint(3, 57, (3, 40)), np.full((3, 40), -1), np.zeros((3, 40), int)
    for n, (row, start) in enumerate([(1, 4), (2, 2), (2, 22)]):
        place = (row, slice(start, start + counts[n]))
        tokens[place], image[place], feature[place] = 60, n, np.arange(counts[n])
    patches = np.zeros((3, max(map(int, np.prod(grids, axis=1))), pixels), np.float32)
    for n, grid in enumerate(grids):
        patches[n, : np.prod(grid)] = chance.uniform(-1, 1, (np.prod(grid), pixels))
    arrays = (patches, grids.astype(np.int32), image.astype(np.int32), feature.astype(np.int32))
    return jnp.asarray(tokens), Images(*map(jnp.asarray, arrays))


def vision() -> Found:
    pictures = [np.random.RandomState(n).randint(0, 256, (h, w, 3)) for n, (h, w) in enumerate([(20, 31), (37, 12)])]
    for name in SEEING:
        folder = once(functools.partial(seeing, name))
        load = once(lambda folder=folder: zoo.load(folder(), parts=("vision",)))
        yield f"{name} loaded", lambda load=load: leaves(load()) | {"config": plain(repr(load().config))}
        on_mesh = dict(parts=("vision",), mesh="fsdp=2,tensor=2")
        yield f"{name} placed", lambda folder=folder, on_mesh=on_mesh: placed(zoo.load(folder(), **on_mesh))
        yield f"{name} logits, gradients", lambda name=name, load=load: leaves(seen(load(), *images_of(name)))
        yield f"{name} saved", lambda load=load: saved(load())
        yield f"{name} without tower", lambda folder=folder: leaves(zoo.load(folder()))
        yield f"{name} prepared", lambda folder=folder: prepared(folder(), pictures)
        yield f"{name} written", lambda folder=folder, load=load: written(folder(), load(), pictures)


def prepared(folder: pathlib.Path, pictures: Sequence[np.ndarray]) -> Value:
    """Returns a checkpoint's processor, and its outputs for images."""
    processor = zoo.tokenizer(folder, parts=("vision",)).processor
    found: dict[str, Any] = {"processor": repr(processor)}
    for n, picture in enumerate(pictures):
        one = processor(picture.astype(np.uint8))
        found |= {f"{n} shapes": one.shapes, f"{n} text": one.text}
        found |= {f"{n} picture {m}": patches for m, patches in enumerate(one.pictures)}
    return found


def written(folder: pathlib.Path, model: Any, pictures: Sequence[np.ndarray]) -> Value:
    """Returns the text that a model generates about a chat's two images: a Pillow image, and a file."""
    from PIL import Image

    first, second = (Image.fromarray(picture.astype(np.uint8)) for picture in pictures)
    second.save(SCRATCH / "second.png")
    parts = [{"type": "image", "image": first}, {"type": "image", "path": str(SCRATCH / "second.png")}]
    text = {"type": "text", "text": "ab"}
    chats = [[{"role": "user", "content": [parts[0], text]}], [{"role": "user", "content": [text, parts[1]]}]]
    tokenizer = zoo.tokenizer(folder)
    write = functools.partial(zoo.generate, model, tokenizer, max_new_tokens=6)
    return repr([refused(functools.partial(write, chat)) for chat in chats])


# ======================================================================================================================
# Kernels
# ======================================================================================================================

IMPLEMENTATIONS = ("reference", "xla", "tpu", "triton", "cudnn", "mosaic", None)


def differentiated(function: Callable[..., Any], arrays: Mapping[str, jax.Array]) -> Callable[[], Value]:
    """Returns a function for a call's outputs and the gradients of these arrays, or for the error that refuses it."""

    def run() -> Value:
        def both(arrays: Mapping[str, jax.Array]) -> Any:
            out, pull = jax.vjp(lambda arrays: function(**arrays), arrays)
            weights = jax.tree.map(lambda a: jnp.cos(jnp.arange(a.size)).reshape(a.shape).astype(a.dtype), out)
            return dict(out=out, gradients=pull(weights))

        try:
            return leaves(jax.jit(both)(dict(arrays)))
        except (ValueError, NotImplementedError) as error:
            return facts(f"{type(error).__name__}: {error}")

    return run


def facts(text: str) -> str:
    """Returns the parts of a sentence that lists why other implementations cannot serve, sorted."""
    return "\n".join(sorted(re.split(r"[;:.] ", text.removesuffix("."))))


def explained(implementations: Sequence[str], call: Callable[[], Any]) -> str:
    with kernels.prefer(*implementations):
        return repr([(choice.operation, choice.implementation, sorted(choice.others.items())) for choice in call()])


def operations() -> Found:
    segments = jnp.asarray(np.array([[1] * 30 + [2] * 50, [1] * 70 + [0] * 10]))
    q, k, v = normal(2, 80, 4, 16), normal(2, 80, 2, 16, seed=1), normal(2, 80, 2, 16, seed=2)
    spans = jnp.asarray(np.array([[-1] * 10 + [0] * 20 + [-1] * 20 + [1] * 30, [-1] * 80]))
    sinks, half = normal(4, seed=3), jnp.bfloat16
    attention = {
        "causal": (dict(q=q, k=k, v=v), {}),
        "packed": (
            dict(q=q, k=k, v=v, sinks=sinks),
            dict(at=Tokens(segments=segments), mask=Causal() & Window(20), softcap=5.0),
        ),
        "chunks": (dict(q=q, k=k, v=v), dict(mask=Causal() & Chunk(16), at=Tokens(segments=segments))),
        "spans": (dict(q=q, k=k, v=v), dict(mask=Causal() | Spans(), at=Tokens(spans=spans))),
        "latents": (dict(q=q, k=k), dict(v=8)),
        "bfloat16": (dict(q=q.astype(half), k=k.astype(half), v=v.astype(half)), {}),
    }
    for case, (arrays, options) in attention.items():
        for name in IMPLEMENTATIONS:
            slow = name in ("tpu", "triton") and case not in ("causal", "packed", "bfloat16")  # these are interpreted
            if slow or (case, name) == ("bfloat16", "xla"):  # XLA needs its optimizations for bfloat16 products
                continue
            call = functools.partial(kernels.attention, scale=0.25, implementation=name, **options)
            yield f"attention {case} {name}", differentiated(call, arrays)

    slots = normal(3, 2, 96, 2, 16, seed=4), normal(3, 2, 96, 2, 16, seed=5)
    eighths = [jnp.asarray(np.random.RandomState(n).randint(-127, 128, (3, 2, 96, 2, 16)), jnp.int8) for n in (6, 7)]
    scales = jnp.abs(normal(3, 2, 96, 2, seed=8)) / 100
    caches = {
        "float32": [Stacked(x, jnp.array(1)) for x in slots],
        "int8": [Stacked(x, jnp.array(1), scales, (16,), np.dtype("float32")) for x in eighths],
    }
    for case, (keys, values) in caches.items():
        for name in IMPLEMENTATIONS:
            call = functools.partial(
                kernels.decode_attention, k=keys, v=values, at=Tokens(jnp.array([[3, 4], [66, 67]])), scale=0.25,
                mask=Causal() & Window(50), implementation=name,
            )  # fmt: skip
            yield f"decode_attention {case} {name}", differentiated(call, dict(q=q[:, :2]))

    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    decay, values = -(jnp.abs(normal(2, 80, 4, seed=9))), normal(2, 80, 4, 6, seed=10)
    given = dict(q=unit(q[..., :2, :8]), k=unit(k[..., :8]), v=values, decay=decay, beta=jax.nn.sigmoid(decay))
    packed, state = dict(at=Tokens(segments=segments)), dict(state=normal(2, 4, 8, 6, seed=11))
    by_channel = -(jnp.abs(normal(2, 80, 4, 8, seed=12)))
    rules = {
        "heads": (given | state, {}),
        "channels": (given | dict(decay=by_channel), packed),
        "no erasing": (given, packed | dict(erase=False)),
    }
    for case, (arrays, options) in rules.items():
        for name in IMPLEMENTATIONS:
            call = functools.partial(kernels.delta_rule, scale=0.3, implementation=name, **options)
            yield f"delta_rule {case} {name}", differentiated(call, arrays)
    first = {name: x[:, :1] for name, x in given.items()}
    store = normal(3, 2, 2, 4, 8, 6, seed=13)
    places = (jnp.array(1), jnp.array([0, -1]), jnp.array([1, 0]))
    yield "delta_rule step", lambda: leaves(kernels.delta_rule(**first, scale=0.3, state=Slots(store, *places)))

    x, w = normal(2, 40, 16, seed=14), normal(48, 16, seed=15)
    targets = jnp.asarray(np.random.RandomState(16).randint(0, 48, (2, 40)))
    for name in IMPLEMENTATIONS:
        loss = lambda x, w, name=name: kernels.cross_entropy(
            lambda x: x @ w.T, x, targets, SEGMENTS, chunk=16, z_loss=1e-3, implementation=name
        )
        yield f"cross_entropy {name}", differentiated(loss, dict(x=x, w=w))

    rows, sizes = normal(50, 16, seed=17), jnp.array([10, 0, 25, 7])
    experts = normal(4, 24, 16, seed=18)
    for case, arrays in {"float32": (rows, experts), "bfloat16": (rows.astype(half), experts.astype(half))}.items():
        for name in IMPLEMENTATIONS:
            call = functools.partial(kernels.ragged_dot, group_sizes=sizes, implementation=name)
            yield f"ragged_dot {case} {name}", differentiated(call, dict(zip("xw", arrays, strict=True)))
    integers = jnp.asarray(np.random.RandomState(19).randint(-127, 128, (4, 24, 16)), jnp.int8)
    for name in IMPLEMENTATIONS:
        stack = Stacked(jnp.stack([integers, integers[::-1]]), jnp.array(1))
        call = functools.partial(kernels.ragged_dot, w=stack, group_sizes=sizes, implementation=name)
        yield f"ragged_dot stacked int8 {name}", differentiated(call, dict(x=rows))

    sides = dict(x=normal(20, 144, seed=20), w=normal(136, 144, seed=21))
    ways: dict[str, Any] = {
        "weights by channel": dict(granularity="channel"),
        "both by block, gradients": dict(granularity="block", activations=True, gradients="quantized"),
        "both by tensor, gradients": dict(granularity="tensor", activations=True, gradients="quantized"),
    }
    for matmul in (kernels.int8_matmul, kernels.fp8_matmul):
        for case, options in ways.items():
            for name in IMPLEMENTATIONS:
                call = functools.partial(matmul, implementation=name, **options)
                yield f"{matmul.__name__} {case} {name}", differentiated(call, sides)
    stored = jnp.asarray(np.random.RandomState(22).randint(-127, 128, (136, 144)), jnp.int8)
    for name in IMPLEMENTATIONS:
        call = functools.partial(
            kernels.int8_matmul, w=stored, scale=jnp.abs(normal(136, seed=23)), implementation=name
        )
        yield f"int8_matmul stored {name}", differentiated(call, dict(x=sides["x"]))

    inputs = dict(x=normal(2, 80, 6, seed=24), weight=normal(6, 4, seed=25))
    yield "causal_conv packed", differentiated(functools.partial(kernels.causal_conv, **packed), inputs)
    tail = dict(tail=normal(2, 3, 6, seed=26))
    yield "causal_conv after a tail", differentiated(kernels.causal_conv, inputs | tail)

    explain = functools.partial(kernels.explain, kernels.attention, q, k, v, scale=0.25)
    yield "explained", lambda: explained((), explain)
    yield "explained, preferring", lambda: explained(("triton", "tpu"), explain)
    unknown = functools.partial(kernels.attention, q, k, v, scale=0.25, implementation="it")
    yield "no such implementation", lambda: facts(refused(unknown))


# ======================================================================================================================
# Generation
# ======================================================================================================================

PROMPTS = ["What does textwrap.dedent do?", "def main(", "A list is"]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <|im_end|> a list?"},
    {"role": "assistant", "content": "A sequence.", "reasoning_content": "Python's."},
    {"role": "user", "content": "And a tuple?"},
]
SPOKEN = [{key: text for key, text in message.items() if key != "reasoning_content"} for message in MESSAGES]
TEMPLATE = """\
{%- for message in messages -%}
<{{ message.role }}{{ ' ' + strftime_now('%Y-%m-%d') if loop.first }}>
{%- if message.role == 'assistant' -%}{% generation %}{{ message.content }}<end>{% endgeneration %}
{%- else %}{{ message.content | trim | tojson }}{% endif -%}
{%- endfor -%}
{%- for tool in tools or [] %}{{ tool.name }}{% endfor -%}
{%- if add_generation_prompt -%}<assistant>{% endif -%}"""


def generation() -> Found:
    model, tokenizer = zoo.load("tiny", dtype="float32"), zoo.tokenizer("tiny")
    generate = functools.partial(zoo.generate, model, tokenizer, max_new_tokens=12)
    draft = lambda: zoo.ModelDraft(zoo.load("tiny", dtype="float32", quantize="int8"), 3)
    filters = dict(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3)
    yield "greedy", lambda: repr(generate([*PROMPTS, MESSAGES]))
    yield "sampled", lambda: repr(generate(PROMPTS, seed=3, frequency_penalty=0.1, stop=["."], **filters))
    yield "cached in int8", lambda: repr(generate(PROMPTS, cache_dtype="int8"))
    yield "drafted", lambda: repr(generate(PROMPTS, draft=draft()))
    yield "streamed", lambda: repr(list(zoo.stream(model, tokenizer, MESSAGES, max_new_tokens=12)))

    def completions(model: Any, prompts: Sequence[Sequence[int]], **options: Any) -> Value:
        found = zoo.complete(model, prompts, max_new_tokens=8, **options)
        return repr([[(c.tokens, c.logprobs, c.calls, c.ended) for c in of_prompt] for of_prompt in found])

    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    sampling = zoo.Sampling(temperature=0.7, top_p=0.95)
    yield "completed", lambda: completions(model, ids, samples=2, sampling=sampling, batch=4, seed=1)

    def with_mtp() -> Value:
        config = zoo.config(tiny.write(SCRATCH / "mtp", "deepseek3"))
        own = zoo.deepseek3.FAMILY.init_model(config, key=jax.random.key(0), parts=("mtp",))
        return completions(own, tiny.TOKENS[:, :9].tolist(), draft=zoo.MTPDraft(own, 2))

    yield "drafted by a module", with_mtp
    yield "rendered", lambda: tokenizer.render(MESSAGES, add_generation_prompt=True)
    yield "encoded", lambda: repr([tokenizer.encode_prompt(MESSAGES), tokenizer.encode_chat(SPOKEN[:3])])
    yield "encoded with reasoning", lambda: refused(lambda: tokenizer.encode_chat(MESSAGES[:3]))
    yield "tokenizer", lambda: repr([tokenizer.eos, tokenizer.bos, tokenizer.pad, tokenizer.vocab_size])

    def templates() -> Value:
        tiny.write(SCRATCH / "template", "qwen3")
        tiny.write_tokenizer(SCRATCH / "template")
        (SCRATCH / "template" / "chat_template.jinja").write_text(TEMPLATE)
        own = zoo.tokenizer(SCRATCH / "template", date=datetime.date(2026, 1, 2))
        refusal = refused(lambda: own.render([{"role": "user"}]))
        found = own.render(MESSAGES, tools=[{"name": "add"}], add_generation_prompt=True), own.encode_chat(SPOKEN)
        return repr([*found, plain(refusal)])

    yield "another template", templates

    def adapters() -> Value:
        added = zoo.lora.add(model, rank=2, alpha=4.0, key=jax.random.key(5))
        moved = jax.tree.map(lambda a: a + 0.01, zoo.lora.split(added)[0])
        joined = zoo.lora.combine(moved, zoo.lora.split(added)[1])
        zoo.peft.save(joined, SCRATCH / "adapter", base="tiny")
        again = zoo.peft.load(model, SCRATCH / "adapter")
        return files(SCRATCH / "adapter") | {"text": zoo.generate(again, tokenizer, PROMPTS[0], max_new_tokens=8)}

    yield "adapters", adapters


# ======================================================================================================================
# Scripts
# ======================================================================================================================

SCRIPTS = ("sft", "pretrain", "dpo", "grpo", "distill", "prepare", "inspect", "plan", "launch", "compare", "report")
HELP = """
import contextlib, io, runpy, sys
for name in sys.argv[1:]:
    plain = name in ("train.compare", "train.report", "train.tiny", "train.tiny.shapes")
    out, sys.argv = io.StringIO(), [name, "--help" if plain else "--help-all"]
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    print("\\f" + name + "\\n" + out.getvalue())
"""
REWARD = """
def vowels(completion, record):
    return sum(c in "aeiou" for c in completion) / max(len(completion), 4)
"""


def command(*arguments: Any, devices: int = 1) -> str:
    """Runs a command of Python in this tree. Returns what it printed."""
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {FLAGS}"}
    environment = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    words = [sys.executable, *map(str, arguments)]
    run = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace")
    if run.returncode:
        raise RuntimeError(f"{words[1:4]} ended with {run.returncode}: {plain(run.stdout + run.stderr)[-3000:]}")
    return run.stdout


def help() -> Found:
    """Returns the text of each script's help, without the boxes around it, whose lines depend on the tree's path."""
    modules = [*(f"train.{name}" for name in SCRIPTS), "train.tiny", "train.tiny.shapes"]
    asked = once(lambda: command("-c", HELP, *modules))
    for number, name in enumerate(modules, 1):

        def text_of(number: int = number, name: str = name) -> str:
            title, _, text = asked().split("\f")[number].partition("\n")
            if title != name or not text.strip():
                raise ValueError(f"{name} has no help: {title}")
            return text

        options = lambda text_of=text_of: sorted(re.findall(r"(?m)^[^\w-]{0,4}(--?\w\S*(?: \S+)*)", text_of()))
        yield f"{name} options", lambda options=options: "\n".join(options())
        yield f"{name} words", lambda text_of=text_of: plain(re.sub(r"[\s\u2500-\u257f]+|usage: \S+", "\n", text_of()))


def write_data(folder: pathlib.Path) -> None:
    """Writes the runs' inputs: three tiny models with a tokenizer, and data of each kind."""
    folder.mkdir(parents=True)
    for name in ("qwen3", "llama", "qwen3_moe"):
        tiny.write(folder / name, name, eos_token_id=63)
        tiny.write_tokenizer(folder / name)
        (folder / name / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}9{% endfor %}")
    lines = {
        "words": [dict(prompt=f"{word} ", completion=word.upper()) for word in words(60)],
        "chats": [dict(messages=[dict(role=r, content=word) for r in ("user", "assistant")]) for word in words(60)],
        "texts": [dict(text=" ".join(words(6, seed=n))) for n in range(60)],
        "pairs": [dict(prompt=f"{word} ", chosen=word.upper(), rejected=word[::-1]) for word in words(40, "abcdefgh")],
        "prompts": [dict(prompt=f"{word} ") for word in words(16, "aeioubcd")],
        "questions": [dict(prompt=f"{word} ", answer=word) for word in words(4)],
    }
    for name, records in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "reward.py").write_text(REWARD)
    how = ["--model", folder / "qwen3", "--seq-len", 32, "--packing", "concat", "--workers", 1, "--hold-out", 0.1]
    command("-m", "train.prepare", folder / "texts.jsonl", folder / "words.jsonl", *how, "--out", folder / "store")


def runs(folder: pathlib.Path) -> dict[str, tuple[str, dict[str, Any], int]]:
    """Maps the name of a run to its script, its options, and its number of devices."""
    usual = {
        "model": folder / "qwen3", "steps": 4, "seq-len": 32, "batch": 4, "lr": 1e-2,
        "save-every": 2, "eval-every": 2, "keep": 9,
    }  # fmt: skip
    chosen: dict[str, tuple[str, dict[str, Any], int]] = {
        "sft": (
            "sft",
            {
                "data": folder / "words.jsonl", "z-loss": 1e-4, "norms-every": 2, "best": "validation_loss",
                "eval-tasks": folder / "questions.jsonl", "eval-tokens": 4,
            },
            1,
        ),
        "sft-adapters": (
            "sft",
            {"model": "tiny", "seq-len": 64, "lora.rank": 2, "quantize": "nf4", "lr": 1e-3},
            1,
        ),
        "sft-experts": (
            "sft",
            {
                "model": folder / "qwen3_moe", "data": folder / "chats.jsonl", "matmul": "int8", "microbatches": 2,
                "mesh": "fsdp=2,expert=2", "batch": 8, "optimizer": "muon", "router-balance": 0.01,
                "freeze": "embed_tokens.*",
            },
            4,
        ),
        "pretrain": (
            "pretrain",
            {"data": folder / "store", "moments": "bfloat16", "weights-dtype": "bfloat16", "remat": "full"},
            1,
        ),
        "dpo": ("dpo", {"data": folder / "pairs.jsonl"}, 1),
        "grpo": (
            "grpo",
            {
                "data": folder / "prompts.jsonl", "reward": f"{folder / 'reward.py'}:vowels", "prompts": 4, "group": 4,
                "max-new-tokens": 6, "seq-len": 16, "iterations": 2, "kl": 0.1, "hold-out": 0.25,
                "batch": None,
            },
            1,
        ),
        "distill": ("distill", {"data": folder / "texts.jsonl", "teacher": folder / "llama", "weight": 0.7}, 1),
    }  # fmt: skip
    given = lambda own: {name: value for name, value in (usual | own).items() if value is not None}
    return {name: (script, given(own), devices) for name, (script, own, devices) in chosen.items()}


def train(script: str, options: Mapping[str, Any], out: pathlib.Path, devices: int) -> None:
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    command("-m", f"train.{script}", *arguments, "--out", out, devices=devices)


CLOCK = re.compile(r"second|mfu|^time|^memory/|goodput")  # metrics that depend on the time


def losses(out: pathlib.Path) -> str:
    """Returns a run's metrics without times."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in line.items() if not CLOCK.search(name)} for line in lines]
    return "\n".join(json.dumps(line, sort_keys=True) for line in kept)


def results(name: str, out: pathlib.Path, **places: pathlib.Path) -> Found:
    """Yields the files that a run has left in its folder, without times."""
    clean = functools.partial(plain, OUT=out, **places)

    def state() -> Value:
        step = max(int(path.name) for path in (out / "checkpoints").iterdir() if path.name.isdigit())
        folder = out / "checkpoints" / str(step)
        meta = json.loads((folder / "meta.json").read_text())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the arrays lie as they did in the run
            arrays = ocp.load(str(folder / "arrays"))
        return leaves(arrays) | {"meta": clean(json.dumps(meta, sort_keys=True))}

    def about() -> str:
        content = json.loads((out / "run.json").read_text())
        content["starts"] = [{"step": start["step"], "memory": start.get("memory")} for start in content["starts"][:1]]
        return clean(json.dumps({key: content[key] for key in ("identity", "options", "starts")}, sort_keys=True))

    yield f"{name} losses", lambda: losses(out)
    texts = lambda: {path.name: path.read_text() for path in out.glob("*.jsonl") if path.name != "metrics.jsonl"}
    yield f"{name} samples", texts
    yield f"{name} curve", lambda: (out / "loss.png").read_bytes()
    yield f"{name} exported", lambda: files(next(p for p in (out / "model", out / "adapter") if p.exists()))
    yield f"{name} checkpoint", state
    options = lambda: yaml.safe_load((out / "run.yaml").read_text())
    yield f"{name} run.yaml", lambda: clean(json.dumps(options(), sort_keys=True, default=str))
    yield f"{name} run.json", about
    yield f"{name} files", lambda: "\n".join(sorted(path.name for path in out.iterdir()))


def scripts() -> Found:
    folder = SCRATCH / "data"
    written = once(functools.partial(write_data, folder))
    for name, (script, options, devices) in runs(folder).items():
        out = SCRATCH / "runs" / name
        begun = once(functools.partial(train, script, options, out, devices))
        for line, value in results(name, out):
            yield line, lambda begun=begun, value=value: (written(), begun(), value())[-1]
    yield "prepared", lambda: (written(), files(folder / "store"))[-1]
    paths = [folder / "texts.jsonl", folder / "words.jsonl"]
    look = ["-m", "train.inspect", *paths, "--model", folder / "qwen3", "--seq-len", 32]
    yield "inspected", lambda: (written(), plain(command(*look)))[-1]

    def drawn() -> Value:
        out, run = SCRATCH / "drawings", SCRATCH / "runs" / "drawings"
        command("-m", "train.tiny.shapes", out, "--drawings", 12)
        options = {"model": out / "model", "data": out / "data", "vision": None, "seq-len": 80, "batch": 4, "steps": 2}
        arguments = [word for name, value in options.items() for word in (f"--{name}", value) if word is not None]
        more = ["--packing", "off", "--freeze", "vision.tower.*"]
        command("-m", "train.sft", *arguments, *more, "--out", run)
        found = {digest(path.read_bytes()) for path in (out / "data").rglob("*.*")}
        own = {f"untrained {name}": value for name, value in files(out / "model").items()}
        return own | files(run / "model") | {"data": "\n".join(sorted(found)), "losses": losses(run)}

    yield "drawings", drawn
    # Where the compilers for these chips are not installed, this is the error.
    yield "plan", lambda: refused(lambda: planned("v6e:2x2"))


def planned(topology: str) -> str:
    try:
        said = command("-m", "train.plan", "tiny", "--topology", topology, "--batch", 8, "--seq", 64)
    except RuntimeError as error:
        return str(error).strip().splitlines()[-1]
    return "\n".join(line for line in said.splitlines() if "compiled in" not in line)


# ======================================================================================================================
# Runs that go on
# ======================================================================================================================


def begin(folder: pathlib.Path) -> None:
    """Leaves runs half done in a folder, with the hashes of the results that the rest of each run had."""
    folder = folder.resolve()
    write_data(folder)
    for name, (script, options, devices) in runs(folder).items():
        out = folder / "runs" / name
        train(script, options, out, devices)
        expected = {line: digest(value()) for line, value in results(name, out, FOLDER=folder)}
        (folder / f"{name}.json").write_text(json.dumps(expected, indent=1) + "\n")
        halve(out)
        print(*(f"{sha} {line}" for line, sha in expected.items()), sep="\n", flush=True)


def halve(out: pathlib.Path) -> None:
    """Restores the folder of a run to its state at the last checkpoint but one."""
    *_, middle, last = sorted(int(path.name) for path in (out / "checkpoints").iterdir() if path.name.isdigit())
    shutil.rmtree(out / "checkpoints" / str(last))
    step = middle * json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["step"] // last
    for path in out.glob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
    for name in ("model", "adapter"):
        shutil.rmtree(out / name, ignore_errors=True)


def resume(folder: pathlib.Path) -> bool:
    """Continues the runs of `begin` by their run.yaml alone. Returns whether all results equal those of `begin`."""
    folder, fine = folder.resolve(), True
    for name, (script, _, devices) in runs(folder).items():
        out = SCRATCH / "resumed" / name
        shutil.copytree(folder / "runs" / name, out)
        train(script, {"config": out / "run.yaml"}, out, devices)
        _, again = json.loads((out / "run.json").read_text())["starts"]
        print(f"{name} goes on from step {again['step']}")
        fine &= again["step"] > 0
        expected = json.loads((folder / f"{name}.json").read_text())
        for line, value in results(name, out, FOLDER=folder):
            sha = digest(value())
            same = sha == expected[line]
            fine &= same
            print(f"{sha} {line}: {'same' if same else 'DIFFERENT, was ' + expected[line]}", flush=True)
    return fine


# ======================================================================================================================
# The command
# ======================================================================================================================

SECTIONS: dict[str, Callable[[], Found]] = {
    "names": names, "checkpoints": checkpoints, "vision": vision, "kernels": operations, "generation": generation,
    "help": help, "scripts": scripts,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="file of the lines, too")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="of these alone")
    parser.add_argument("--match", default="", metavar="PATTERN", help="only lines whose names this is found in")
    parser.add_argument("--details", type=pathlib.Path, help="folder of what was hashed, for a closer comparison")
    parser.add_argument("runs", nargs="*", metavar="begin|resume FOLDER", help="leave runs half done; go on with them")
    o = parser.parse_args()
    if o.runs:
        if len(o.runs) != 2 or o.runs[0] not in ("begin", "resume"):
            parser.error("give begin FOLDER, resume FOLDER, or neither")
        if o.runs[0] == "begin":
            begin(pathlib.Path(o.runs[1]))
            return 0
        return not resume(pathlib.Path(o.runs[1]))
    failed = 0
    with open(o.out, "w") if o.out else contextlib.nullcontext() as file:
        for section in o.only:
            for name, make in SECTIONS[section]():
                if not re.search(o.match, name):
                    continue
                try:
                    value = make()
                    line = f"{section}: {name} {digest(value)}"
                    if o.details:
                        keep(o.details / section, name, value)
                except Exception as error:
                    failed += 1
                    line = f"{section}: {name} FAILED {type(error).__name__}: {plain(str(error))}".replace("\n", " ")
                print(line, flush=True)
                if file:
                    print(line, file=file, flush=True)
    return bool(failed)


if __name__ == "__main__":
    try:
        code = main()
    finally:
        shutil.rmtree(SCRATCH, ignore_errors=True)
    sys.exit(code)
