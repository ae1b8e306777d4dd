"""The options that training scripts share."""

import dataclasses
import datetime
import functools
import math
import os
import pathlib
import typing
from typing import Any, ClassVar, Literal, TypeVar

import jax

from train.step import Objective, cross_entropy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat:
    """How the model's template makes texts of chats."""

    date: datetime.date = datetime.date(2026, 1, 1)
    """The day that templates write which ask for one. It is not today's, so that a run which goes on tomorrow has the
    same tokens."""
    special_in_content: bool = False
    """Make control tokens, such as <|im_end|>, of the same letters in what users and tools say, as transformers
    does. By default they stay letters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of every training script. Where 0 stands for a choice of ours, `resolve` makes it."""

    name: ClassVar[str]

    out: pathlib.Path | None = None
    """Folder of the run: checkpoints, metrics.jsonl, samples.jsonl, loss.png, and the exported model or adapter. None:
    runs/NAME of the script, or runs/NAME-2 and so on if another run has that; the same command finds its own again."""
    seq_len: int = 0
    """Tokens of a row. 0: as many as the model has positions, up to 2,048."""
    batch: int = 4
    """Rows of a step."""
    microbatches: int = 1
    """Parts in which a step works through its rows, one after another, to save memory; the update is the same. With
    --router-balance, and for the kto loss, each needs one more forward pass."""
    steps: int = 0
    """Optimizer steps of the whole run."""
    lr: float = 0.0
    """Peak learning rate, reached after the warmup. 0: in inverse proportion to the model's width."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """How the learning rate falls: along a cosine, or in a straight line over the last --decay steps."""
    warmup: int = -1
    """Steps in which the learning rate rises. -1: 3 % of them."""
    decay: int = -1
    """Steps in which wsd's learning rate falls. -1: 20 % of them."""
    rewarm: int = 0
    """Steps in which the learning rate rises from that of the checkpoint that a run goes on from, where a new schedule,
    such as that of more --steps, would let it jump. 0: it jumps."""
    optimizer: Literal["adamw", "muon", "adafactor", "sgd"] = "adamw"
    """Turns gradients into updates. muon: Muon for the matrices of the layers' linear maps, AdamW for all other
    parameters; its updates have AdamW's size, so --lr and --weight-decay mean the same. adafactor: no momentum. sgd: a
    momentum of 0.9; it needs a far larger --lr. See docs/optimizers.md."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Data type in which the optimizer's moments are kept between steps, at 4 or 2 bytes each. Updates are computed in
    float32."""
    weight_decay: float = -1.0
    """Fraction of each matrix of a linear map that every step subtracts, times the learning rate, with any optimizer.
    -1: 0.1, but 0 for adapters."""
    clip_norm: float = 1.0
    """Gradients of a larger global norm are scaled down to it."""
    router_balance: float = 0.0
    """Weight of the load-balancing loss in a mixture of experts, on the scale of transformers' router_aux_loss_coef:
    the loss is as many as a token chooses experts where all are used alike; 0.01 in Switch Transformers, 0.001 in
    Qwen3."""
    router_z: float = 0.0
    """Weight of the router z-loss in a mixture of experts, which keeps its logits from growing; 0.001 in ST-MoE."""
    router_bias_rate: float = 0.0
    """By how much each step moves the routers' biases towards an even load, in DeepSeek V3; 0.001 in its paper."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the forward and backward pass; weights are kept in float32. auto: bfloat16, but float32 on a CPU."""
    matmul: Literal["float", "int8", "fp8"] = "float"
    """What linear maps of the layers multiply in: --compute-dtype, or eight bits, to which weights and activations are
    rounded row by row; fp8 rounds gradients too. Weights are kept in float32 all the same. Embedding, head, routers and
    experts stay as with float."""
    remat: Literal["none", "dots", "full", "offload"] = "dots"
    """What the backward pass computes again to save memory: nothing, all but matrix products, or whole layers; offload
    also keeps the layers' inputs in the memory of a GPU's or TPU's host."""
    mesh: str = "fsdp=-1"
    """Devices by what they split, such as fsdp=4,tensor=2: replica (the batch), fsdp (batch and parameters), tensor
    (work on each token), context (sequences), expert (a mixture's experts), stage (layers); -1 takes what is left."""
    seed: int = 0
    """Of the order of the data, and of random weights."""
    eval_every: int = 0
    """Steps between losses on the validation data. 0: a tenth of the run."""
    eval_batches: int = 50
    """Batches of validation data at most."""
    patience: int = 0
    """End the run after so many looks at the validation data in a row without a lower loss, and export the model of the
    lowest one; checkpoints are then saved at these looks. 0: never."""
    sample_every: int = 0
    """Steps between generations to look at. 0: a quarter of the run."""
    sample_tokens: int = 64
    """Tokens of such a generation."""
    save_every: int = 200
    """Steps between checkpoints."""
    keep: int = 2
    """How many of the newest checkpoints to keep."""
    accept_data: bool = False
    """Go on from a checkpoint though files of --data have changed since, such as for a record that was mended. The run
    keeps its place in the order of the records; if their number or lengths are others, some may come twice in this
    epoch, and some not at all."""
    chat: Chat = Chat()
    dry_run: bool = False
    """Only look: at the data, three examples (dimmed: what is not learnt), memory, mesh and disk. Trains nothing."""
    coordinator: str | None = None
    """host:port of process 0, if there are several and no launcher that JAX knows has started them: see
    docs/clusters.md."""
    processes: int | None = None
    """How many there are."""
    process: int | None = None
    """Which of them this one is, from 0."""

    def __post_init__(self) -> None:
        """Takes what one writes in Python, too: strings for paths, and one value or a list of them for a tuple."""
        for field in dataclasses.fields(self):
            value, kinds = getattr(self, field.name), typing.get_args(field.type)
            if typing.get_origin(field.type) is tuple:
                values = (value,) if isinstance(value, str | os.PathLike | float | int) else value
                value = tuple(kinds[0](each) for each in values)
            elif value is not None and pathlib.Path in (field.type, *kinds):
                value = pathlib.Path(value)
            object.__setattr__(self, field.name, value)


