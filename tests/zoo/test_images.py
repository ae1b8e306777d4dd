"""Images of all kinds are opened, or refused in a sentence, and processed as by transformers' processors."""

import base64
import http.server
import io
import itertools
import json
import pathlib
import struct
import sys
import threading
import types
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.close import close
from tests.zoo import make_golden_images
from tests.zoo.make_golden_images import FILES, SECONDS, SIZES, picture
from zoo.vision.open import image_size, open_image
from zoo.vision.processors.base import LongestEdge, PixelBounds, Rectangle, patchify
from zoo.vision.processors.gemma3 import Gemma3
from zoo.vision.processors.gemma4 import Gemma4
from zoo.vision.processors.llama4 import Llama4
from zoo.vision.processors.muse_glimmer import MuseGlimmer
from zoo.vision.processors.pixtral import Pixtral
from zoo.vision.processors.qwen3_vl import Qwen3VL, Qwen3VLVideo, smart_resize
from zoo.vision.towers import siglip


GOLDEN = json.loads(make_golden_images.GOLDEN.read_text())
KINDS = {"gemma3": Gemma3, "qwen2": Qwen3VL, "qwen3": Qwen3VL, "llama4": Llama4}
KINDS |= {"gemma4": Gemma4, "muse_glimmer": MuseGlimmer, "pixtral": Pixtral, "qwen3-vl-video": Qwen3VLVideo}
BY_TORCHVISION = ("llama4", "qwen3-vl-video")
PHOTO = pathlib.Path(__file__).parents[2] / "../shared/data/images/test_image.jpg"
CASES = [(name, size) for name in FILES for size in (["video"] if name.endswith("video") else SIZES)]


def kind(name):
    return KINDS.get(name) or KINDS[name.split("-")[0]]


@pytest.fixture
def read(tmp_path):
    """Returns a function that reads the processor of FILES[name], with some keys changed."""

    def read(name, outer=None, **changed):
        inner, beside = FILES[name]
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "processor_config.json").write_text(json.dumps(beside if outer is None else outer))
        file = "video_preprocessor_config.json" if name.endswith("video") else "preprocessor_config.json"
        (folder / file).write_text(json.dumps(inner | changed))
        return kind(name).read(folder)

    return read


def process(processor, name, size):
    if size == "video":
        return processor(make_golden_images.video(), SECONDS)
    return processor(picture(size))


@pytest.mark.thorough
@pytest.mark.parametrize("name, size", CASES)
def test_as_in_transformers(read, name, size):
    """Patches, their order, grids, and text equal transformers'; where torchvision resizes, up to one level of 255."""
    processor, golden = read(name), GOLDEN[name][size]
    processed = process(processor, name, size)
    said = make_golden_images.summary(processed.patches, processed.grids, processed.text)
    assert {key: said[key] for key in ("shape", "grids", "text")} == {
        key: golden[key] for key in golden if key != "values"
    }
    off = np.abs(np.subtract(said["values"], golden["values"]))
    if name in BY_TORCHVISION:
        assert off.max() < 1.5 * 2 / 255 and off[-2] < 1e-3 and (off > 1e-5).mean() < 0.25
    else:
        close(off, np.zeros_like(off), terms=40, size=np.abs(golden["values"]).max())
    assert len(processed.patches) == processed.grids.prod(axis=1).sum()
    merged = {"gemma3": 16, "gemma3-scan": 1, "gemma4": 9}.get(name, 4)  # patches per feature
    assert processed.text.count(processor.placeholder) * merged == len(processed.patches)


@pytest.mark.live
@pytest.mark.parametrize("name, size", CASES)
def test_live(read, name, size):
    pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    given = make_golden_images.video() if size == "video" else [picture(size)]
    try:
        patches, grids, text = make_golden_images.theirs(name, given)
    except ImportError as error:
        pytest.skip(str(error))
    processed = process(read(name), name, size)
    off = np.abs(processed.patches - patches)
    if name in BY_TORCHVISION:
        assert off.max() < 1.5 * 2 / 255 and off.mean() < 1e-3
    else:
        assert off.max() <= (1e-7 if name == "muse_glimmer" else 0)  # torchvision normalizes in one step
    assert np.array_equal(processed.grids, grids)
    assert text is None or processed.text == text


