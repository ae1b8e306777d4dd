"""Compiled calls of a model: tests that call these with equal shapes, best those of TOKENS, share programs."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.zoo import tiny
from zoo import surgery
from zoo.registry import family_of
from zoo.weights import checkpoint


TOKENS = jax.device_put(tiny.TOKENS)
POSITIONS = jax.device_put(np.broadcast_to(np.arange(TOKENS.shape[1]), TOKENS.shape))
SEGMENTS = jax.device_put(np.ones_like(tiny.TOKENS))
STACKS = [module.STACK for module in tiny.MODULES.values()]
# Roundings along the longest chain of a tiny model: three layers with sums of 32, 32, 16, 40, 64, 32, 32 and 48
# numbers, and the head. It is cut a little, to less than the 1e-4 of the largest logit that the project promises.
MODEL = 800
MECHANISMS = (
    "qwen3-window-head",  # windows, and layers before the scan
    "deepseek3",  # latents, shared experts
    "gpt_oss",  # sinks, biases of experts
    "kimi_linear",  # the delta rule with a decay of each channel, beside latents
    "llama4-lists-new",  # chunks, a mixture in some layers
    "gemma3-pattern",  # a period of several layers, norms after blocks
    "mixtral",
    "gpt3",  # learnt positions
    "lfm2-new",  # short convolutions
    "nemotron_h-mlp-new",  # Mamba-2
    "qwen3_next-dense-new",  # the delta rule
)

thorough = lambda *case: pytest.param(*case, marks=pytest.mark.thorough)


def by_mechanism(names, quick=MECHANISMS):
    """Returns cases of checkpoints: those of `quick` in the default tier, and all others in the thorough one."""
    return [name if name in quick else thorough(name) for name in names]


forward = eqx.filter_jit(lambda model, tokens: model(tokens))
init_cache = eqx.filter_jit(lambda model, batch, length: model.init_cache(batch, length, jnp.float32))
decode = eqx.filter_jit(lambda model, tokens, cache, positions: model.decode(tokens, cache, positions=positions))


def packed(model, tokens=TOKENS, segments=SEGMENTS):
    """Returns logits and last features of rows with documents in order, and the routers' reports."""
    return _packed(model, tokens, segments)


@eqx.filter_jit
def _packed(model, tokens, segments):
    x, _, reports = model.hidden(tokens, segments=segments)
    return model.unembed(x), x, reports


def prefill_and_decode(model, tokens):
    """Returns the logits of all tokens but the last from a prefill, and of the last from a step with the cache."""
    last = tokens.shape[1] - 1
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cache = model.init_cache(len(tokens), tokens.shape[1], jnp.float32)
    prefill, cache = model.decode(tokens[:, :last], cache, positions=positions[:, :last])
    logits, _ = model.decode(tokens[:, last:], cache, positions=positions[:, last:])
    return jnp.concatenate([prefill, logits], axis=1)


def error(ours, theirs) -> float:
    """Returns the largest difference, as a fraction of the largest logit."""
    ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def same(ours, theirs) -> bool:
    """Whether two trees of arrays are equal. numpy compares them, because JAX would compile for each shape."""
    (a, one), (b, other) = jax.tree.flatten(ours), jax.tree.flatten(theirs)
    equal = lambda x, y: x.dtype == y.dtype and np.array_equal(np.asarray(x), np.asarray(y))
    return one == other and all(map(equal, a, b))


@functools.cache
def skeleton(config, parts=()):
    """Returns a released model without its numbers. Tracing how these are drawn would take half of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "truncated_normal", lambda key, lower, upper, shape: jnp.zeros(shape))
        return checkpoint.skeleton(family_of(config), config, parts)


def on_host(model):
    """Returns the model with numpy arrays, so that slicing them, to write them into files, compiles nothing."""
    return jax.tree.map(np.asarray, model)


def noise(make, scale=0.4, seed=0):
    """Builds `make()` with normal noise for its numbers (norms: around 1). This compiles nothing, and no default hides
    an error.
    """
    random = np.random.RandomState(seed)

    def fill(path, x):
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        values = ("norm" in surgery.path_name(path)) + scale * random.standard_normal(x.shape)
        return jax.device_put(values.astype(x.dtype))  # jnp.asarray would compile a copy for each shape

    return jax.tree_util.tree_map_with_path(fill, eqx.filter_eval_shape(make))
