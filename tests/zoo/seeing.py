"""Tiny random checkpoints of models that see, with prompts and images for them, beside `tests.zoo.tiny`.

python -m tests.zoo.seeing writes golden_vision.npz: what transformers computes on them.
"""

import json
import pathlib
import string
import tempfile

import numpy as np
import safetensors.numpy
import tokenizers

from tests.zoo import tiny


TEXT = "gemma3-pattern"
CONFIG = dict(
    model_type="gemma3", architectures=["Gemma3ForConditionalGeneration"], boi_token_index=61, eoi_token_index=62,
    image_token_index=63, mm_tokens_per_image=9, eos_token_id=[1, 9], torch_dtype="float32", initializer_range=0.02,
    vision_config=dict(
        model_type="siglip_vision_model", hidden_size=24, intermediate_size=40, num_hidden_layers=3,
        num_attention_heads=2, image_size=12, patch_size=2, num_channels=3, layer_norm_eps=1e-3,
        hidden_act="gelu_pytorch_tanh", attention_dropout=0.0, vision_use_head=False,
    ),
)  # fmt: skip
# A row without an image, one with one, and one with two next to each other but for the tokens around them; an image is
# longer than the window of 4, and one ends the row.
PROMPTS = np.random.RandomState(3).randint(0, 60, (3, 40))
PROMPTS[1, 30:40] = [61] + [63] * 9
PROMPTS[2, 5:27] = ([61] + [63] * 9 + [62]) * 2
PIXELS = np.random.RandomState(4).uniform(-1, 1, (3, 3, 12, 12)).astype(np.float32)  # of each image [3, 12, 12]


def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors beside the text model's, as stored on the Hub: name -> shape."""
    c = CONFIG["vision_config"]
    d, width, patch = c["hidden_size"], c["intermediate_size"], c["patch_size"]
    tower = "vision_tower.vision_model"
    matrices = {f"{tower}.embeddings.patch_embedding.weight": (d, 3, patch, patch)}
    norms = {f"{tower}.post_layernorm.weight": (d,)}
    for n in range(c["num_hidden_layers"]):
        layer = f"{tower}.encoder.layers.{n}"
        matrices |= {f"{layer}.self_attn.{name}_proj.weight": (d, d) for name in ("q", "k", "v", "out")}
        matrices |= {f"{layer}.mlp.fc1.weight": (width, d), f"{layer}.mlp.fc2.weight": (d, width)}
        norms |= {f"{layer}.layer_norm{i}.weight": (d,) for i in (1, 2)}
    with_biases = matrices | norms
    return with_biases | tiny.biases(with_biases) | {
        f"{tower}.embeddings.position_embedding.weight": ((c["image_size"] // patch) ** 2, d),
        "multi_modal_projector.mm_input_projection_weight": (d, tiny.CONFIGS[TEXT]["hidden_size"]),
        "multi_modal_projector.mm_soft_emb_norm.weight": (d,),
    }  # fmt: skip


def write(folder: pathlib.Path, **changes) -> pathlib.Path:
    """The checkpoint, in the layout of the Hub."""
    random = np.random.RandomState(5)
    tensors = {f"language_model.{name}": value for name, value in tiny.tensors(TEXT).items()}
    tensors |= {
        name: tiny.values(name, random.standard_normal(shape)).astype(np.float32)
        for name, shape in sorted(shapes().items())
    }
    beside = ("architectures", "torch_dtype", "eos_token_id", "tie_word_embeddings")
    text = {key: value for key, value in tiny.CONFIGS[TEXT].items() if key not in beside}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | dict(text_config=text) | changes))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def chatty(folder: pathlib.Path) -> pathlib.Path:
    """Adds a tokenizer of 61 characters and Gemma's tokens, a chat template, and the images' size to a checkpoint."""
    vocabulary = {character: i for i, character in enumerate(" " + string.ascii_letters + string.digits[:7] + "\n")}
    special = {"<start_of_image>": 61, "<end_of_image>": 62, "<image_soft_token>": 63}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary | special, merges=[]))
    tokenizer.add_special_tokens(list(special))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% elif m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{% if p.type == 'image' %}<start_of_image>{% else %}{{ p.text }}{% endif %}"
        "{% endfor %}{% endif %}{% endfor %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(chat_template=template)))
    own = dict(size=dict(height=12, width=12), image_seq_length=9, patch_size=2, image_mean=[0.5] * 3)
    (folder / "preprocessor_config.json").write_text(json.dumps(own))
    return folder


def theirs(folder: pathlib.Path, dtype: str = "float32"):
    """transformers' model, with its eager attention."""
    import transformers

    model, info = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


def computed(model) -> dict[str, np.ndarray]:
    """What transformers' model makes of the prompts and images: logits, and features of each image."""
    import torch

    tokens, pixels = torch.tensor(PROMPTS), torch.tensor(PIXELS).to(model.dtype)
    with torch.no_grad():
        logits = model(input_ids=tokens, pixel_values=pixels, token_type_ids=(tokens == 63).long()).logits
        seen = model.model.get_image_features(pixels, return_dict=True)
        result = dict(logits=logits, tower=seen.last_hidden_state, features=seen.pooler_output)
        return {name: value.float().numpy() for name, value in result.items()}


GOLDEN = pathlib.Path(__file__).parent / "golden_vision.npz"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        golden = computed(theirs(write(pathlib.Path(scratch))))
    np.savez_compressed(GOLDEN, **golden)
    for key, array in golden.items():
        print(f"{key:10s} {array.shape}, largest {np.abs(array).max():.2f}")
