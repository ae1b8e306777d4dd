"""Gemma 4, the text models: with K = V, with experts, and with embeddings for each layer and shared keys and values."""

import string
from typing import Any

import numpy as np
import PIL.Image

from tests.zoo.seeing import Chat, Checkpoint, add_chat, ask, image, template, text
from tests.zoo.tiny import COMMON, attention, biases, filled, mlp


SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA4 = {
    k: v for k, v in COMMON.items() if k not in ("tie_word_embeddings", "hidden_act", "rope_theta", "head_dim")
} | dict(
    model_type="gemma4_text", architectures=["Gemma4ForCausalLM"], rms_norm_eps=1e-6, attention_bias=False,
    hidden_activation="gelu_pytorch_tanh", sliding_window=4, head_dim=8, global_head_dim=16, pad_token_id=0,
    rope_parameters={
        SLIDING: dict(rope_type="default", rope_theta=100.0),
        FULL: dict(rope_type="proportional", rope_theta=5000.0, partial_rotary_factor=0.25),
    },
    vocab_size_per_layer_input=64, hidden_size_per_layer_input=0,
)  # fmt: skip
LARGE = GEMMA4 | dict(
    attention_k_eq_v=True, num_global_key_value_heads=1, final_logit_softcapping=30.0,
    use_bidirectional_attention="vision",
)  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "gemma4": LARGE
    | dict(
        layer_types=[SLIDING, FULL] * 2, num_hidden_layers=4, enable_moe_block=True, num_experts=4, top_k_experts=2,
        moe_intermediate_size=24,
    ),
    # Values that are all keys' own; no tied head, and no cap on logits; rows of keys with biases.
    "gemma4-dense": LARGE
    | dict(
        layer_types=[SLIDING, FULL], num_hidden_layers=2, num_key_value_heads=4, num_global_key_value_heads=None,
        tie_word_embeddings=False, attention_bias=True, final_logit_softcapping=None,
    ),
    "gemma4-shared": GEMMA4
    | dict(
        layer_types=[SLIDING, FULL] * 2, num_hidden_layers=4, num_kv_shared_layers=2,
        hidden_size_per_layer_input=16, use_double_wide_mlp=True, num_key_value_heads=1, final_logit_softcapping=20.0,
        rms_norm_eps=0.01,
    ),
    # All at once: embeddings for each layer, K = V, keys of the second full layer alone that later layers read, and two
    # of these that repeat.
    "gemma4-untied": LARGE
    | dict(
        layer_types=[FULL, SLIDING, FULL, SLIDING, SLIDING, FULL], num_hidden_layers=6, num_kv_shared_layers=3,
        num_global_key_value_heads=None, hidden_size_per_layer_input=8, tie_word_embeddings=False, attention_bias=True,
        final_logit_softcapping=None, rms_norm_eps=0.01, use_bidirectional_attention=None,
    ),
}  # fmt: skip
STACK = "gemma4-shared"
PARAMETERS = {  # of the text models, each with a number for each layer (`layer_scalar`)
    "gemma4-e2b": 4_628_569_344 + 35, "gemma4-e4b": 7_463_013_376 + 42, "gemma4-12b": 11_907_350_272 + 48,
    "gemma4-26b": 25_233_141_760 + 30, "gemma4-31b": 30_697_345_280 + 60,
}  # fmt: skip
NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
MOE_NORMS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, as stored on the Hub by the text-only models."""
    d, layers, dim = config["hidden_size"], config["num_hidden_layers"], config["hidden_size_per_layer_input"]
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], d),
        "model.norm.weight": (d,),
    }
    if not config.get("tie_word_embeddings", True):
        out["lm_head.weight"] = out["model.embed_tokens.weight"]
    if dim:
        out["model.embed_tokens_per_layer.weight"] = (config["vocab_size_per_layer_input"], layers * dim)
        out["model.per_layer_model_projection.weight"] = (layers * dim, d)
        out["model.per_layer_projection_norm.weight"] = (dim,)
    shared = layers - config.get("num_kv_shared_layers", 0)
    for n, kind in enumerate(config["layer_types"]):
        layer, head, k_is_v = f"model.layers.{n}", config["head_dim"], False
        kv = config["num_key_value_heads"]
        if kind == FULL:
            head, k_is_v = config["global_head_dim"], config.get("attention_k_eq_v", False)
            kv = (k_is_v and config["num_global_key_value_heads"]) or kv
        own = attention(config | dict(head_dim=head, num_key_value_heads=kv), layer)
        own |= {f"{layer}.self_attn.{norm}.weight": (head,) for norm in ("q_norm", "k_norm")}
        drop = ("k_proj", "v_proj", "k_norm") if n >= shared else ("v_proj",) if k_is_v else ()
        out |= {name: shape for name, shape in own.items() if name.split(".")[4] not in drop}
        wide = 2 if n >= shared and config.get("use_double_wide_mlp") else 1
        out |= mlp(f"{layer}.mlp", wide * config["intermediate_size"], d) | {f"{layer}.layer_scalar": (1,)}
        out |= {f"{layer}.{norm}.weight": (d,) for norm in NORMS}
        if config.get("enable_moe_block"):
            experts, width = config["num_experts"], config["moe_intermediate_size"]
            out |= {f"{layer}.{norm}.weight": (d,) for norm in MOE_NORMS}
            out |= {f"{layer}.router.proj.weight": (experts, d), f"{layer}.router.scale": (d,)}
            out |= {f"{layer}.router.per_expert_scale": (experts,)}
            out |= {f"{layer}.experts.gate_up_proj": (experts, 2 * width, d)}
            out |= {f"{layer}.experts.down_proj": (experts, d, width)}
        if dim:
            out |= {f"{layer}.per_layer_input_gate.weight": (dim, d), f"{layer}.per_layer_projection.weight": (d, dim)}
            out |= {f"{layer}.post_per_layer_input_norm.weight": (d,)}
    return out


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns the values of a tensor, made of normal noise. Products of queries and keys are not scaled: norms are."""
    if "layer_scalar" in name or "scale" in name:
        return 1 + 0.2 * noise
    if "q_norm" in name or "k_norm" in name:
        return 0.6 + 0.2 * noise
    return 1 + 0.3 * noise if "norm" in name else 0.4 * noise


