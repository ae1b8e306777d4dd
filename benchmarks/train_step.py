"""Time of a training step, and of the first one: train.step against transformers and torch, eager and compiled. With
--lora, only adapters are trained, against peft.

    python -m benchmarks.train_step --help

All take the same steps: the same weights, tokens, loss, clipping and AdamW, in float32. Their losses are compared.
"""

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.common import REFERENCE, Contestant, alternate, import_transformers, ratios, report, write_checkpoint


LEARNING_RATE = 1e-3
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1  # for the matrices of linear layers
CLIP_NORM = 1.0
ADAPTER = "adapter"  # a folder beside the model's files


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

    model = zoo.load(folder)
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
    batch = {name: jnp.asarray(array) for name, array in arrays.items()}

    def step() -> float:
        nonlocal state
        state, metrics = train_step(state, batch, frozen)
        return float(metrics["loss"])

    return step


def torch_step(folder: str, tokens: np.ndarray, compiled: bool) -> Callable[[], float]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=folder)  # empty, since the first step must compile
    import torch

    model = import_transformers().Qwen3ForCausalLM.from_pretrained(folder, attn_implementation="sdpa").train()
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
        logits = model(inputs, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    loss_of = torch.compile(loss_of) if compiled else loss_of
    ids = torch.from_numpy(tokens).long()
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

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
    layers: int = 8,
    rounds: int = 9,
    steps: int = 3,
    starts: int = 3,
    compiled: bool = True,
    lora: int = 0,
) -> None:
    """Measures seconds of a training step, seconds to the first, and memory, of a small Qwen3.

    Args:
        batch: sequences in a batch.
        seq: tokens of a sequence.
        layers: layers of the model.
        rounds: rounds in which all take turns.
        steps: steps in each turn.
        starts: fresh processes of each, for the time to the first step.
        compiled: includes torch.compile, which needs a C++ compiler and starts slowly.
        lora: rank of adapters on all linear layers, the only weights that are trained; 0: all weights are.
    """
    tokens = np.random.default_rng(0).integers(REFERENCE["vocab_size"], size=(batch, seq + 1), dtype=np.int32)
    config = REFERENCE | dict(num_hidden_layers=layers)
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
    report("train_step-lora" if lora else "train_step", "cpu", settings, results)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
