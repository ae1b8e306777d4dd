"""Mistral Small 3, Ministral 3 and Devstral Small 2: their text models, whose tensors are Mistral's."""

from typing import Any

from tests.zoo.tiny import mistral


CONFIGS: dict[str, dict[str, Any]] = {
    "ministral3": {k: v for k, v in mistral.MISTRAL.items() if k != "rope_theta"}
    | dict(
        model_type="ministral3", architectures=["Ministral3ForCausalLM"], sliding_window=None, head_dim=12,
        rope_parameters=dict(
            rope_type="yarn", type="yarn", rope_theta=5000.0, factor=4.0, original_max_position_embeddings=8,
            beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5,
        ),
    ),
}  # fmt: skip
STACK = "ministral3"
PARAMETERS = {
    "mistral-small-3.1-24b": 23_572_403_200, "mistral-small-3.2-24b": 23_572_403_200,
    "ministral3-3b": 3_429_006_336, "ministral3-8b": 8_489_553_920, "ministral3-14b": 13_506_073_600,
    "devstral-small-2-24b": 23_572_403_200,
}  # fmt: skip
shapes, values = mistral.shapes, mistral.values


def vision_parameters(config: dict[str, Any]) -> int:
    """Returns the number of parameters beside the text model: Pixtral's tower, and the projection of its output."""
    if "vision_config" not in config:
        return 0
    c, embed = config["vision_config"], config["text_config"]["hidden_size"]
    d, width = c["hidden_size"], c["intermediate_size"]
    tower = (
        c["num_channels"] * c["patch_size"] ** 2 * d + d + c["num_hidden_layers"] * (4 * d * d + 3 * d * width + 2 * d)
    )
    return tower + d + config["spatial_merge_size"] ** 2 * d * d + d * embed + embed * embed
