"""Time of a training step, and of the first one: train.step against transformers and torch, eager and compiled. With
--lora, only adapters are trained, against peft. --model has a mixture, a hybrid, and a model that sees.

    python -m benchmarks.train_step --help

All take the same steps: the same weights, tokens, images, loss, clipping and AdamW, in float32. Their losses are
compared.
"""

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from benchmarks.common import (
    REFERENCE,
    SMOLLM2_135M,
    Contestant,
    alternate,
    import_transformers,
    ratios,
    report,
    write_checkpoint,
)


LEARNING_RATE = 1e-3
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1  # for the matrices of linear layers
CLIP_NORM = 1.0
ADAPTER = "adapter"  # a folder beside the model's files

SIZES: dict[str, Any] = {k: v for k, v in REFERENCE.items() if k != "model_type"}
PATCH, SIDE, IMAGE_TOKENS, IMAGE = 14, 16, 64, 8000  # pixels, patches along a side, tokens of an image, and their id
MODELS: dict[str, dict[str, Any]] = {
    "dense": REFERENCE,
    "smollm2-135m": SMOLLM2_135M,
    # 67 million parameters, 29 million for each token.
    "mixture": SIZES | dict(
        model_type="qwen3_moe", num_experts=16, num_experts_per_tok=4, moe_intermediate_size=384, norm_topk_prob=True,
    ),
    # Three layers of the gated delta rule, and one of attention, twice.
    "hybrid": SIZES | dict(
        model_type="qwen3_5_text", linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=64,
        linear_value_head_dim=64,
    ),
    # One image of 224 pixels a row.
    "vision": dict(
        model_type="gemma3", mm_tokens_per_image=IMAGE_TOKENS, image_token_index=IMAGE, boi_token_index=IMAGE + 1,
        eoi_token_index=IMAGE + 2,
        text_config=SIZES | dict(model_type="gemma3_text", sliding_window=256, query_pre_attn_scalar=64),
        vision_config=dict(
            model_type="siglip_vision_model", hidden_size=384, intermediate_size=1536, num_hidden_layers=8,
            num_attention_heads=6, image_size=PATCH * SIDE, patch_size=PATCH, vision_use_head=False,
        ),
    ),
}  # fmt: skip


def pixels(rows: int) -> np.ndarray:
    """Returns an image for each row: [rows, 3, pixels, pixels]."""
    return np.random.default_rng(1).uniform(-1, 1, (rows, 3, PATCH * SIDE, PATCH * SIDE)).astype(np.float32)


def images(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Returns what a batch of `train.data` has of the images of `pixels`, or {} if no token stands for one."""
    if not (here := tokens == IMAGE).any():
        return {}
    rows = len(tokens)
    cut = pixels(rows).reshape(rows, 3, SIDE, PATCH, SIDE, PATCH).transpose(0, 2, 4, 1, 3, 5)
    return dict(
        patches=cut.reshape(rows, 1, SIDE * SIDE, -1),
        grids=np.full((rows, 1, 2), SIDE, np.int32),
        image=np.where(here, 0, -1).astype(np.int32),
        feature=np.where(here, np.cumsum(here, axis=1) - 1, 0).astype(np.int32),
    )


def write_adapter(folder: str, rank: int) -> Callable[[], None]:
    """Writes a new adapter for the checkpoint in a folder, in PEFT's layout."""
    import jax

    import zoo

    model = zoo.lora.add(zoo.load(folder), rank=rank, alpha=rank, key=jax.random.key(0))
    zoo.peft.save(model, f"{folder}/{ADAPTER}")
    return lambda: None


def zoo_step(folder: str, tokens: np.ndarray) -> Callable[[], float]:
    import jax.numpy as jnp
    import optax

    import zoo
    from train.state.optim import adamw
    from train.state.remat import REMAT
    from train.state.state import init_state
    from train.step.language import cross_entropy
    from train.step.step import Recipe, jit_train_step
    from zoo import lora
    from zoo.weights import peft

    model = zoo.load(folder, parts=("vision",) if (tokens == IMAGE).any() else ())
    if os.path.exists(f"{folder}/{ADAPTER}"):
        model = peft.load(model, f"{folder}/{ADAPTER}")
    trained, frozen = lora.split(model)
    schedule = optax.constant_schedule(LEARNING_RATE)
    optimizer = adamw(schedule, weight_decay=WEIGHT_DECAY, clip_norm=CLIP_NORM, b1=BETAS[0], b2=BETAS[1], eps=EPS)
    state = init_state(trained, optimizer)
    train_step = jit_train_step(
        state,
        Recipe(
            objective=cross_entropy,
            optimizer=optimizer,
            schedule=schedule,
            compute_dtype=jnp.float32,
            remat=REMAT["dots"],
        ),
    )
    inputs = tokens[:, :-1]
    ones = np.ones_like(inputs)
    positions = np.broadcast_to(np.arange(inputs.shape[1], dtype=np.int32), inputs.shape)
    arrays = dict(tokens=inputs, targets=tokens[:, 1:], loss_mask=ones, segments=ones, positions=positions)
    batch = {name: jnp.asarray(array) for name, array in (arrays | images(inputs)).items()}

    def step() -> float:
        nonlocal state
        state, metrics = train_step(state, batch, frozen)
        return float(metrics["loss"])

    return step


def torch_step(folder: str, tokens: np.ndarray, compiled: bool) -> Callable[[], float]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=folder)  # empty, since the first step must compile
    import torch

    transformers = import_transformers()
    sees = (tokens == IMAGE).any()
    auto = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, attn_implementation="sdpa").train()
    if os.path.exists(f"{folder}/{ADAPTER}"):
        import peft  # pyright: ignore[reportMissingImports]  # not everywhere

        model = peft.PeftModel.from_pretrained(model, f"{folder}/{ADAPTER}", is_trainable=True)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # replaces the memory-mapped file, which is slower to write to
    linears = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    matrices = [matrix for matrix in linears if matrix.requires_grad]
    others = [p for p in model.parameters() if p.requires_grad and all(p is not matrix for matrix in matrices)]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": others, "weight_decay": 0.0}],
        lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True,
    )  # fmt: skip

    def loss_of(inputs: Any, targets: Any) -> Any:
        logits = model(inputs, use_cache=False, **seen).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    loss_of = torch.compile(loss_of) if compiled else loss_of
    ids = torch.from_numpy(tokens).long()
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    pictures = dict(pixel_values=torch.from_numpy(pixels(len(ids))), token_type_ids=(inputs == IMAGE).long())
    seen: dict[str, Any] = pictures if sees else {}

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        return loss.item()

    return step