def vision_parameters(config: dict[str, Any]) -> int:
    """Returns the number of parameters beside the text model's. `layer_scalar` is none in the recorded counts."""
    if "vision_config" not in config:
        return 0
    text, c, audio = config["text_config"], config["vision_config"], config["audio_config"]
    hidden = text["hidden_size"]
    if config["model_type"] == "gemma4_unified":
        patch, d = 3 * c["model_patch_size"] ** 2, c["mm_embed_dim"]
        vision = 2 * patch + d * patch + d + 2 * d + 2 * d + c["mm_posemb_size"] * 2 * d + hidden * d
        return vision + hidden * audio["audio_embed_dim"] - text["num_hidden_layers"]
    d, width, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    layer = 4 * d * d + 3 * d * width + 4 * d + 2 * head
    table = 2 * c["position_embedding_size"] * d + 3 * c["patch_size"] ** 2 * d
    vision = c["num_hidden_layers"] * layer + table + hidden * d
    tower = 304_824_608 + hidden * audio["output_proj_dims"] if audio else 0  # of sound, as recorded
    return vision + tower - text["num_hidden_layers"]


# ======================================================================================================================
# Gemma 4 with its towers, of clipped linear maps (E2B), standardized (26B-A4B), and without a transformer (12B).
# Images keep their shape. In the last two their tokens see each other both ways, in local layers alone.
# ======================================================================================================================

