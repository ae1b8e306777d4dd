"""Llama 4 with its tower, which takes tiles of one shape: an image is one tile, or several and one of the whole."""

import string

import numpy as np
import PIL.Image

from tests.zoo import tiny
from tests.zoo.seeing import Chat, Checkpoint, add_chat, ask, filled, first_layers, image, patches, template, text
from zoo.vision.processors.llama4 import Llama4 as Processor


TOWER = dict(
    model_type="llama4_vision_model", hidden_size=24, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=2, num_channels=3, image_size=12, patch_size=2, pixel_shuffle_ratio=0.5,
    projector_input_dim=40, projector_output_dim=40, vision_output_dim=40, rope_theta=100.0, norm_eps=1e-5,
    hidden_act="gelu", attention_dropout=0.0, projector_dropout=0.0, multi_modal_projector_bias=False,
    vision_feature_layer=-1, vision_feature_select_strategy="default", initializer_range=0.02,
)  # fmt: skip
CONFIG = dict(
    model_type="llama4", architectures=["Llama4ForConditionalGeneration"], boi_token_index=57, eoi_token_index=62,
    image_token_index=61, torch_dtype="float32", vision_config=TOWER,
)  # fmt: skip
START, NEXT, NEW_ROW, WHOLE, PATCH, END = range(57, 63)
SPECIAL = ("image_start", "tile_x_separator", "tile_y_separator", "image", "patch", "image_end")
TILE = [PATCH] * 9
# A row without an image; a row with a small image, whose tile ends the row; and a row with an image of two tiles next
# to each other, and a third one of the whole. A tile is longer than the attention's chunk of 8.
PROMPTS = np.random.RandomState(3).randint(0, 57, (3, 40))
PROMPTS[1, 29:40] = [START, WHOLE, *TILE]
PROMPTS[2, 4:36] = [START, *TILE, NEXT, *TILE, NEW_ROW, WHOLE, *TILE, END]
PIXELS = np.random.RandomState(4).uniform(-1, 1, (4, 3, 12, 12)).astype(np.float32)  # each tile is [3, 12, 12]
PARAMETERS = {"llama4-scout": 108_641_793_536, "llama4-maverick": 401_583_781_376}


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns values that make features about as large as embeddings, so that the layers' additions to them show."""
    return tiny.values(name, noise) * (0.4 if "adapter" in name or "projector" in name else 1)


class Llama4(Checkpoint):
    prompts, ids = PROMPTS, (PATCH,)
    pictures, grids, room = patches(PIXELS), np.full((4, 2), 6), 36
    # Three documents, of which two have a tile; text with padding; text.
    packed = (
        ((2, 0, 14, 1), (1, 29, 40, 2), (0, 0, 15, 3)),
        ((0, 0, 30, 1), (0, 30, 40, 0)),
        ((0, 0, 20, 1), (0, 20, 40, 2)),
    )
    lengths, steps = (37, 40, 36), 4
    restated = ("text_config.no_rope_layers",)
    text_names = ("llama4_text", "Llama4ForCausalLM")
    inward = ("o_proj", "fc2")
    refused = (
        (dict(hidden_act="silu"), "vision_config says hidden_act='silu', but only 'gelu' is implemented"),
        (dict(norm_eps=1e-6), "vision_config says norm_eps=1e-06, but only 1e-05 is implemented"),
        (dict(cls_token=True), r"vision_config has the key 'cls_token' \(= True\), which is not known here"),
        (dict(rope_parameters=dict(rope_type="yarn")), "vision_config has the key 'rope_parameters'"),
        (dict(hidden_size=20), r"hidden_size=20, which is no multiple of 4 \* num_attention_heads=2"),
        (dict(patch_size=5), "image_size=12, which is no multiple of patch_size=5"),
        (dict(pixel_shuffle_ratio=0.25), "pixel_shuffle_ratio=0.25, which is not one over a divisor of the 6 patches"),
        (dict(intermediate_size=48), "intermediate_size=48, but its adapter reads 96 features: those of 4 patches"),
        (dict(vision_output_dim=41), r"vision_output_dim \(40, 40, 41\), which must be equal"),
    )
    parameters = PARAMETERS

    def __init__(self, name: str, layers: int | None = None):
        """Uses this text model of tests/zoo/tiny, or its first layers."""
        self.name, self.layers = name, layers or tiny.CONFIGS[name]["num_hidden_layers"]

    def config(self):
        text = {key: value for key, value in tiny.CONFIGS[self.name].items() if key != "architectures"}
        return CONFIG | dict(text_config=text | dict(num_hidden_layers=self.layers))

    def tensors(self):
        shapes = tiny.MODULES["llama4"].vision_shapes(self.config())
        return first_layers(self.name, self.layers) | filled(shapes, np.random.RandomState(5), values)

    def add_chat(self, folder):
        own = dict(size=dict(height=12, width=12), patch_size=2, max_patches=4)
        special = {f"<|{name}|>": id for id, name in enumerate(SPECIAL, START)}
        add_chat(folder, " " + string.ascii_letters, special, template("<|image|>"), preprocessor_config=own)

    def chats(self, folder, tokenizer):
        """Returns a chat with an image of two tiles, and one of a single tile, as in the prompts."""
        wide, small = (PIL.Image.effect_noise(size, 90).convert("RGB") for size in ((24, 12), (12, 12)))
        ids = [*tokenizer.encode("see"), *PROMPTS[2, 4:36].tolist(), *PROMPTS[1, 29:].tolist(), END]
        whole = wide.resize((12, 12), PIL.Image.Resampling.BILINEAR)
        tiles = [wide.crop((0, 0, 12, 12)), wide.crop((12, 0, 24, 12)), whole, small]
        normalize = Processor.read(folder).normalize
        pictures = patches(np.stack([normalize(np.asarray(tile)) for tile in tiles]).transpose(0, 3, 1, 2))
        return [Chat(ask(text("see"), image(wide), image(small)), ids, pictures, np.full((4, 2), 6), room=36)]

    def features(self, model, images):
        tower, features = model.vision.tower(images.patches), model.vision(images.patches, images.grids)
        return dict(tower=tower, features=features)

    def given(self):
        return dict(pixel_values=PIXELS)

    def their_features(self, model, given):
        tower = model.get_image_features(given["pixel_values"], return_dict=True).last_hidden_state
        return dict(tower=tower, features=model.multi_modal_projector(tower))


CHECKPOINTS = [Llama4("llama4", layers=4)]
