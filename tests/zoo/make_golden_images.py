"""Writes golden/images.json: the outputs of transformers' processors for drawn pictures, with and without pan and scan.

python -m tests.zoo.make_golden_images

transformers needs torchvision for Llama 4, Muse Glimmer, videos and Pixtral's text; without it these entries stay as
they are.
"""

import functools
import json
import pathlib
import re
import types

import numpy as np


GOLDEN = pathlib.Path(__file__).parent / "golden" / "images.json"

# preprocessor_config.json as released (for Qwen2-VL the older form), and the remaining keys of processor_config.json.
HALF = dict(image_mean=[0.5, 0.5, 0.5], image_std=[0.5, 0.5, 0.5])
CLIP = dict(image_mean=[0.48145466, 0.4578275, 0.40821073], image_std=[0.26862954, 0.26130258, 0.27577711])
STEPS = dict(do_resize=True, do_rescale=True, do_normalize=True, rescale_factor=0.00392156862745098)
NULLS = dict(crop_size=None, device=None, do_center_crop=None, input_data_format=None, return_tensors=None)
GEMMA3 = dict(
    **HALF, **STEPS, do_convert_rgb=None, do_pan_and_scan=None, image_processor_type="Gemma3ImageProcessor",
    image_seq_length=256, pan_and_scan_max_num_crops=None, pan_and_scan_min_crop_size=None,
    pan_and_scan_min_ratio_to_activate=None, processor_class="Gemma3Processor", resample=2,
    size={"height": 896, "width": 896},
)  # fmt: skip
SCAN = dict(
    do_pan_and_scan=True, pan_and_scan_max_num_crops=4, pan_and_scan_min_crop_size=64,
    pan_and_scan_min_ratio_to_activate=1.2, size={"height": 224, "width": 224},
)  # fmt: skip
QWEN = dict(merge_size=2, temporal_patch_size=2, image_processor_type="Qwen2VLImageProcessorFast")
FILES = {
    "gemma3": (GEMMA3, dict(image_seq_length=256, processor_class="Gemma3Processor")),
    "gemma3-scan": (GEMMA3 | SCAN, {}),
    "qwen2-vl": (dict(**CLIP, **QWEN, min_pixels=3136, max_pixels=200704, patch_size=14), {}),
    "qwen3-vl": (dict(**HALF, **QWEN, size={"longest_edge": 16777216, "shortest_edge": 65536}, patch_size=16), {}),
    "qwen3-vl-video": (
        dict(**HALF, merge_size=2, temporal_patch_size=2, patch_size=16, video_processor_type="Qwen3VLVideoProcessor",
             size={"longest_edge": 131072, "shortest_edge": 4096}),
        {},
    ),
    "llama4": (
        dict(**HALF, **STEPS, **NULLS, data_format="channels_first", default_to_square=True, do_convert_rgb=True,
             image_processor_type="Llama4ImageProcessorFast", max_patches=16, processor_class="Llama4Processor",
             resample=2, resize_to_max_canvas=False, size={"height": 336, "width": 336}),
        dict(fake_image_token="<|image|>", image_token="<|image|>", patch_size=14, pixel_shuffle_ratio=0.5),
    ),
    "pixtral": (
        dict(**CLIP, **STEPS, **NULLS, data_format="channels_first", default_to_square=True, do_convert_rgb=True,
             image_processor_type="PixtralImageProcessorFast", patch_size={"height": 14, "width": 14}, resample=3,
             processor_class="PixtralProcessor", size={"longest_edge": 1540}),
        dict(image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]", image_token="[IMG]", patch_size=14,
             processor_class="PixtralProcessor", spatial_merge_size=2),
    ),
    "muse_glimmer": (  # transformers' defaults, since the released file was not seen; but fewer tokens
        dict(**HALF, **STEPS, do_convert_rgb=True, image_processor_type="MuseGlimmerImageProcessor", resample=1,
             max_image_tokens=1024, merge_size=2, patch_size=14, processor_class="MuseGlimmerProcessor",
             temporal_patch_size=2),
        dict(processor_class="MuseGlimmerProcessor"),
    ),
    "gemma4": (
        dict(do_convert_rgb=True, do_normalize=False, do_rescale=True, do_resize=True, image_mean=[0.0] * 3,
             image_std=[1.0] * 3, image_processor_type="Gemma4ImageProcessor", image_seq_length=280,
             max_soft_tokens=280, patch_size=16, pooling_kernel_size=3, resample=3, rescale_factor=1 / 255),
        dict(audio_ms_per_token=40, audio_seq_length=750, image_seq_length=280, processor_class="Gemma4Processor"),
    ),
}  # fmt: skip
SIZES = {"small": (37, 53), "wide": (199, 611), "tall": (701, 233), "large": (997, 1603), "thin": (11, 400)}
SECONDS = [0.0, 0.5, 1.0, 1.5, 2.0]  # times of a video's frames, an odd number