def any_size(random):
    side = lambda: [random.integers(1, 5000), np.exp(random.uniform(0, 9)), random.integers(1, 30) * 56]
    return int(random.choice(side())), int(random.choice(side()))


@pytest.mark.live
def test_sizes_live():
    """The sizes agree for a thousand images each, with extreme ones, and both refuse the same ones."""
    pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as smart_resize_image
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as smart_resize_video

    def either(function, *args):
        try:
            return tuple(function(*args))
        except ValueError:
            return ValueError

    random, scan = np.random.default_rng(0), Gemma3ImageProcessorPil().pan_and_scan
    for _ in range(1000):
        (height, width), frames, factor = any_size(random), int(random.integers(2, 40)), int(random.choice([28, 32]))
        fewest = int(random.integers(1, 200_000))
        bounds = PixelBounds(fewest, fewest + int(random.integers(1, 10_000_000)))
        video = Qwen3VLVideo(size=bounds, patch_size=factor // 2)
        given = (height, width, factor, bounds.shortest_edge, bounds.longest_edge)
        assert either(smart_resize, height, width, factor, bounds) == either(smart_resize_image, *given), given
        theirs = either(smart_resize_video, frames, height, width, 2, *given[2:])
        assert either(video.resized, frames, height, width) == theirs, (frames, *given)
        blank, longest = np.broadcast_to(np.uint8(0), (3, height, width)), int(random.choice([333, 1024, 1540]))
        pixtral = Pixtral(size=LongestEdge(longest), patch_size=14, spatial_merge_size=2)
        theirs = get_resize_output_image_size(blank, longest, 28, "channels_first")
        assert pixtral.resized(height, width) == theirs, (height, width, longest)
        tokens = int(random.choice([70, 140, 280, 560, 1120]))
        theirs = either(get_aspect_ratio_preserving_size, height, width, 16, tokens * 9, 3)
        assert either(Gemma4(max_soft_tokens=tokens).resized, height, width) == theirs, (height, width, tokens)
        keys = ("pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate")
        values = (int(random.integers(1, 400)), int(random.integers(1, 8)), random.uniform(1, 3))
        gemma = Gemma3(size=Rectangle(16, 16), do_pan_and_scan=True, **dict(zip(keys, values, strict=True)))
        assert gemma.crops(height, width) == len(scan(blank, *values)), (height, width, values)


@pytest.mark.live
def test_canvases_live():
    pytest.importorskip("torchvision", reason="transformers' processor of Llama 4 needs torchvision")
    import torch
    from transformers.image_utils import SizeDict
    from transformers.models.llama4 import image_processing_llama4 as theirs

    random = np.random.default_rng(0)
    for _ in range(1000):
        (height, width), most, largest = any_size(random), int(random.choice([5, 12, 16])), bool(random.integers(2))
        ours = Llama4(size=Rectangle(336, 336), max_patches=most, resize_to_max_canvas=largest)
        choice = torch.tensor(theirs.find_supported_resolutions(most, SizeDict(height=336, width=336)))
        canvas = theirs.get_best_fit((height, width), choice, largest)
        assert tuple(side // 336 for side in canvas.tolist()) == ours.canvas(height, width), (height, width, most)
        limit = canvas if largest else [min(max(s, 336), c) for s, c in zip((height, width), canvas, strict=True)]
        size = theirs.get_max_res_without_distortion((height, width), limit)
        assert tuple(max(int(side), 1) for side in size) == ours.resized(height, width), (height, width, largest)


# --- The choice of a canvas, without torchvision.
def test_llama4_canvases(read):
    """By hand from the rule: the smallest of equally good ones, and a single tile for an image that is smaller."""
    processor = read("llama4")
    assert processor.canvas(336, 336) == (1, 1)
    assert processor.canvas(37, 53) == (1, 1) and processor.resized(37, 53) == (234, 336)
    assert processor.canvas(336, 672) == (1, 2) and processor.resized(336, 672) == (336, 672)
    assert processor.canvas(300, 700) == (1, 3) and processor.resized(300, 700) == (300, 700)
    assert processor.canvas(5000, 5000) == (4, 4) and processor.resized(5000, 5000) == (1344, 1344)
    largest = read("llama4", resize_to_max_canvas=True)
    assert largest.canvas(336, 336) == (4, 4) and largest.resized(336, 336) == (1344, 1344)
    tiles = largest.pictures(picture("wide"))
    assert len(tiles) == np.prod(largest.canvas(199, 611)) + 1


@pytest.mark.parametrize(("tower", "size"), [(dict(patch_size=4), 4), ({}, 16), (None, 14)])
def test_gemma3_patches_are_those_of_the_tower(tmp_path, tower, size):
    """The released files of its processor do not state the size, and transformers cuts the patches in the tower."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(dict(size=dict(height=224, width=224))))
    (tmp_path / "config.json").write_text(json.dumps(dict(vision_config=tower)))
    patches = Gemma3.read(tmp_path)(np.zeros((224, 224, 3), np.uint8)).patches
    assert patches.shape == ((224 // size) ** 2, 3 * size**2)


def test_gemma3_patches_by_default():
    assert Gemma3.patch_of_tower == siglip.Config.patch_size


def test_gemma3_crops(read):
    """By hand: the number is the ratio of the sides, rounded, unless a crop would be below the least size."""
    processor = read("gemma3", do_pan_and_scan=True)
    sizes = {(1000, 1199): 0, (1000, 1200): 2, (1000, 2550): 3, (2450, 1000): 2, (300, 3000): 4, (300, 700): 2}
    sizes |= {(300, 500): 0, (255, 3000): 0, (3000, 256): 4}
    assert {size: processor.crops(*size) for size in sizes} == sizes
    assert read("gemma3").crops(300, 3000) == 0


# --- Opening.
def encoded(image, format="PNG", **options):
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, format, **options)
    return file.getvalue()


def png(width, height, depth, color, rows):
    """Returns a PNG with any header, including those that Pillow would not write."""
    chunk = lambda name, data: struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def test_opened_from_anywhere(tmp_path):
    image, data = picture("small"), encoded(picture("small"))
    (tmp_path / "a.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for source in (tmp_path / "a.png", str(tmp_path / "a.png"), data, url, Image.fromarray(image)):
        opened = open_image(source)
        assert opened.dtype == np.uint8 and np.array_equal(opened, image)
        assert opened.flags.writeable
    with pytest.raises(
        ValueError, match=r"https://example.org/a.png is not downloaded unless that is allowed \(remote"
    ):
        open_image("https://example.org/a.png")


def test_transparency_is_laid_on_white():
    image = picture("small")
    alpha = np.tile(np.uint8([0, 128, 255]), (37, 18))[:, :53]
    white = (image * (alpha[..., None] / 255) + 255 * (1 - alpha[..., None] / 255)).round()
    opened = open_image(encoded(np.dstack([image, alpha]))).astype(int)
    assert np.abs(opened - white).max() <= 1
    assert (opened[:, ::3] == 255).all() and np.array_equal(opened[:, 2::3], image[:, 2::3])
    grey = open_image(encoded(Image.fromarray(np.dstack([image[..., 0], alpha]), "LA"))).astype(int)
    assert np.abs(grey - white[..., :1]).max() <= 1
    palette = Image.fromarray(np.tile(np.uint8([0, 1, 2]), (5, 3)), "P")
    palette.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    clear = open_image(encoded(palette, transparency=1))
    assert clear[0, :3].tolist() == [[10, 20, 30], [255, 255, 255], [70, 80, 90]]
    assert open_image(encoded(palette))[0, :3].tolist() == [[10, 20, 30], [40, 50, 60], [70, 80, 90]]


def test_upright():
    """An image is turned upright from each of EXIF's eight orientations."""
    image = picture("small")
    stored = [
        image, image[:, ::-1], image[::-1, ::-1], image[::-1], image.swapaxes(0, 1), np.rot90(image),
        np.rot90(image.swapaxes(0, 1), 2), np.rot90(image, -1),
    ]  # fmt: skip
    for orientation, turned in enumerate(stored, start=1):
        exif = Image.Exif()
        exif[0x0112] = orientation
        opened = open_image(encoded(np.ascontiguousarray(turned), exif=exif))
        assert np.array_equal(opened, image), orientation


def test_sizes_are_read_without_pixels():
    """The size is read from a PNG whose pixels would exceed any memory, and whose orientation comes after them."""
    exif = Image.Exif()
    exif[0x0112] = 6
    front, end = encoded(picture("small"), exif=exif), encoded(picture("small"))
    at, tail = front.index(b"eXIf") - 4, end.index(b"IEND") - 4
    chunk = front[at : at + 12 + int.from_bytes(front[at : at + 4])]
    late = end[:tail] + chunk + end[tail:]
    assert image_size(late) == open_image(late).shape[:2] == picture("small").shape[1::-1]
    assert np.array_equal(open_image(late), open_image(front))
    flat = png(9_000, 9_900, 8, 2, [])
    tail = flat.index(b"IEND") - 4
    assert image_size(flat) == (9_900, 9_000) and image_size(flat[:tail] + chunk + flat[tail:]) == (9_000, 9_900)
    with pytest.raises(ValueError, match="is damaged or cut off"):
        open_image(flat)


def test_grey_and_deep():
    """All channels of a grey image are equal. Of 16 bits the upper 8 are kept, as Pillow does with colour."""
    image = picture("small")
    grey, deep = image[..., 0], image[..., 0] * np.uint16(256) + np.uint16(77)
    three = lambda channel: np.repeat(channel[..., None], 3, -1).astype(np.uint8)
    assert np.array_equal(open_image(encoded(grey)), three(grey))
    assert np.array_equal(open_image(encoded(grey > 99)), three((grey > 99) * 255))
    for format in ("PNG", "TIFF", "PPM"):
        assert np.array_equal(open_image(encoded(deep, format)), three(deep >> 8)), format
    colour = image.astype(np.uint16) * 256 + 77
    rows = [row.astype(">u2").tobytes() for row in colour]
    assert np.array_equal(open_image(png(53, 37, 16, 2, rows)), image)
    cmyk = open_image(encoded(Image.fromarray(np.full((4, 6, 3), 255, np.uint8)).convert("CMYK"), "JPEG"))
    assert (cmyk == 255).all()
    for pixels in (grey.astype(np.float32), grey.astype(np.int32) * 2**16):
        with pytest.raises(ValueError, match="of which nothing says what is white: save it in 8 bits"):
            open_image(encoded(pixels, "TIFF"))


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_first_frame(format):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "lime", "blue")]
    options = {"lossless": True} if format == "WEBP" else {}
    opened = open_image(encoded(frames[0], format, save_all=True, append_images=frames[1:], **options))
    assert (opened == [255, 0, 0]).all()