O = TypeVar("O", bound=Options)


def resolve(o: O, config: Any, *, width_lr: float) -> O:
    """`o` with a value for every option that the user has left to us, but those that depend on the number of steps.

    `width_lr` is the learning rate of a model of width 4,096.

    Raises:
        ValueError: if the model has fewer positions than --seq-len.
    """
    if o.seq_len > config.max_position_embeddings:
        raise ValueError(f"--seq-len {o.seq_len} exceeds the model's {config.max_position_embeddings} positions.")
    dtype = {"cpu": "float32"}.get(jax.default_backend(), "bfloat16")
    return dataclasses.replace(
        o,
        seq_len=o.seq_len or min(config.max_position_embeddings, 2048),
        lr=o.lr or width_lr * 4096 / config.hidden_size,
        weight_decay=0.1 if o.weight_decay < 0 else o.weight_decay,
        compute_dtype=dtype if o.compute_dtype == "auto" else o.compute_dtype,
    )


def resolve_steps(o: O, steps: int) -> O:
    """`o` for a run of so many steps."""
    return dataclasses.replace(
        o,
        steps=steps,
        warmup=math.ceil(0.03 * steps) if o.warmup < 0 else o.warmup,
        decay=math.ceil(0.2 * steps) if o.decay < 0 else o.decay,
        eval_every=o.eval_every or math.ceil(steps / 10),
        sample_every=o.sample_every or math.ceil(steps / 4),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelingOptions(Options):
    """Options of the scripts that learn to predict the next token."""

    z_loss: float = 0.0
    """Weight of log(Z)^2 in the loss, which keeps logits from growing; 1e-4 in PaLM."""
    mtp_weight: float = 0.0
    """Weight of the loss of the token after the next, which DeepSeek V3 has a module for; 0.3, then 0.1 in its paper.
    0: without that module."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the optional parts of the model that are trained with it."""
        return ("mtp",) if self.mtp_weight else ()

    def objective(self) -> Objective:
        return functools.partial(cross_entropy, z_loss=self.z_loss, mtp_weight=self.mtp_weight)