def main(
    batch: int = 2,
    seq: int = 512,
    layers: int | None = None,
    rounds: int = 9,
    steps: int = 3,
    starts: int = 3,
    compiled: bool = True,
    lora: int = 0,
    model: Literal["dense", "smollm2-135m", "mixture", "hybrid", "vision"] = "dense",
) -> None:
    """Measures seconds of a training step, seconds to the first, and memory, of a small model.

    Args:
        batch: sequences in a batch.
        seq: tokens of a sequence.
        layers: layers of the model. None: 8, and those of SmolLM2-135M.
        rounds: rounds in which all take turns.
        steps: steps in each turn.
        starts: fresh processes of each, for the time to the first step.
        compiled: includes torch.compile, which needs a C++ compiler and starts slowly.
        lora: rank of adapters on all linear layers, the only weights that are trained; 0: all weights are.
        model: a Qwen3, the sizes of SmolLM2-135M, a mixture of Qwen3, a hybrid (Qwen3.5), or Gemma 3 with an image in
            each row.
    """
    tokens = np.random.default_rng(0).integers(IMAGE, size=(batch, seq + 1), dtype=np.int32)
    layers = layers or MODELS[model].get("num_hidden_layers", 8)
    config = MODELS[model] | dict(num_hidden_layers=layers)
    if model == "vision":
        tokens[:, 1 : 1 + IMAGE_TOKENS] = IMAGE
        config = MODELS[model] | dict(text_config=MODELS[model]["text_config"] | dict(num_hidden_layers=layers))
    builds = {"zoo": zoo_step, "torch eager": functools.partial(torch_step, compiled=False)}
    if compiled:
        builds["torch compiled"] = functools.partial(torch_step, compiled=True)

    def start(build: Callable) -> dict[str, float]:
        with Contestant(build, folder, tokens) as contestant:
            return {"ready": contestant.ready, "step": contestant.turn()["wall"]}

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        write_checkpoint(folder, config)
        if lora:
            with Contestant(write_adapter, folder, lora):
                pass
        starting = alternate({name: functools.partial(start, build) for name, build in builds.items()}, starts)
        contestants = {name: running.enter_context(Contestant(build, folder, tokens)) for name, build in builds.items()}
        losses = {name: contestant.turn(4)["outputs"] for name, contestant in contestants.items()}
        apart = {name: float(np.abs(np.subtract(theirs, losses["zoo"])).max()) for name, theirs in losses.items()}
        if not max(apart.values()) <= 1e-3:
            raise SystemExit(f"These are not the same steps, by the losses of the first ones: {losses}.")
        taken = alternate({name: functools.partial(c.turn, steps) for name, c in contestants.items()}, rounds)

    results = {}
    for name in builds:
        totals = {n: [start["ready"] + start["step"] for start in starting[n]] for n in (name, "torch eager")}
        pick = lambda who, key: [turn[key] for turn in taken[who]]
        results[name] = {
            "step, s": pick(name, "wall"),
            "step / torch eager": ratios(pick(name, "wall"), pick("torch eager", "wall")),
            "CPU time of a step, s": pick(name, "cpu"),
            "CPU time / torch eager": ratios(pick(name, "cpu"), pick("torch eager", "cpu")),
            "peak memory, MB": [taken[name][-1]["peak"] / 1e6],
            "import and build, s": [start["ready"] for start in starting[name]],
            "first step, s": [start["step"] for start in starting[name]],
            "start to first step, s": totals[name],
            "start / torch eager": ratios(totals[name], totals["torch eager"]),
            "first losses differ from zoo's by": [apart[name]],
        }
    settings = dict(
        config=config, lora=lora, batch=batch, seq=seq, rounds=rounds, steps=steps, starts=starts, losses=losses
    )
    name = "-".join(["train_step", *[model] * (model != "dense"), *["lora"] * (lora > 0)])
    report(name, "cpu", settings, results)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
