"""Speed of whole training steps on this machine's GPU: train.step against transformers, peft and torch.compile.

    python -m benchmarks.train --help

Shapes are those of real models, with random weights made on the device. Contestants run one after the other, each in a
process of its own. Ours keeps float32 weights and moments, and computes in bfloat16. So does "torch, float32 weights";
plain "torch" keeps weights and moments in bfloat16, and so reads and writes less. With LoRA the base is frozen, in
bfloat16.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import math
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from benchmarks.common import import_transformers
from benchmarks.gpu import Failed, Target, Worker, device, folder, matches, prepare, ratio, regions, report


LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, CLIP_NORM = 1e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
RANK = 16
Arithmetic = Literal["bf16", "int8", "fp8"]
PATIENCE = 300  # seconds for a contestant
TINY = dict(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Model:
    zoo: str
    layers: int | None = None  # None: all of them
    lora: bool = False
    tiny: bool = False

    @property
    def name(self) -> str:
        return self.zoo + (f", {self.layers} layers" if self.layers else "") + (f", LoRA {RANK}" if self.lora else "")

    def config(self) -> Any:
        import zoo

        config = zoo.config(self.zoo)
        changes: dict[str, Any] = dict(num_hidden_layers=self.layers or config.num_hidden_layers)
        if self.tiny:
            experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
            changes |= TINY | (experts if hasattr(config, "num_experts") else {})
        if hasattr(config, "layer_types"):
            changes["layer_types"] = config.layer_types[: changes["num_hidden_layers"]]
        return dataclasses.replace(config, **changes)


SMALL, MIDDLE = Model("llama3.2-1b"), Model("llama3.2-3b")
LORA, EXPERTS = Model("qwen3-8b", lora=True), Model("qwen3-30b-a3b", layers=6)

# The most important come first, because a run that is out of time skips the end.
RUNS = (
    (MIDDLE, "zoo"), (MIDDLE, "torch"), (LORA, "zoo"), (LORA, "torch"), (EXPERTS, "zoo"), (EXPERTS, "torch"),
    (SMALL, "zoo"), (SMALL, "torch"), (MIDDLE, "zoo, fp8"), (MIDDLE, "zoo, int8"), (SMALL, "torch, float32 weights"),
)  # fmt: skip


def describe(model: Model, seq: int) -> dict[str, Any]:
    """Runs in JAX's process. Returns the config.json ("hub"), "flops" of a token, and the device's "peak_flops", if
    known.

    LoRA's frozen weights have no gradient, so their third product does not count. The adapters do not count, either.
    """
    from train.base.flops import flops_per_token, peak_flops
    from zoo.config import write
    from zoo.registry import family_of

    config = model.config()
    flops = flops_per_token(config, seq, frozen=model.lora)
    hub = json.loads(json.dumps(write(config, family_of(config), np.dtype("float32"))))  # with lists for tuples
    return {"hub": hub, "flops": flops, "peak_flops": peak_flops()}


def zoo_steps(
    model: Model, arithmetic: Arithmetic, batch: int, seq: int, remat: str
) -> tuple[Callable[[int], float], dict[str, Any]]:
    """Returns `queue(steps)`, which runs that number of our steps (`train.step.step.jit_train_step`) and returns the
    seconds.

    Also returns facts about them: "parameters", the number "trained", the "losses" so far, "how" kernels serve, the
    seconds of "compiling", and the bytes of a device that the compiler has "counted".
    """
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import optax

    import kernels
    from train.state.optim import adamw
    from train.state.remat import REMAT
    from train.state.state import init_state
    from train.step.language import cross_entropy
    from train.step.step import Recipe, jit_train_step
    from zoo import lora, quantized, surgery
    from zoo.registry import family_of

    config, schedule = model.config(), optax.constant_schedule(LEARNING_RATE)
    optimizer = adamw(schedule, weight_decay=WEIGHT_DECAY, clip_norm=CLIP_NORM, b1=BETAS[0], b2=BETAS[1], eps=EPS)
    cast = functools.partial(surgery.cast, dtype=jnp.bfloat16)
    size = lambda tree: sum(array.size for array in jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array)))

    def make(key: jax.Array) -> Any:
        net = family_of(config).Model(config, key=key)
        if model.lora:
            return lora.add(cast(net), rank=RANK, alpha=float(RANK), key=key)
        return net if arithmetic == "bf16" else quantized.quantize_training(net, arithmetic)

    net = jax.jit(make)(jax.random.key(time.time_ns() % 2**32))
    tokens = np.random.default_rng().integers(config.vocab_size, size=(batch, seq + 1), dtype=np.int32)
    ones, positions = np.ones((batch, seq), np.int32), np.broadcast_to(np.arange(seq, dtype=np.int32), (batch, seq))
    arrays = dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], loss_mask=ones, segments=ones, positions=positions)
    data = {name: jnp.asarray(array) for name, array in arrays.items()}
    choices = kernels.explain(cross_entropy, surgery.with_remat(jax.eval_shape(cast, net), REMAT[remat]), data)
    trained, frozen = lora.split(net)
    losses: list[float] = []
    how = ", ".join(sorted({f"{choice.operation}: {choice.implementation}" for choice in choices}))
    known: dict[str, Any] = {"parameters": size(net), "trained": size(trained), "losses": losses, "how": how}
    state = init_state(trained, optimizer)
    step = jit_train_step(
        state,
        Recipe(
            objective=cross_entropy,
            optimizer=optimizer,
            schedule=schedule,
            compute_dtype=jnp.bfloat16,
            remat=REMAT[remat],
        ),
    )
    del net, trained
    begin = time.perf_counter()
    compiled = step.lower(state, data, frozen).compile()
    known["compiling"], memory = time.perf_counter() - begin, compiled.memory_analysis()
    sizes = memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes
    known["counted"] = sum(sizes) - memory.alias_size_in_bytes

    def queue(steps: int) -> float:
        nonlocal state
        begin = time.perf_counter()
        for _ in range(steps):
            state, metrics = compiled(state, data, frozen)
        losses.append(float(metrics["loss"]))  # waits for the step
        return time.perf_counter() - begin

    return queue, known


def with_zoo(
    model: Model, arithmetic: Arithmetic, batch: int, seq: int, remat: str, timing: dict[str, Any]
) -> dict[str, Any]:
    """Times our steps in a process of its own."""
    import jax

    queue, known = zoo_steps(model, arithmetic, batch, seq, remat)
    first = known["compiling"] + queue(1)
    ms = regions(queue, **timing)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return known | {"ms": ms, "first": first, "peak": peak}


def with_torch(
    model: Model, hub: dict[str, Any], weights: str, batch: int, seq: int, compiled: bool, timing: dict[str, Any]
) -> dict[str, Any]:
    """Times transformers' steps with fused AdamW, in their own process: torch's fastest attention, then compiled."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()  # empty, since the first step must compile
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    transformers = import_transformers()
    on = "cuda" if torch.cuda.is_available() else "cpu"
    attention = "flash_attention_2" if importlib.util.find_spec("flash_attn") else "sdpa"
    with torch.device(on):
        hub_config = transformers.AutoConfig.for_model(**hub)
        options: dict[str, Any] = dict(dtype=getattr(torch, weights), attn_implementation=attention)
        net = transformers.AutoModelForCausalLM.from_config(hub_config, **options).train()
    if model.lora:
        import peft  # pyright: ignore[reportMissingImports]  # not everywhere

        lora = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        net = peft.get_peft_model(net, lora)
    trained = [p for p in net.parameters() if p.requires_grad]
    kwargs: dict[str, Any] = dict(lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    optimizer = torch.optim.AdamW(trained, fused=True, **kwargs)
    ids = torch.randint(hub["vocab_size"], (batch, seq + 1), device=on)
    tokens, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    mixed = weights == "float32" or model.lora  # peft keeps adapters in float32
    losses: list[float] = []

    def loss_of() -> Any:
        with torch.autocast(on, torch.bfloat16, enabled=mixed):
            logits = net(tokens, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def queue(forward: Callable[[], Any], backends: list[Any], steps: int) -> float:
        begin = time.perf_counter()
        with sdpa_kernel(backends, set_priority=True) if backends else contextlib.nullcontext():
            for _ in range(steps):
                optimizer.zero_grad()
                loss = forward()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(trained, CLIP_NORM)
                optimizer.step()
        losses.append(loss.item())  # waits for the step
        return time.perf_counter() - begin

    def run(forward: Callable[[], Any], backends: list[Any]) -> dict[str, Any]:
        if on == "cuda":
            torch.cuda.reset_peak_memory_stats()
        first = queue(forward, backends, 1)
        ms = regions(functools.partial(queue, forward, backends), **timing)
        return {"ms": ms, "first": first, "peak": torch.cuda.max_memory_allocated() if on == "cuda" else None}

    attentions: dict[str, list[Any]] = {attention: []}
    if on == "cuda" and attention == "sdpa":
        others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        attentions["sdpa by cuDNN"] = [SDPBackend.CUDNN_ATTENTION, *others]
    variants = {f"eager, {name}": run(loss_of, backends) for name, backends in attentions.items()}
    median = lambda how: statistics.median(variants[how]["ms"])
    quickest = min(attentions, key=lambda name: median(f"eager, {name}"))
    failure = ""
    if compiled:
        try:
            variants[f"compiled, {quickest}"] = run(torch.compile(loss_of), attentions[quickest])
        except Exception as error:
            failure = f"; compiled it fails: {type(error).__name__}: {error}"
    best = min(variants, key=median)
    counts = {"parameters": sum(p.numel() for p in net.parameters()), "trained": sum(p.numel() for p in trained)}
    return counts | variants[best] | {"losses": losses, "how": best + failure, "variants": variants}


def main(
    only: tuple[str, ...] = ("*",),
    by: tuple[str, ...] = ("*",),
    seconds: float = 540,
    tokens: int = 8192,
    seq: int = 8192,
    remat: str = "dots",
    compiled: bool = True,
    region: float = 1,
    rehearse: bool = False,
    out: pathlib.Path | None = None,
) -> None:
    """Measures tokens per second, share of the device's peak, memory and start of training steps on this machine's GPU.

    Args:
        only: models whose names one of these patterns matches, such as "llama*" "*LoRA*".
        by: contestants whose names one of these patterns matches, such as zoo "zoo, fp8".
        seconds: no contestant starts later than this; skipped ones are listed.
        tokens: tokens of a step.
        seq: tokens of a sequence.
        remat: how much ours recomputes to save memory: none, dots or full. The others keep all.
        compiled: tries torch.compile too, beside eager torch; its first step takes half a minute or more.
        region: least seconds of each of three measurements.
        rehearse: on the CPU, very small models, no torch.compile: shows that it runs.
        out: folder for the file with the results; None: benchmarks/results, or of a rehearsal a temporary one.
    """
    begin = time.monotonic()
    prepare(rehearse, memory=0.95)
    if rehearse:
        tokens, seq, region, compiled = 128, 64, 0.01, False
    size, timing = (tokens // seq, seq), dict(seconds=region, count=3)
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    with Worker() as worker:
        card = device(worker, rehearse)
    for model, who in ((m, w) for m, w in RUNS if matches(m.name, only) and matches(w, by)):
        if time.monotonic() - begin > seconds:
            skipped.append(f"{model.name} by {who}")
            continue
        row: dict[str, Any] = {"model": model.name, "by": who, "note": ""}
        rows.append(row)
        try:
            row |= contestant(dataclasses.replace(model, tiny=rehearse), who, size, remat, compiled, timing)
        except Failed as failure:
            row["note"] = str(failure)
            continue
        row["ms"], row["all ms"] = statistics.median(row["ms"]), row["ms"]
        row["tokens/s"] = 1e3 * tokens / row["ms"]
        row["MFU"] = row["tokens/s"] * row["flops"] / row["peak_flops"] if row["peak_flops"] else None
        first = next(other for other in rows if other["model"] == model.name and "ms" in other)
        different = [count for count in ("parameters", "trained") if row[count] != first[count]]
        if different or not all(map(math.isfinite, row["losses"])):
            row["note"] = f"WRONG: {different or row['losses']}, not as by {first['by']}"
        print(f"{time.monotonic() - begin:4.0f} s  {model.name} by {who}", flush=True)

    def value(model: str, quantity: str, *names: str) -> float | None:
        found = [row for row in rows if (row["model"], row["note"]) == (model, "") and row["by"] in names]
        return max((row[quantity] for row in found if row[quantity]), default=None)

    def against(row: dict[str, Any]) -> float | None:
        return ratio(row.get("tokens/s"), value(row["model"], "tokens/s", "torch", "torch, float32 weights"))

    fp8 = (value(MIDDLE.name, "tokens/s", by) for by in ("zoo, fp8", "zoo"))
    targets = [
        Target("llama3.2-3b, MFU", value(MIDDLE.name, "MFU", "zoo"), 0.48, 0.60),
        Target("llama3.2-1b, MFU", value(SMALL.name, "MFU", "zoo"), 0.40, 0.60),
        Target("mixture of experts, MFU", value(EXPERTS.name, "MFU", "zoo"), 0.30, 0.40),
        Target("qwen3-8b with LoRA, tokens/s", value(LORA.name, "tokens/s", "zoo"), 13_000, 18_000),
        Target("llama3.2-3b, fp8 / bf16", ratio(*fp8), 1.25, 1.4),
    ]
    gigabytes = lambda row: row["peak"] / 1e9 if row.get("peak") else None
    columns = {name: lambda row, name=name: row.get(name) for name in ("model", "by", "ms", "tokens/s", "MFU")}
    columns |= {"/ torch": against, "peak memory, GB": gigabytes, "first step, s": lambda row: row.get("first")}
    columns |= {"how": lambda row: row["note"] or row["how"]}
    settings = dict(
        only=only, by=by, seconds=seconds, tokens=tokens, seq=seq, remat=remat, region=region, skipped=skipped
    )
    report("train", card, folder(out, rehearse), columns=columns, rows=rows, targets=targets, settings=settings)
    print(f"{time.monotonic() - begin:.0f} s. Left out, as there was no more time: {', '.join(skipped) or 'nothing'}.")


def contestant(
    model: Model, who: str, size: tuple[int, int], remat: str, compiled: bool, timing: dict[str, Any]
) -> dict[str, Any]:
    """Returns the results of `with_zoo` or `with_torch`, and of `describe`. `size`: sequences, tokens of each."""
    name, _, how = who.partition(", ")
    with Worker() as worker:
        known = worker("benchmarks.train.describe", model, size[1], patience=PATIENCE)
        hub = known.pop("hub")
        if name == "zoo":
            arguments = model, how or "bf16", *size, remat, timing
            return known | worker("benchmarks.train.with_zoo", *arguments, patience=PATIENCE)
    with Worker() as worker:
        weights = "float32" if how == "float32 weights" else "bfloat16"
        arguments = model, hub, weights, *size, compiled, timing
        return known | worker("benchmarks.train.with_torch", *arguments, patience=PATIENCE)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
