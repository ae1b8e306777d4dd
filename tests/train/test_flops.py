"""The operations behind every MFU, against others' published counts for the same models, and against plain counting."""

import dataclasses

import pytest

import zoo
from train.base.flops import flops_per_token, products_of_image, products_per_token
from train.planning.ahead import Pieces, Rows, seen_pairs
from train.state import state
from zoo.registry import family_of
from zoo.weights.checkpoint import skeleton


TOLERANCE = 0.005


@pytest.mark.parametrize(
    ("name", "seq", "teraflops", "tokens"),
    [
        # MaxText on TPU7x: github.com/AI-Hypercomputer/tpu-recipes, training/ironwood/README.md
        ("llama3.1-70b", 8192, 1207, 2687),
        ("llama3.1-70b", 131072, 898, 963),
        ("llama3.1-405b", 8192, 1261, 500),
        ("deepseek-v3", 4096, 607.5, 2426),
        ("qwen3-235b-a22b", 4096, 629.8, 4246),
        # MaxText on v5p: the same repository, training/v5p
        ("llama3.1-405b", 8192, 314.5, 124.6),
        ("llama4-scout", 8192, 225.5, 2070),
        # Megatron-Bridge: github.com/NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary-archive.md
        ("llama3-8b", 8192, 744, 14451),
        ("llama3.1-405b", 8192, 827, 328),
        # NeMo AutoModel: github.com/NVIDIA-NeMo/Automodel, docs/performance-summary.mdx
        ("llama3-70b", 8192, 389, 867),
        ("qwen3-30b-a3b", 4096, 277, 12040),
        ("kimi-k2", 4096, 189, 924),
    ],
)
def test_as_published(name, seq, teraflops, tokens):
    """The count equals published operations per second over tokens per second, of one chip."""
    assert flops_per_token(zoo.config(name), seq) == pytest.approx(teraflops * 1e12 / tokens, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "short", "long"),
    [
        ("llama2-7b", 42.9, 46.1),
        ("llama3-8b", 48.3, 51.5),
        ("llama3-70b", 433, 449),
        ("llama3.1-405b", 2473, 2524),
        ("mixtral-8x7b", 79.7, 82.9),
        ("qwen3-8b", 49.0, 52.7),
        ("qwen3-30b-a3b", 23.1, 27.9),
        ("qwen3-235b-a22b", 148, 167),
        ("deepseek-v3", 250, 281),
    ],
)
def test_by_the_formula(name, short, long):
    """Counts in GFLOP, at 4,096 and 8,192 tokens, equal those worked out by hand from the sizes in the papers."""
    config = zoo.config(name)
    found = [flops_per_token(config, seq) / 1e9 for seq in (4096, 8192)]
    assert found == pytest.approx([short, long], rel=TOLERANCE)


@pytest.mark.parametrize(("name", "giga"), [("gpt-oss-20b", 24.1), ("gpt-oss-120b", 34.4)])
def test_without_windows(name, giga):
    """The published count of gpt-oss treats all of its layers as full attention."""
    config = zoo.config(name)
    full = dataclasses.replace(config, layer_types=("full_attention",) * config.num_hidden_layers)
    assert flops_per_token(full, 4096) / 1e9 == pytest.approx(giga, rel=TOLERANCE)
    assert flops_per_token(config, 4096) < 0.97 * flops_per_token(full, 4096)


def test_chunks():
    """The count equals the pairs that attention multiplies, one by one; a token with itself counts as half of one."""
    config, seq = zoo.config("llama4-scout"), 20_000
    full = dataclasses.replace(config, layer_types=("full_attention",) * config.num_hidden_layers)
    chunked = sum(config.window(n) is not None for n in range(config.num_hidden_layers))
    fewer = sum(n + 0.5 for n in range(seq)) - sum(n % 8192 + 0.5 for n in range(seq))
    saved = products_per_token(full, seq).attention - products_per_token(config, seq).attention
    assert saved == pytest.approx(2 * 40 * 128 * chunked * fewer / seq)


def test_routers_and_shared_experts():
    """All matrices of DeepSeek V3's layers count, but among the 256 experts only the 8 that a token goes to."""
    mla = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    dense, expert, router = 3 * 7168 * 18432, 3 * 7168 * 2048, 7168 * 256
    layers = 61 * mla + 3 * dense + 58 * (router + (1 + 8) * expert)
    assert products_per_token(zoo.config("deepseek-v3"), 4096)[:2] == (layers, 7168 * 129280)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt3-52k", 1.95e-5),
        ("gpt2", 0.1235),
        ("qwen3-30b-a3b", 3.0),
        ("deepseek-v3", 36.6),
        ("gpt-oss-20b", 3.6),
        ("qwen3-next-80b-a3b", 3.6),
    ],
)
def test_flops_of_the_active_parameters(name, billions):
    """A token takes 6 FLOPs for each active parameter, including the head and the experts that the token goes to."""
    assert flops_per_token(zoo.config(name), 1) / 6e9 == pytest.approx(billions, rel=0.03)