BESIDE = ("architectures", "torch_dtype", "tie_word_embeddings")
START, END, IMAGE = 61, 62, 63
TOWER = dict(
    attention_bias=False, attention_dropout=0.0, default_output_length=8, global_head_dim=8, head_dim=8,
    hidden_activation="gelu_pytorch_tanh", hidden_size=16, intermediate_size=40, max_position_embeddings=131072,
    model_type="gemma4_vision", num_attention_heads=2, num_hidden_layers=2, num_key_value_heads=2, patch_size=2,
    pooling_kernel_size=2, position_embedding_size=16, rms_norm_eps=1e-6, standardize=False,
    rope_parameters=dict(rope_theta=100.0, rope_type="default"), use_clipped_linears=False,
)  # fmt: skip
EMBEDDER = dict(
    mm_embed_dim=16, mm_posemb_size=8, model_patch_size=4, model_type="gemma4_unified_vision", num_soft_tokens=8,
    output_proj_dims=16, patch_size=2, pooling_kernel_size=2, rms_norm_eps=1e-6,
)  # fmt: skip
IDS = dict(boi_token_id=START, eoi_token_id=END, image_token_id=IMAGE, video_token_id=60, initializer_range=0.02)
GRIDS = np.array([[4, 6], [8, 4], [2, 14]])  # rows and columns of patches; squares of them are tokens
ROOM = 32
# A row without an image, a row that ends with one, and a row with two. Images are longer than the window of 4.
PROMPTS = np.random.RandomState(3).randint(1, 60, (3, 32))
PROMPTS[1, 25:] = [START] + [IMAGE] * 6
PROMPTS[2, 2:21] = [START] + [IMAGE] * 8 + [END, START] + [IMAGE] * 7 + [END]
LEVELS = [np.random.RandomState(n).randint(0, 256, (*2 * grid, 3)).astype(np.uint8) for n, grid in enumerate(GRIDS)]
PIXELS = [(levels / 255).astype(np.float32) for levels in LEVELS]  # [height, width, 3]


