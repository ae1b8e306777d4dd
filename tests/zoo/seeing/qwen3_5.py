"""Qwen3.5 with its tower, which is Qwen3-VL's without DeepStack, above a hybrid text model."""

from tests.zoo.seeing.qwen3_vl import Qwen3VL


PARAMETERS = {  # without the MTP module
    "qwen3.5-0.8b": 852_985_920, "qwen3.5-2b": 2_213_241_664, "qwen3.5-4b": 4_539_265_536,
    "qwen3.5-9b": 9_409_813_744, "qwen3.5-27b": 27_356_728_560, "qwen3.5-35b-a3b": 35_107_181_936,
    "qwen3.5-122b-a10b": 122_562_817_776, "qwen3.5-397b-a17b": 396_802_360_816, "qwen3.6-27b": 27_356_728_560,
    "qwen3.6-35b-a3b": 35_107_181_936, "qwen3.8-27b": 27_356_728_560,
}  # fmt: skip
CHECKPOINTS = [
    Qwen3VL(
        "qwen3_5", architecture="Qwen3_5ForConditionalGeneration", text_names=("qwen3_5_text", "Qwen3_5ForCausalLM"),
        deep=[], restated=("rope_parameters", "partial_rotary_factor"), parameters=PARAMETERS,
        layer_types=["linear_attention", "full_attention"] * 2, num_hidden_layers=4,
    )
]  # fmt: skip