def test_refused_in_a_sentence(tmp_path):
    small = encoded(picture("small"))
    file = lambda name, data: [(tmp_path / name).write_bytes(data), tmp_path / name][1]
    (tmp_path / "folder").mkdir()
    cases = [
        (file("empty.png", b""), "is empty: get it anew"),
        (file("notes.png", b"not an image " * 9), "is no image of a kind that is read"),
        (file("script.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "is no image of a kind"),
        (file("cut.png", small[: len(small) // 2]), "is damaged or cut off"),
        (file("cut.jpg", encoded(picture("small"), "JPEG")[:-200]), "is damaged or cut off"),
        (file("exif.png", encoded(picture("small"), exif=b"Exif\0\0MM\0\0\0\0")), "is damaged or cut off"),
        (file("header.ppm", b"P6\nab 3\n255\n" + bytes(99)), "is damaged or cut off"),
        (file("flat.png", png(0, 9, 8, 2, [])), "is "),
        (file("bomb.png", png(60_000, 60_000, 8, 2, [])), "more than 89,478,485 pixels, the most that is opened"),
        (file("big.png", png(9_000, 10_000, 8, 2, [])), "more than 89,478,485 pixels"),
        (tmp_path / "none.png", "cannot be read: No such file"),
        (tmp_path / "folder", "is no regular file"),
    ]  # fmt: skip
    for path, words in cases:
        with pytest.raises(ValueError, match=words) as error:
            open_image(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)
    for source, words in [
        (b"", "the image of 0 bytes is empty"),
        (small[:60], "the image of 60 bytes is damaged"),
        ("data:image/png;base64,AAA", "is no base64"),
        ("data:image/png,AAAA", "is no data URL in base64"),
        ("data:image/png;base64,", "is empty"),
        ("a\0b", "cannot be read: embedded null byte"),
        ("x" * 5000, "cannot be read: File name too long"),
    ]:
        with pytest.raises(ValueError, match=words) as error:
            open_image(source)
        assert len(str(error.value)) < 300


def test_damage_is_always_a_sentence(tmp_path):
    """A file with cut, changed, missing or inserted bytes is opened, or refused in a sentence."""
    image, exif = Image.fromarray(picture("small")), Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a description"
    files = {
        format: encoded(image, format, **options)
        for format, options in dict(
            PNG=dict(exif=exif), JPEG=dict(exif=exif), WEBP=dict(exif=exif), TIFF=dict(compression="packbits"),
            GIF=dict(save_all=True, append_images=[image]), BMP={}, PPM={},
        ).items()
    }  # fmt: skip
    random, outcomes = np.random.default_rng(0), set()
    for _ in range(400):
        format = str(random.choice(list(files)))
        data = bytearray(files[format])
        match random.integers(4):
            case 0:
                del data[random.integers(len(data)) :]
            case 1:
                for at in random.integers(0, random.choice([64, len(data)]), random.integers(1, 9)):
                    data[at] = random.integers(256)
            case 2:
                first, last = sorted(random.integers(0, len(data), 2))
                del data[first:last]
            case 3:
                at = random.integers(len(data))
                data[at:at] = random.bytes(random.integers(1, 20))
        path = tmp_path / f"damaged.{format}"
        path.write_bytes(data)
        try:
            opened = open_image(path)
            assert opened.dtype == np.uint8 and opened.size and opened.shape[2] == 3
            outcomes.add(True)
        except ValueError as error:
            assert str(path) in str(error) and "\n" not in str(error) and len(str(error)) < 400
            outcomes.add(False)
    assert outcomes == {True, False}


class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/missing":
            return self.send_error(404)
        self.send_response(200)
        self.end_headers()
        try:
            if self.path == "/image":
                self.wfile.write(encoded(picture("small")))
            while self.path == "/endless":
                self.wfile.write(bytes(2**16))
            while self.path == "/slow":  # by the reader's clock, which the test advances
                self.wfile.write(b"x")
        except OSError:  # the reader has disconnected
            pass

    def log_message(self, *args):
        pass


def test_downloads_end(monkeypatch):
    """An allowed download ends, and a too large, too slow, missing or malformed URL is refused in a sentence."""
    server, opener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server), sys.modules[open_image.__module__]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        host = f"http://127.0.0.1:{server.server_port}"
        assert np.array_equal(open_image(f"{host}/image", remote=True), picture("small"))
        monkeypatch.setattr(opener, "DOWNLOAD_BYTES", 2**18)
        refused("endless", host, "more than 262,144 bytes")
        refused("missing", host, "404")
        monkeypatch.setattr(opener, "time", types.SimpleNamespace(monotonic=itertools.count(0, 31).__next__))
        refused("slow", host, "more than 30 seconds")
        with pytest.raises(ValueError, match="cannot be downloaded"):
            open_image("http://[", remote=True)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def refused(path, host, words):
    with pytest.raises(ValueError, match=f"{host}/{path} cannot be downloaded .*{words}.*: give a file instead"):
        open_image(f"{host}/{path}", remote=True)


@pytest.mark.live
def test_opened_as_by_transformers(tmp_path):
    """Photographs open as by its `load_image`, and transparent images as its processors take Pillow's."""
    pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    from transformers.image_transforms import convert_to_rgb
    from transformers.image_utils import load_image

    exif = Image.Exif()
    exif[0x0112] = 8
    file = tmp_path / "image"
    for size in SIZES:
        for format, options in [("JPEG", dict(exif=exif)), ("PNG", {}), ("WEBP", dict(exif=exif)), ("BMP", {})]:
            file.write_bytes(encoded(picture(size), format, **options))
            with Image.open(file) as opened:
                assert np.array_equal(open_image(file), np.asarray(load_image(opened)))
        transparent = encoded(np.dstack([picture(size), picture(size)[..., 1]]))
        assert np.array_equal(
            open_image(transparent), convert_to_rgb(Image.open(io.BytesIO(transparent)), return_numpy=True)
        )


@pytest.mark.live
@pytest.mark.skipif(not PHOTO.is_file(), reason="needs ../shared")
def test_a_photograph_live(read, monkeypatch):
    pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    from transformers.image_utils import load_image

    with Image.open(PHOTO) as opened:
        photo, image = open_image(PHOTO), np.array(load_image(opened))
    assert np.array_equal(photo, image)
    for name in ("gemma3", "gemma3-scan", "gemma4", "qwen2-vl", "qwen3-vl", "pixtral"):
        patches, grids, text = make_golden_images.theirs(name, [image])
        processed = read(name)(photo)
        assert np.array_equal(processed.patches, patches), name
        assert np.array_equal(processed.grids, grids) and text in (None, processed.text)


# --- The files, and the prompt.
def test_every_key_is_accounted_for(read):
    for name in FILES:
        with pytest.raises(ValueError, match=r"preprocessor_config.json says sharpen=True; \w+ does not know it"):
            read(name, sharpen=True)
        for key, value in dict(do_normalize=name == "gemma4", do_center_crop=True, do_resize=False).items():
            with pytest.raises(ValueError, match=f"says {key}={value}; .* implements only {not value}"):
                read(name, **{key: value})
        for key, value in dict(size={"height": 896, "depth": 3}, image_mean=[0.5], resample="best").items():
            with pytest.raises(ValueError, match=r"preprocessor_config.json"):
                read(name, **{key: value} | ({"min_pixels": None, "max_pixels": None} if key == "size" else {}))
    with pytest.raises(
        ValueError, match=r"processor_config.json says image_token='<img>'; Pixtral implements only '\[IMG"
    ):
        read("pixtral", outer={"image_token": "<img>"})
    with pytest.raises(ValueError, match="lacks 'spatial_merge_size', which Pixtral needs"):
        read("pixtral", outer={})  # a model of Mistral's would treat each patch as a token
    with pytest.raises(ValueError, match=r"preprocessor_config.json lacks 'size', which Gemma3 needs"):
        read("gemma3", size=None)
    with pytest.raises(ValueError, match="but tiles are square"):
        read("llama4", size={"height": 336, "width": 672})


def test_numbers_have_bounds(read):
    """Files are refused if they would take too much memory or time, as a whole or for a small image."""
    for name, key, value in (
        ("gemma3", "size", {"height": 10**9, "width": 896}),
        ("gemma3", "patch_size", 0),
        ("gemma3", "image_seq_length", 10**9),
        ("gemma3", "pan_and_scan_max_num_crops", 10**9),
        ("gemma4", "max_soft_tokens", 10**6),
        ("llama4", "max_patches", 10**6),
        ("llama4", "pixel_shuffle_ratio", 0.0),
        ("muse_glimmer", "max_image_tokens", 10**6),
        ("pixtral", "patch_size", -16),
        ("qwen2-vl", "temporal_patch_size", 10**9),
        ("qwen3-vl", "merge_size", 10**9),
        ("qwen3-vl", "size", {"longest_edge": 10**30, "shortest_edge": 1}),
        ("qwen3-vl-video", "size", {"longest_edge": 1, "shortest_edge": 10**12}),
    ):
        bounds = {"min_pixels": None, "max_pixels": None} if key == "size" and name.startswith("qwen") else {}
        with pytest.raises(ValueError, match=r"preprocessor_config.json.* (is not from [\d.]+ to|needs more than 0)"):
            read(name, outer={} if name == "gemma3" else None, **{key: value} | bounds)
    for name, changed in (
        ("gemma3", {"size": {"height": 8000, "width": 8000}}),
        ("llama4", {"size": {"height": 8000, "width": 8000}, "patch_size": 100}),
        ("llama4", {"size": {"height": 2**11, "width": 2**11}, "patch_size": 1, "max_patches": 8}),
    ):
        with pytest.raises(ValueError, match=r"preprocessor_config.json: .* are the most"):
            read(name, outer={}, **changed)
    fine = {"size": {"longest_edge": 8 * 10**7, "shortest_edge": 1}, "patch_size": 2, "merge_size": 1}
    with pytest.raises(ValueError, match="An image would become 16,000,000 tokens, and 1,048,576 are the most"):
        read("qwen3-vl", **fine, min_pixels=None, max_pixels=None).text(8000, 8000)
    thin = read("pixtral", outer={"spatial_merge_size": 2}, patch_size=256, size={"longest_edge": 8 * 10**7})
    with pytest.raises(ValueError, match="Images would become 2000384 x 512 pixels, and 89,478,485 are the most"):
        thin(np.zeros((1, 2 * 10**6, 3), np.uint8))


def test_both_forms_of_the_files(read, tmp_path):
    """transformers 5 writes one file with two sections; older files had `min_pixels` and `max_pixels`."""
    new = tmp_path / "new"
    new.mkdir()
    with pytest.raises(ValueError, match=r"new has no preprocessor_config\.json: download it"):
        Gemma3.read(new)
    for name, (inner, outer) in FILES.items():
        section = "video_processor" if name.endswith("video") else "image_processor"
        other = {"feature_extractor": {"sampling_rate": 16000}}
        (new / "processor_config.json").write_text(json.dumps({section: inner} | outer | other))
        assert kind(name).read(new) == read(name)
    bounds = PixelBounds(3136, 200704)
    assert read("qwen2-vl").size == bounds
    older = dict(min_pixels=3136, max_pixels=200704)
    assert read("qwen2-vl", size={"shortest_edge": 1, "longest_edge": 2}).size == bounds
    assert read("qwen2-vl", min_pixels=None, max_pixels=None, size=older).size == bounds


def test_prompts(read):
    expand = Llama4.expand
    assert expand("a <|image|> b <|image|>", ["<x><|image|>", "<y>"]) == "a <x><|image|> b <y>"
    assert expand("no image", []) == "no image"
    with pytest.raises(ValueError, match=r"The prompt has 1 times <\|image\|>, and there are 2 for it"):
        expand("a <|image|>", ["x", "y"])


def test_what_cannot_be_processed(read):
    thin = np.zeros((1, 4000, 3), np.uint8)
    with pytest.raises(ValueError, match="4000 x 1 pixels is over 200 times longer than wide: crop it"):
        read("qwen3-vl")(thin)
    with pytest.raises(ValueError, match="4000 x 1 pixels is too thin to be resized: crop it"):
        read("pixtral")(thin)
    video, frame = read("qwen3-vl-video"), picture("small")
    for frames, seconds in [([frame], [0.0]), ([frame, frame[1:]], [0.0, 0.5]), ([frame] * 3, [0.0, 0.5])]:
        with pytest.raises(ValueError, match="A video needs 2 frames or more, all of one size, and a time for each"):
            video(frames, seconds)


def test_patches_are_a_convolutions():
    """Patches have the order of features in a convolution's weight, row by row; merged ones come block by block."""
    frames = np.arange(2 * 8 * 12 * 3, dtype=np.float32).reshape(2, 8, 12, 3)
    plain = patchify(frames, 4)
    assert plain.shape == (12, 48)
    assert np.array_equal(plain[1 * 6 + 1 * 3 + 2].reshape(3, 4, 4), np.moveaxis(frames[1, 4:8, 8:12], -1, 0))
    merged = patchify(frames, 2, merge_size=2, temporal=2)
    block, within = 1 * 3 + 2, 1 * 2 + 0  # the patch at row 2 * 1 + 1 and column 2 * 2 + 0
    assert np.array_equal(merged[block * 4 + within].reshape(3, 2, 2, 2), np.moveaxis(frames[:, 6:8, 8:10], -1, 0))