def by_square(pixels: np.ndarray) -> np.ndarray:
    """Cuts a picture into patches of 2 x 2 pixels, four of which follow each other and are a square."""
    height, width, _ = pixels.shape
    cut = pixels.reshape(height // 4, 2, 2, width // 4, 2, 2, 3)  # square, patch, pixel
    return cut.transpose(0, 3, 1, 4, 2, 5, 6).reshape(-1, 12)


def in_rows(pixels: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts a picture into patches of `side` pixels a side, row by row. Returns them and their (column, row)."""
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    cut = pixels.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(rows * columns, -1)
    return cut, np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), axis=-1).reshape(-1, 2)


class Gemma4(Checkpoint):
    prompts, ids = PROMPTS, (IMAGE,)
    pictures, grids, room = [by_square(pixels) for pixels in PIXELS], GRIDS, ROOM
    packed = ((2, 0, 22, 1), (1, 22, 32, 2)), ((0, 0, 20, 1), (0, 20, 32, 0)), ((0, 0, 12, 1), (0, 12, 32, 2))
    lengths, steps = (17, 32, 22), 10
    inward = ("o_proj.linear", "down_proj.linear")
    fixed = ("layer_scalar", "std_bias", "std_scale", "put_min", "put_max")
    refused = (
        (dict(hidden_activation="gelu"), "vision_config says hidden_activation='gelu', but only 'gelu_pytorch_tanh'"),
        (dict(sliding_window=8), r"vision_config has the key 'sliding_window' \(= 8\), which is not known here"),
        (dict(num_key_value_heads=1), "num_key_value_heads=1, and needs num_attention_heads=2 of them"),
        (dict(head_dim=6), r"with a head_dim that is a multiple of 4 \(6\)"),
        (dict(rope_parameters=dict(rope_theta=1e4, rope_type="yarn")), "rope_type needs"),
    )
    text_names = ("gemma4_text", "Gemma4ForCausalLM")
    renamed = (  # as transformers' text model is nested in older conversions
        {
            "model.language_model.": "model.",
            "model.vision_tower.": "vision_tower.",
            "model.embed_vision.": "embed_vision.",
        },
    )

    def __init__(self, name, *, parameters, dim=0, **changes):
        """Uses two layers of a text model of tests/zoo/tiny, without experts, with embeddings for each layer of `dim`
        features, and a tower with these changes.
        """
        self.name, self.parameters, self.tower = name, parameters, TOWER | changes
        fewer = dict(layer_types=[SLIDING, FULL], num_hidden_layers=2, num_kv_shared_layers=0, enable_moe_block=False)
        self.text = CONFIGS[name] | fewer | dict(hidden_size_per_layer_input=dim, rms_norm_eps=0.01)

    def config(self):
        text = {key: value for key, value in self.text.items() if key not in BESIDE}
        names = dict(architectures=["Gemma4ForConditionalGeneration"], model_type="gemma4")
        own = dict(text_config=text, vision_config=self.tower, vision_soft_tokens_per_image=8)
        tied = self.text.get("tie_word_embeddings", True)
        return IDS | names | own | dict(torch_dtype="float32", tie_word_embeddings=tied)

    def tower_shapes(self):
        c, tower = self.tower, "model.vision_tower"
        d, width, patch = c["hidden_size"], c["intermediate_size"], 3 * c["patch_size"] ** 2
        heads = c["num_attention_heads"] * c["head_dim"]
        out = {f"{tower}.patch_embedder.input_proj.weight": (d, patch)}
        out[f"{tower}.patch_embedder.position_embedding_table"] = (2, c["position_embedding_size"], d)
        if c["standardize"]:
            out |= {f"{tower}.std_bias": (d,), f"{tower}.std_scale": (d,)}
        for n in range(c["num_hidden_layers"]):
            layer = f"{tower}.encoder.layers.{n}"
            linears = {f"{layer}.self_attn.{name}_proj": (heads, d) for name in "qkv"}
            linears |= {f"{layer}.self_attn.o_proj": (d, heads)}
            linears |= {f"{layer}.mlp.{name}_proj": (width, d) for name in ("gate", "up")}
            linears |= {f"{layer}.mlp.down_proj": (d, width)}
            out |= {f"{name}.linear.weight": shape for name, shape in linears.items()}
            if c["use_clipped_linears"]:
                bounds = ("input_min", "input_max", "output_min", "output_max")
                out |= {f"{name}.{bound}": () for name in linears for bound in bounds}
            out |= {f"{layer}.{norm}.weight": (d,) for norm in NORMS}
            out |= {f"{layer}.self_attn.{norm}.weight": (c["head_dim"],) for norm in ("q_norm", "k_norm")}
        return out | {"model.embed_vision.embedding_projection.weight": (self.text["hidden_size"], d)}

    def tensors(self):
        of_text = filled(shapes(self.text), np.random.RandomState(1), values)
        of_text = {name.replace("model.", "model.language_model.", 1): x for name, x in of_text.items()}

        def vision_values(name, noise):
            if name.endswith(("put_min", "put_max")):  # so that some numbers are clipped
                return np.where(name.endswith("max"), 1, -1) * (1.5 + 0.1 * abs(noise))
            if "std_" in name:
                return 1 + 0.3 * noise
            return values(name, noise)

        return of_text | filled(self.tower_shapes(), np.random.RandomState(5), vision_values)

    def add_chat(self, folder):
        own = dict(
            do_convert_rgb=True, do_normalize=False, do_rescale=True, do_resize=True, image_mean=[0.0] * 3,
            image_std=[1.0] * 3, image_processor_type="Gemma4ImageProcessor", image_seq_length=8, max_soft_tokens=8,
            patch_size=2, pooling_kernel_size=2, resample=3, rescale_factor=1 / 255,
        )  # fmt: skip
        special = {"<|image>": START, "<image|>": END, "<|image|>": IMAGE}
        files = dict(processor_config=dict(image_processor=own, audio_seq_length=750, audio_ms_per_token=40))
        add_chat(folder, string.ascii_letters + string.digits[:8], special, template("<|image|>"), **files)

    def chats(self, folder, tokenizer):
        """Returns the third prompt with its pictures."""
        prompt = PROMPTS[2].tolist()
        shown = [image(PIL.Image.fromarray(levels)) for levels in LEVELS[1:]]
        messages = ask(text(tokenizer.decode(prompt[:2])), *shown, text(tokenizer.decode(prompt[21:])))
        return [Chat(messages, prompt, self.pictures[1:], GRIDS[1:], room=32, within=1e-6)]

    def features(self, model, images):
        return dict(features=model.vision(images.patches, images.grids))

    def given(self, side=2, room=ROOM):
        pixels, where = np.zeros((3, room, 3 * side**2), np.float32), np.full((3, room, 2), -1)
        for canvas, place, one in zip(pixels, where, PIXELS, strict=True):
            cut, at = in_rows(one, side)
            canvas[: len(cut)], place[: len(cut)] = cut, at
        of_images = (PROMPTS == IMAGE).astype(int)
        return dict(pixel_values=pixels, image_position_ids=where, mm_token_type_ids=of_images)

    def their_features(self, model, given):
        import torch

        own = {key: given[key] for key in ("pixel_values", "image_position_ids")}
        return dict(features=torch.cat(model.model.get_image_features(**own, return_dict=True).pooler_output))


class Unified(Gemma4):
    """12B, which has no tower."""

    inward = ()
    refused = ((dict(output_proj_dims=8), "output_proj_dims=8 and model_patch_size=4, and needs mm_embed_dim=16"),)

    def config(self):
        hub = super().config()
        del hub["vision_soft_tokens_per_image"]
        names = dict(architectures=["Gemma4UnifiedForConditionalGeneration"], model_type="gemma4_unified")
        text = hub["text_config"] | dict(model_type="gemma4_unified_text")
        return hub | names | dict(text_config=text, vision_config=EMBEDDER)

    def tower_shapes(self):
        d, pixels, embedder = EMBEDDER["mm_embed_dim"], 3 * EMBEDDER["model_patch_size"] ** 2, "model.vision_embedder"
        matrices = {f"{embedder}.patch_dense.weight": (d, pixels)}
        norms = {f"{embedder}.patch_ln1.weight": (pixels,)}
        norms |= {f"{embedder}.{name}.weight": (d,) for name in ("patch_ln2", "pos_norm")}
        own = {f"{embedder}.pos_embedding": (EMBEDDER["mm_posemb_size"], 2, d)}
        own["model.embed_vision.embedding_projection.weight"] = (self.text["hidden_size"], d)
        return matrices | norms | biases(matrices | norms) | own

    def logits(self, model):
        """Gives transformers' forward the masks of its `generate`; by itself it lets global layers see both ways."""
        import torch

        tokens, given = torch.tensor(PROMPTS), self._given(model)
        masks = model.create_masks_for_generate(
            config=model.config, inputs_embeds=model.get_input_embeddings()(tokens), attention_mask=None, cache=None,
            position_ids=torch.arange(tokens.shape[1])[None], mm_token_type_ids=given["mm_token_type_ids"],
        )  # fmt: skip
        return model(input_ids=tokens, attention_mask=masks, **given).logits

    def tensor_name(self, parameter):
        parameter = parameter.replace("multimodal_embedder.embedding_projection", "embedding_projection")
        own = ("model.embed_vision.patch_", "model.embed_vision.pos_")
        return parameter.replace("embed_vision", "vision_embedder") if parameter.startswith(own) else parameter

    def given(self):
        return super().given(side=4, room=8)


SEEING = [
    Gemma4(  # with all features at once, which no released model has
        "gemma4", standardize=True, use_clipped_linears=True, dim=8,
        parameters={  # each with std_bias and std_scale
            "gemma4-26b": 25_805_933_872 + 30 + 2 * 1152, "gemma4-31b": 31_273_086_512 + 60 + 2 * 1152,
        },
    ),
    Gemma4(
        "gemma4-shared", use_clipped_linears=True, dim=16,
        parameters={  # without sound; with the bounds of 7 linear maps in each of 16 layers
            "gemma4-e2b": 4_628_569_344 + 35 + 167_364_608 + 1_179_648 + 16 * 7 * 4,
            "gemma4-e4b": 7_463_013_376 + 42 + 167_364_608 + 1_966_080 + 16 * 7 * 4,
        },
    ),
    Unified("gemma4-dense", parameters={"gemma4-12b": 11_907_350_272 + 48 + 49_922_304}),
]  # fmt: skip
