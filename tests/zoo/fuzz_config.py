"""Changes config.json of the tiny checkpoints at random, and compares the resulting logits with transformers'.

python -m tests.zoo.fuzz_config --mutations 20000 --seed 1

A changed file is refused in one sentence, or the logits equal transformers'. Where transformers itself fails, there is
nothing to compare with; these files are counted separately.
"""

import argparse
import collections
import copy
import json
import logging
import pathlib
import random
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

import zoo
from tests.zoo import make_golden, tiny
from zoo import registry
from zoo.nn.fields import is_ignorable


TOKENS = tiny.TOKENS[:1]
KINDS = ("full_attention", "sliding_attention", "chunked_attention")
WORDS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "greedy", "group_limited_greedy", "softmax")
TYPES = tuple(registry.FAMILIES)
ROPES: list[Any] = [
    {}, {"rope_type": "default"}, {"rope_theta": 500.0}, {"rope_type": "linear"}, {"type": "linear", "factor": 2},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 500}, {"type": "dynamic", "factor": 2.0}, {"factor": 2.0},
    {"rope_type": "dynamic", "factor": 4, "rope_theta": 500.0}, {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 2, "beta_fast": 8, "beta_slow": 2, "original_max_position_embeddings": 8},
    {"type": "yarn", "factor": 2.0, "mscale": 0.7, "mscale_all_dim": 0.5, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5, "truncate": None},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1},
    {"rope_type": "llama3", "factor": 8, "low_freq_factor": 2, "high_freq_factor": 2, "type": "linear"},
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "partial_rotary_factor": 1.0},
    {"type": "longrope", "short_factor": [1] * 8, "long_factor": [3] * 8, "original_max_position_embeddings": 16},
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0},
    {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    {"rope_type": None, "type": "linear", "factor": 3.0},
    {"rope_type": "proportional", "factor": 2.0}, {"rope_type": "su", "factor": 2.0}, "yarn", ["linear", 2.0], 3, False,
    {"full_attention": {"rope_type": "default", "rope_theta": 500.0}},
    {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
]  # fmt: skip
# Keys of one family that may occur in a file of another.
ADDED: dict[str, list[Any]] = dict(
    attention_bias=[True, False], mlp_bias=[True, False], head_dim=[8, 16, 32], hidden_activation=list(WORDS),
    sliding_window=[4, None], use_sliding_window=[True, False], max_window_layers=[0, 1, 2], layer_types=[None],
    attn_logit_softcapping=[5.0, None], final_logit_softcapping=[5.0, None], query_pre_attn_scalar=[8, 64],
    partial_rotary_factor=[1.0, 0.5], original_max_position_embeddings=[16, 32], max_position_embeddings=[8, 16, 32],
    norm_topk_prob=[True, False, None], rope_interleave=[True, None], rope_interleaved=[True, False],
    use_bidirectional_attention=[True, False], attention_chunk_size=[8, None], rope_local_base_freq=[10, 1000.0],
    temperature=[0.5], unsloth_fixed=[True], hidden_dropout=[0.1], twist=[1, None], tie_word_embeddings=[True, False],
    scale_attn_weights=[False],
    num_experts=[2, 6], num_local_experts=[2, 6], moe_intermediate_size=[24], n_group=[1, 2],
    no_rope_layers=[[1, 1, 0, 1, 1], [1, 1, 2, 0, 1]], use_qk_norm=[True, False], swiglu_limit=[1.0, 3.0],
    num_key_value_heads=[1, 2, 3, 4, None], rope_theta=[500.0, 1], rms_norm_eps=[0.1, 1e-6], rope_scaling=ROPES,
    rope_parameters=ROPES, routed_scaling_factor=[0.5], text_config=[{}, "x"], quantization_config=[{}, "x"],
)  # fmt: skip


MEANT_OTHERWISE = {"architectures", "time_step_min"}  # docs/config.md has transformers' use of the second
SKIPPED = {"mimo_v2_flash"}  # a released form, of which transformers skips keys and takes the released values instead


def mutate(hub: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Returns a copy with one or two keys changed, removed or added."""
    hub = copy.deepcopy(hub)
    for _ in range(1 + (draw.random() < 0.3)):
        if draw.random() < 0.3:
            key = draw.choice(list(ADDED))
            hub[key] = copy.deepcopy(draw.choice(ADDED[key]))
            continue
        seldom = draw.random() < 0.1  # keys that do not affect the model
        key = draw.choice(
            [key for key in hub if is_ignorable(key) == seldom and key not in MEANT_OTHERWISE] or list(hub)
        )
        if draw.random() < 0.15:
            del hub[key]
        else:
            hub[key] = copy.deepcopy(draw.choice(others(key, hub[key], draw)))
    return hub


def others(key: str, value: Any, draw: random.Random) -> list[Any]:
    """Returns values that a key may be changed to: likely ones, and nonsensical ones."""
    if key in ("rope_scaling", "rope_parameters"):
        inner = dict(value or {})
        if inner:
            part = draw.choice(list(inner))
            inner[part] = draw.choice(others(part, inner[part], draw))
        return [inner, *draw.sample(ROPES, 3), None]
    if key == "model_type":
        return [*TYPES, None, 3]
    match value:
        case bool():
            return [not value, None, int(value), "true", 0.5]
        case int():
            near = [value + 1, value - 1, 2 * value, value // 2]
            return [*near, 0, 1, 2, 3, -1, 10**9, 10**30, float(value), value + 0.5, str(value), True, [value], None]
        case float():
            return [2 * value, value / 3, 0, 1, -value, 1e-3, 1e30, 10**400, str(value), [value], True, None]
        case str():
            return [*WORDS, "", 3, None, [value]]
        case list():
            changed = [draw.choice([*value, *KINDS, 0, 1, None]) for _ in value]
            return [value[::-1], value[1:], [*value, *value[:1]], changed, [], "x", None]
    return [0, 1, 4, 0.5, "x", True, [], {}]


class Fuzz:
    """Counts of the outcomes of changed files.

    `found` has the files with other logits or a traceback, and `failed` those with which transformers fails:
    `(checkpoint, config.json, outcome)`.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder, self.count, self.found, self.failed = folder, collections.Counter(), [], []
        self._weights, self._ours, self._refused = {}, {}, {}

    def weights(self, name: str) -> dict[str, Any]:
        """Returns transformers' parameters of a tiny checkpoint, which is written on first use."""
        if name not in self._weights:
            self._weights[name] = make_golden.load(tiny.write(self.folder / name, name)).state_dict()
        return self._weights[name]

    def ours(self, name: str, hub: dict[str, Any]) -> np.ndarray:
        """Returns our logits, computed once for each `Config`, or raises the refusal."""
        (self.folder / name / "config.json").write_text(json.dumps(hub))
        config = zoo.config(self.folder / name)
        if (refusal := self._refused.get((name, config))) is not None:
            raise refusal
        if (name, config) not in self._ours:
            try:
                model = zoo.load(self.folder / name)
            except ValueError as refusal:
                self._refused[name, config] = refusal
                raise
            try:
                with jax.disable_jit():  # step by step: nearly all configurations share the steps, and no program
                    self._ours[name, config] = np.asarray(model.unembed(model.hidden(jnp.asarray(TOKENS))[0]))
            except ValueError as problem:
                raise RuntimeError(f"refused only when it runs: {problem}") from problem
        return self._ours[name, config]

    def theirs(self, name: str, hub: dict[str, Any]) -> np.ndarray:
        """Returns transformers' logits with the same tensors."""
        hub = copy.deepcopy(hub)
        config = transformers.AutoConfig.for_model(hub.pop("model_type"), **hub)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        model.load_state_dict(self.weights(name))
        with torch.no_grad():
            return model.eval()(torch.tensor(TOKENS)).logits.numpy()

    def try_one(self, name: str, hub: dict[str, Any]) -> str:
        """Returns a changed file's outcome: "refused", "equal", "different", "tracebacks", or "transformers fails"."""
        self.weights(name)
        try:
            ours = self.ours(name, hub)
        except (ValueError, OSError) as refusal:
            if "\n" in str(refusal) or str(self.folder) not in str(refusal):
                self.found.append((name, hub, f"no sentence that names the file: {refusal}"))
                return "tracebacks"
            return "refused"
        except Exception as problem:
            self.found.append((name, hub, f"{type(problem).__name__}: {problem}"))
            return "tracebacks"
        try:
            theirs = self.theirs(name, hub)
        except Exception as problem:
            self.failed.append((name, hub, f"transformers: {type(problem).__name__}: {problem}"))
            return "transformers fails"
        if ours.shape != theirs.shape:
            self.found.append((name, hub, f"logits of {ours.shape}, not {theirs.shape}"))
            return "different"
        both = ~(np.isfinite(ours) | np.isfinite(theirs))  # a factor of 1e30 leaves no numbers to compare
        ours, theirs = np.where(both, 0, ours), np.where(both, 0, theirs)
        # One of 40 positions may be ill-conditioned: there two ways to compile one model differ as much. A different
        # meaning shows at many positions.
        errors = np.sort(np.abs(ours - theirs).max(-1)[0] / max(np.abs(theirs).max(), 1e-30))
        if errors[-2] < 1e-4 and errors[-1] < 1e-3:
            return "equal"
        self.found.append((name, hub, f"{errors[-1]} of the largest logit"))
        return "different"

    def run(self, mutations: int, seed: int) -> collections.Counter:
        """Changes `mutations` files. Returns the number of files by outcome."""
        draw, names = random.Random(seed), [name for name in tiny.CONFIGS if name not in SKIPPED]
        for n in range(mutations):
            name = names[n % len(names)]
            self.count[self.try_one(name, mutate(tiny.CONFIGS[name], draw))] += 1
        return self.count


def difference(name: str, hub: dict[str, Any]) -> str:
    """Returns the changes of a file against the checkpoint's."""
    old = tiny.CONFIGS[name]
    gone = [f"without {key}" for key in old.keys() - hub.keys()]
    return ", ".join([*gone, *(f"{k}={v!r}" for k, v in hub.items() if k not in old or repr(old[k]) != repr(v))])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=2000, help="how many changed files to try")
    parser.add_argument("--seed", type=int, default=0, help="other seeds change other things")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        fuzz = Fuzz(pathlib.Path(folder))
        count = fuzz.run(options.mutations, options.seed)
    for name, hub, what in [*fuzz.failed, *fuzz.found]:
        print(f"{name} with {difference(name, hub)}: {what}".split("\n")[0][:1000])
    kinds = ("refused", "equal", "transformers fails", "different", "tracebacks")
    print(f"{options.mutations} mutations:", ", ".join(f"{count[kind]} {kind}" for kind in kinds))
    sys.exit(bool(fuzz.found))