@functools.cache
def picture(name: str) -> np.ndarray:
    """Returns a picture of one of SIZES, [height, width, 3]: ramps, blocks and noise, equal everywhere as integers."""
    height, width = SIZES[name]
    random = np.random.default_rng(len(name) * height)
    y, x = np.ogrid[:height, :width]
    ramps = np.stack(np.broadcast_arrays(x * 255 // width, y * 255 // height, (x * y) % 251), -1)
    blocks = random.integers(0, 256, (height // 9 + 1, width // 9 + 1, 3)).repeat(9, 0).repeat(9, 1)[:height, :width]
    return ((ramps + 2 * blocks + random.integers(0, 32, (height, width, 3))) // 4).clip(0, 255).astype(np.uint8)


def video() -> list[np.ndarray]:
    return [np.roll(picture("wide"), 40 * n, axis=1) for n in range(len(SECONDS))]


def short(text: str) -> str:
    """Returns a text with counts in place of repeated tokens."""
    return re.sub(r"(<[^<>]*>|\[[A-Z]+\])\1+", lambda m: f"{len(m[0]) // len(m[1])} x {m[1]}", text)


def summary(patches: np.ndarray, grids, text: str) -> dict:
    """Returns numbers that change if a patch or a channel is in a wrong place."""
    numbers = patches.astype(np.float64).ravel()
    weighted = numbers * np.cos(np.arange(numbers.size))
    values = [*numbers[:: max(1, numbers.size // 40)][:40], numbers.mean(), weighted.mean() * 1000]
    shown = [round(float(value), 6) for value in values]
    return dict(shape=list(patches.shape), grids=np.asarray(grids).tolist(), text=short(text), values=shown)


def theirs(name: str, images: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, str | None]:
    """Returns patches, grids and text by transformers, for an image or the frames of a video.

    The text of Pixtral is None without torchvision.

    Raises:
        ImportError: if the pixels need torchvision, and it is not installed.
    """
    import torch

    inner, outer = FILES[name]
    inner = {key: value for key, value in inner.items() if value is not None and not key.endswith(("_type", "_class"))}
    inner.pop("image_seq_length", None)
    tokens = types.SimpleNamespace()  # in place of the processor; the text needs no more than these
    if name == "qwen3-vl-video":
        import torchvision  # noqa: F401  # its processor imports without torchvision, and then fails
        from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

        processor = tokens.video_processor = Qwen3VLVideoProcessor(**inner, do_sample_frames=False)
        frames = torch.from_numpy(np.stack(images)).movedim(-1, 1)
        out = processor(videos=[frames], return_tensors="np")
        tokens.vision_start_token, tokens.vision_end_token = "<|vision_start|>", "<|vision_end|>"
        tokens.video_token = "<|video_pad|>"
        tokens._calculate_timestamps = lambda *args: Qwen3VLProcessor._calculate_timestamps(tokens, *args)
        metadata = types.SimpleNamespace(fps=2, frames_indices=[int(second * 2) for second in SECONDS])
        text = Qwen3VLProcessor.replace_video_token(tokens, dict(out) | {"video_metadata": [metadata]}, 0)
        return out["pixel_values_videos"], out["video_grid_thw"], text
    if name.startswith("qwen"):
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
        from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

        tokens.image_processor, tokens.image_token = Qwen2VLImageProcessorPil(**inner), "<|image_pad|>"
        out = tokens.image_processor(images, return_tensors="np")
        return out["pixel_values"], out["image_grid_thw"], Qwen3VLProcessor.replace_image_token(tokens, out, 0)
    if name == "muse_glimmer":
        from PIL import Image
        from transformers.models.muse_glimmer.image_processing_muse_glimmer import (
            MuseGlimmerImageProcessor,
            smart_resize,
        )
        from transformers.models.muse_glimmer.processing_muse_glimmer import MuseGlimmerProcessor

        tokens.image_processor, tokens.image_token = MuseGlimmerImageProcessor(**inner), "<|patch|>"
        tokens.image_start_token, tokens.image_end_token = "<|image_start|>", "<|image_end|>"
        # Resized by Pillow, since torchvision does not round between columns and rows.
        height, width = smart_resize(*images[0].shape[:2], inner["patch_size"] * 2, inner["max_image_tokens"])
        resized = Image.fromarray(images[0]).resize((width, height), Image.Resampling.LANCZOS)
        channels_first = torch.from_numpy(np.array(resized)).movedim(-1, 0)
        out = tokens.image_processor(channels_first, do_resize=False, return_tensors="np")
        _, rows, columns = out["image_grid_thw"][0]
        squares = np.arange(rows * columns).reshape(rows // 2, 2, columns // 2, 2).swapaxes(1, 2).ravel()
        text = MuseGlimmerProcessor.replace_image_token(tokens, out, 0)
        return out["pixel_values"][squares], out["image_grid_thw"], text
    if name == "gemma4":
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
        from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

        out = Gemma4ImageProcessorPil(**inner)(images, return_tensors="np")
        tokens.boi_token, tokens.image_token, tokens.eoi_token = "<|image>", "<|image|>", "<image|>"
        text = Gemma4Processor.replace_image_token(tokens, out, 0)
        columns, rows = out["image_position_ids"][0].max(axis=0) + 1
        squares = np.arange(rows * columns).reshape(rows // 3, 3, columns // 3, 3).swapaxes(1, 2).ravel()
        return out["pixel_values"][0][squares], np.array([[1, rows, columns]]), text
    if name.startswith("gemma3"):
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
        from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

        out = Gemma3ImageProcessorPil(**inner)(images, return_tensors="np")
        soft = "<image_soft_token>" * 256
        tokens.full_image_sequence = f"\n\n<start_of_image>{soft}<end_of_image>\n\n"
        text = Gemma3Processor.replace_image_token(tokens, out, 0)
    elif name == "llama4":
        from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor
        from transformers.models.llama4.processing_llama4 import Llama4Processor

        channels_first = [torch.from_numpy(image).movedim(-1, 0) for image in images]
        out = Llama4ImageProcessor(**inner)(channels_first, return_tensors="pt")
        tokens.patch_size, tokens.downsample_ratio = 14, 4
        tokens._prompt_split_image = lambda *args: Llama4Processor._prompt_split_image(tokens, *args)
        text = Llama4Processor.replace_image_token(tokens, dict(out), 0)
    else:
        from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

        size = outer["patch_size"] * outer["spatial_merge_size"]
        out = PixtralImageProcessorPil(**inner | {"patch_size": size})(images, return_tensors="np")
        try:
            from transformers.models.pixtral.processing_pixtral import PixtralProcessor

            text = PixtralProcessor.replace_image_token(types.SimpleNamespace(**outer), out, 0)
        except ImportError:
            text = None
    pixels = torch.as_tensor(out["pixel_values"]).float()
    # Splits the pixels as a convolution of this stride does.
    patches = torch.nn.functional.unfold(pixels, 14, stride=14).mT.flatten(0, 1).numpy()
    rows, columns = pixels.shape[2] // 14, pixels.shape[3] // 14
    if name == "pixtral":  # merges patches two by two, and so orders them by block
        patches = patches[np.arange(rows * columns).reshape(rows // 2, 2, columns // 2, 2).swapaxes(1, 2).ravel()]
    return patches, np.array([[1, rows, columns]] * len(pixels)), text


if __name__ == "__main__":
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    for name in FILES:
        try:
            pictures = {"video": video()} if name.endswith("video") else {size: [picture(size)] for size in SIZES}
            made = {which: theirs(name, images) for which, images in pictures.items()}
            if any(text is None for _, _, text in made.values()):
                raise ImportError("its text needs torchvision")
            golden[name] = {which: summary(*results) for which, results in made.items()}
        except ImportError as error:
            print(f"{name}: left as it is, {error}")
    lines = [
        f'"{name}": {{\n' + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items()) + "\n}"
        for name, entries in golden.items()
    ]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