def test_flops_through_a_window():
    """The count equals pairs one by one, with 12 operations for each, times heads and their size."""
    full = dataclasses.replace(zoo.config("qwen3-8b"), num_hidden_layers=2, layer_types=())
    half = dataclasses.replace(
        full, use_sliding_window=True, sliding_window=100, layer_types=("full_attention", "sliding_attention")
    )
    pairs = lambda window: sum(min(n + 0.5, window) for n in range(1000)) / 1000
    fewer = pairs(1000) - pairs(100)
    saved = flops_per_token(full, 1000) - flops_per_token(half, 1000)
    assert saved == pytest.approx(12 * 32 * 128 * fewer, rel=0.01)
    wide = dataclasses.replace(half, sliding_window=5000)
    assert flops_per_token(wide, 1000) == flops_per_token(full, 1000)


@pytest.mark.parametrize("name", ["llama3-8b", "qwen3.5-27b"])
def test_attention_sees_half_of_all_pairs(name):
    """The share does not depend on states of a hybrid's other layers, which do not grow with the row."""
    assert seen_pairs(zoo.config(name), Rows(1, 4096, (Pieces(1, 0, 4096),))) == pytest.approx(0.5)


def test_flops_of_what_is_frozen():
    """Frozen weights have no gradients, and nothing is propagated below trained layers. Counts are multiply-adds."""
    config = dataclasses.replace(zoo.config("qwen3-8b"), num_hidden_layers=2, layer_types=())
    model, p = skeleton(family_of(config), config), products_per_token(config, 100)
    counted = lambda *patterns: flops_per_token(config, 100, trained=state.split_frozen(model, patterns)[0]) / 2
    all_of_it = 3 * sum(p)
    assert flops_per_token(config, 100) / 2 == counted("layers.*norm*") == all_of_it
    assert counted("embed_tokens.*", "*norm*") == all_of_it
    assert counted("*.mlp.up_proj.*") == all_of_it - 2 * 4096 * 12288
    assert counted("lm_head.*") == all_of_it - p.head
    assert counted("layers.*") == all_of_it - p.layers  # the embedding's gradients pass through the layers
    assert counted("layers.*", "embed_tokens.*") == sum(p) + 2 * p.head
    assert counted("layers.*", "embed_tokens.*", "norm.*") == sum(p) + p.head
    assert counted("layers.*", "embed_tokens.*", "lm_head.*") == sum(p) + p.head  # through the head, to the last norm


def test_flops_of_a_frozen_embedding_that_is_the_head():
    config = zoo.config("qwen3-0.6b")
    model, p = skeleton(family_of(config), config), products_per_token(config, 100)
    assert config.tie_word_embeddings
    trained, _ = state.split_frozen(model, ["embed_tokens.*"])
    assert flops_per_token(config, 100, trained=trained) / 2 == 3 * sum(p) - p.head
    trained, _ = state.split_frozen(model, ["layers.*", "norm.*"])
    assert flops_per_token(config, 100, trained=trained) / 2 == 3 * sum(p) - p.layers


@pytest.mark.thorough
def test_flops_of_towers():
    """An image counts its patches through the layers, all pairs of them, and its features through what maps them."""
    patches, wide, hidden = 4096, 1152, 2560  # SigLIP's for 896 x 896 pixels, whose patches become 256 tokens
    layers = patches * (3 * 14 * 14 * wide + 27 * (4 * wide**2 + 2 * wide * 4304)) + 256 * wide * hidden
    pairs = 27 * 2 * patches**2 * wide
    gemma = zoo.config("gemma3-4b")
    assert products_of_image(gemma, 0) == (layers, 0, pairs)
    for frozen, times in (False, 6), (True, 2):
        more = flops_per_token(gemma, 4096, frozen=frozen, images=4) - flops_per_token(gemma, 4096, frozen=frozen)
        assert more == pytest.approx(times * 4 * (layers + pairs) / 4096)
    tower, patches = zoo.config("qwen3-vl-4b").vision.tower, 1024
    wide, deep = tower.hidden_size, len(tower.deepstack_visual_indexes)
    layers = patches * (tower.pixels * wide + tower.depth * (4 * wide**2 + 2 * wide * tower.intermediate_size))
    mergers = (1 + deep) * patches // 4 * ((4 * wide) ** 2 + 4 * wide * tower.out_hidden_size)
    pairs = tower.depth * 2 * patches**2 * wide
    found = products_of_image(zoo.config("qwen3-vl-4b"), patches)
    assert found == pytest.approx((layers + mergers, 0, pairs), rel=1e-4)  # coordinates take some more
