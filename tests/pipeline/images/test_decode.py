"""Decoding gives the expected pixels, and every failure is an ImageError."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import skimage
from PIL import Image, ImageFile
from PIL.PngImagePlugin import PngInfo

from pipeline.images import formats as image_formats
from pipeline.images.decode import (
    DECODER,
    MAX_IMAGE_PX,
    DecodeLimits,
    Header,
    decode,
    decode_cost,
    decoder_version,
    hash_bytes,
    is_current_decoder,
    limits_of_accepted,
    load_pixels,
    open_content,
    read_header,
)
from pipeline.images.decode import decoded as decoded_within
from pipeline.images.decode_limits import MemoryBudget
from pipeline.images.formats import ImageError
from pipeline.images.geometry import MAX_IMAGE_EDGE_PX, Buckets, Geometry, Placement, Size, ladder
from pipeline.versions import PREPROCESSING_VERSION
from tests.hostile_images import jpeg_with_scans
from tests.pipeline.pixels import WHITE, Pixels, decoded, pattern, saved

PHOTOS = Path(skimage.__file__).parent / "data"

# Pillow warns about damaged metadata; here warnings are errors, and an error would be a rejection.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")


def place(buckets: Buckets, size: Size) -> Geometry:
    geometry = Placement((buckets,)).assign(size)
    assert geometry is not None
    return geometry


def with_orientation(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[274] = orientation
    return exif.tobytes()


def upright(stored: Pixels, orientation: int) -> Pixels:
    """The eight orientations of the EXIF standard, by array indexing."""
    turned = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.swapaxes(0, 1),
        6: stored[::-1].swapaxes(0, 1),
        7: stored[::-1, ::-1].swapaxes(0, 1),
        8: stored[:, ::-1].swapaxes(0, 1),
    }
    return turned[orientation]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("TIFF", {}),
        ("WEBP", {"lossless": True}),
        ("JPEG", {"quality": 100, "subsampling": 0}),
        ("AVIF", {"quality": 100, "subsampling": "4:4:4"}),
    ],
    ids=["PNG", "TIFF", "WebP", "JPEG", "AVIF"],
)
def test_I09_header_and_pixels_agree_for_all_orientations(
    kind: str, options: dict[str, object], orientation: int
) -> None:
    stored = pattern()
    data = saved(Image.fromarray(stored), kind, exif=with_orientation(orientation), **options)
    expected = upright(stored, orientation)
    header = read_header(data)
    pixels = decoded(data)
    assert header.size == Size(*expected.shape[:2])
    assert header.orientation == orientation
    assert pixels.shape == expected.shape
    if kind in ("JPEG", "AVIF"):
        assert np.abs(pixels - expected).mean() < 4
    else:
        assert (pixels == expected).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_I09_header_and_pixels_of_a_heic_photograph_are_upright(orientation: int) -> None:
    heif = pytest.importorskip("pillow_heif")
    stored = np.kron(pattern(), np.ones((4, 4, 1), np.uint8))
    heic = heif.from_pillow(Image.fromarray(stored))
    heic.info["exif"] = with_orientation(orientation)
    file = io.BytesIO()
    heic.save(file, quality=95, chroma=444)
    expected = upright(stored, orientation)
    header, pixels = read_header(file.getvalue()), decoded(file.getvalue())
    assert (header.format, header.size) == ("HEIF", Size(*expected.shape[:2]))
    assert pixels.shape == expected.shape
    assert np.abs(pixels - expected).mean() < 4
    with pytest.raises(ImageError, match=r"truncated|undecodable"):
        decode(file.getvalue()[:-200], WHITE)


def test_the_error_for_a_missing_plug_in_has_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nowhere = {
        kind: plugin._replace(module="no_such_module") for kind, plugin in image_formats.PLUGINS.items()
    }
    monkeypatch.setattr(image_formats, "PLUGINS", nowhere)
    image_formats.has_plugin.cache_clear()
    try:
        with pytest.raises(ImageError, match=r"plugin_missing: it is HEIF.*") as excinfo:
            read_header(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    finally:
        image_formats.has_plugin.cache_clear()
    assert "pip install pillow-heif" in excinfo.value.fix


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def with_late_orientation(stored: Pixels) -> bytes:
    """Return a PNG with orientation 6 behind its pixels."""
    plain = saved(Image.fromarray(stored))
    end = plain.index(b"IEND") - 4
    return plain[:end] + chunk(b"eXIf", with_orientation(6).removeprefix(b"Exif\0\0")) + plain[end:]


def test_I09_an_orientation_stored_behind_the_pixels_of_a_png_is_applied() -> None:
    stored = pattern()
    late = with_late_orientation(stored)
    assert read_header(late).size == Size(40, 24)
    assert (decoded(late) == upright(stored, 6)).all()


def test_I09_an_orientation_in_xmp_is_applied() -> None:
    info = PngInfo()
    info.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="8"/>')
    data = saved(Image.fromarray(pattern()), pnginfo=info)
    assert read_header(data).size == Size(40, 24)
    assert (decoded(data) == upright(pattern(), 8)).all()


def test_an_image_with_damaged_exif_is_kept() -> None:
    data = saved(Image.fromarray(pattern()), "PNG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert read_header(data).orientation == 1
    assert (decoded(data) == pattern()).all()


def test_I13_an_animation_decodes_to_its_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert (decoded(data) == (255, 0, 0)).all(), kind
        assert read_header(data).notes == ("animated",), kind


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP", "AVIF", "JPEG2000"])
def test_I13_an_image_of_one_frame_is_not_animated(kind: str) -> None:
    assert read_header(saved(Image.fromarray(pattern()), kind)).notes == ()


def test_I13_the_views_of_an_mpo_are_not_an_animation() -> None:
    views = [Image.fromarray(pattern()), Image.fromarray(pattern()[::-1])]
    header = read_header(saved(views[0], "MPO", save_all=True, append_images=views[1:]))
    assert (header.format, header.notes) == ("MPO", ())


def test_a_header_states_the_stored_properties_of_the_file() -> None:
    data = saved(Image.fromarray(pattern()).convert("LA"), exif=with_orientation(6))
    assert read_header(data) == Header("PNG", "LA", 2, Size(40, 24), 6, ())


def test_I03_the_first_bytes_decide_the_format() -> None:
    assert read_header(saved(Image.fromarray(pattern()), "BMP")).format == "BMP"
    assert read_header((PHOTOS / "rocket.jpg").read_bytes()).format == "JPEG"


REJECTED = {
    "empty_file": b"",
    "not_an_image": b"hello, world: this is some text",
    "plugin_missing": b"\xff\x0a" + bytes(40),
    "undecodable": b"\x89PNG\r\n\x1a\n" + b"\xff" * 50,
}


@pytest.mark.parametrize("reason", REJECTED)
def test_I04_files_that_are_not_images_are_rejected_with_their_reason(tmp_path: Path, reason: str) -> None:
    path = tmp_path / "x.jpg"
    path.write_bytes(REJECTED[reason])
    for call in (lambda: read_header(path), lambda: decode(path, WHITE)):
        with pytest.raises(ImageError) as excinfo:
            call()
        assert excinfo.value.reason == reason
        assert excinfo.value.where == str(path)
        assert excinfo.value.detail
        assert excinfo.value.fix


@pytest.mark.parametrize(
    ("start", "word"),
    [(b"<!DOCTYPE html><html>", "web page"), (b"\0" * 64, "zero bytes"), (b"\xff\x0a1234", "jxl")],
)
def test_the_error_describes_the_content_of_a_file_that_is_not_an_image(start: bytes, word: str) -> None:
    with pytest.raises(ImageError, match=word):
        read_header(start)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP"])
def test_I01_decoding_detects_truncated_files(kind: str) -> None:
    with Image.open(PHOTOS / "chelsea.png") as photo:
        data = saved(photo, kind)
    with pytest.raises(ImageError) as excinfo:
        decode(data[: len(data) * 2 // 3], WHITE)
    assert excinfo.value.reason in {"truncated", "undecodable"}


def test_I02_random_damage_raises_only_image_errors() -> None:
    random = np.random.default_rng(3)
    small = Image.fromarray(pattern())
    for kind in ("JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP", "AVIF"):
        complete = np.frombuffer(saved(small, kind, exif=with_orientation(6)), np.uint8)
        for _ in range(60):
            data = complete.copy()
            data[random.integers(0, len(data), 4)] = random.integers(0, 256, 4)
            with suppress(ImageError):
                header = read_header(data.tobytes())
                pixels = decode(data.tobytes(), WHITE)
                assert Size(pixels.height, pixels.width) == header.size


def test_I05_truncated_images_are_never_allowed() -> None:
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    sources = Path(__file__).parents[3] / "pipeline"
    setting = "LOAD_TRUNCATED_IMAGES ="
    assert not [file for file in sources.rglob("*.py") if setting in file.read_text(encoding="utf-8")]


def test_I14_a_decompression_bomb_is_rejected_by_its_header() -> None:
    head = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    bomb = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    )
    with pytest.raises(ImageError, match=r"got 2,500,000,000 ") as excinfo:
        read_header(bomb)
    assert excinfo.value.reason == "too_large"


@pytest.mark.parametrize("size_wh", [(MAX_IMAGE_EDGE_PX, 1), (1, MAX_IMAGE_EDGE_PX)], ids=["wide", "tall"])
def test_I14_an_edge_of_the_maximum_length_is_accepted_and_a_longer_one_rejected(
    size_wh: tuple[int, int],
) -> None:
    width, height = size_wh
    assert read_header(saved(Image.new("L", (width, height)))).size == Size(height, width)
    longer = saved(Image.new("L", (width + (width > 1), height + (height > 1))))
    with pytest.raises(ImageError, match="an edge must be at most 65,535 pixels long") as excinfo:
        read_header(longer)
    assert excinfo.value.reason == "too_large"
    with pytest.raises(ImageError, match="at most 100 pixels"):
        decode(saved(Image.fromarray(pattern())), WHITE, max_px=100)
    with pytest.raises(ImageError, match="at most 65,535 pixels long"):
        read_header(saved(Image.new("1", (65_536, 1))))


def test_I15_a_huge_text_chunk_does_not_crash() -> None:
    plain = saved(Image.fromarray(pattern()))
    bomb = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(b"x" * 80_000_000))
    data = plain[:33] + bomb + plain[33:]
    with pytest.raises(ImageError) as excinfo:
        read_header(data)
    assert excinfo.value.reason == "undecodable"


def test_I20_the_error_for_a_deleted_or_changed_file_names_it(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    data = saved(Image.fromarray(pattern()))
    geometry = place(ladder(16, 8, 2.0), Size(24, 40))
    with pytest.raises(ImageError) as excinfo:
        load_pixels(path, geometry, WHITE, content_hash=hash_bytes(data))
    assert excinfo.value.reason == "vanished"
    path.write_bytes(data)
    with pytest.raises(ImageError) as excinfo:
        load_pixels(path, geometry, WHITE, content_hash=hash_bytes(b"another"))
    assert excinfo.value.reason == "changed"
    wrong = place(ladder(16, 8, 2.0), Size(24, 41))
    with pytest.raises(ImageError) as excinfo:
        load_pixels(path, wrong, WHITE, content_hash=hash_bytes(data))
    assert excinfo.value.reason == "size_disagrees"


@pytest.mark.parametrize("photo", ["chelsea.png", "rocket.jpg"])
@pytest.mark.parametrize(("resolution", "step"), [(256, 64), (96, 8), (512, 64)])
def test_B04_resizing_the_cropped_source_equals_cropping_the_resized_image(
    photo: str, resolution: int, step: int
) -> None:
    path = PHOTOS / photo
    complete = decode(path, WHITE)
    geometry = place(ladder(resolution, step, 3.0), Size(complete.height, complete.width))
    resized = complete.resize(
        (geometry.resized_size.width, geometry.resized_size.height), Image.Resampling.BICUBIC
    )
    top, left, height, width = geometry.crop
    expected = np.asarray(resized)[top : top + height, left : left + width].astype(int)
    pixels = load_pixels(path, geometry, WHITE, content_hash=hash_bytes(path.read_bytes()))
    assert pixels.shape == (*geometry.target_size, 3)
    assert pixels.dtype == np.uint8
    assert np.abs(pixels - expected).max() <= 1


def test_I26_an_extreme_aspect_ratio_is_resized_within_bounded_memory(tmp_path: Path) -> None:
    """Resizing all of 60000x1 to cover 576 px would take 34,560,000x576 pixels, 60 GB."""
    path = tmp_path / "strip.png"
    path.write_bytes(saved(Image.new("RGB", (60_000, 1), (1, 2, 3))))
    geometry = place(ladder(1024, 64, 3.0), Size(1, 60_000))
    pixels = load_pixels(path, geometry, WHITE, content_hash=hash_bytes(path.read_bytes()))
    assert pixels.shape == (576, 1728, 3)
    assert (pixels == (1, 2, 3)).all()


GOLDEN = {1: "90b817bb7c23085d1869be82a40deebcd61e1eda163a077ae0d9123954aac288"}


def test_golden_pixels_force_a_new_preprocessing_version(tmp_path: Path) -> None:
    """If this fails, the pixels have changed: raise PREPROCESSING_VERSION and add the new digest."""
    digest = hashlib.sha256()
    alpha = np.dstack([pattern(48, 80), pattern(48, 80)[..., 0]])
    levels = pattern(48, 80)[..., 0].astype(np.uint16) * 211
    images = [Image.fromarray(pattern(48, 80)), Image.fromarray(alpha), Image.fromarray(levels)]
    for index, image in enumerate(images):
        path = tmp_path / f"{index}.png"
        path.write_bytes(saved(image, exif=with_orientation(index + 5)))
        for resolution in (32, 160):
            geometry: Geometry = place(ladder(resolution, 8, 2.0), Size(80, 48))
            content_hash = hash_bytes(path.read_bytes())
            digest.update(load_pixels(path, geometry, (200, 100, 0), content_hash=content_hash).tobytes())
    assert digest.hexdigest() == GOLDEN[PREPROCESSING_VERSION]


@pytest.mark.parametrize(
    ("data", "edges_px", "num_scans"),
    [
        (saved(Image.fromarray(pattern())), 24 * 40, 1),
        (saved(Image.fromarray(pattern()), exif=with_orientation(6)), 24 * 40, 1),
        (with_late_orientation(pattern()), 24 * 40, 1),
        (saved(Image.fromarray(pattern()), "JPEG"), 24 * 40, 1),
        (jpeg_with_scans(17, edge_px=48), 48 * 48, 17),
        (saved(Image.fromarray(pattern()), "WEBP"), 24 * 40, 1),
    ],
    ids=["PNG", "rotated PNG", "PNG rotated late", "JPEG", "JPEG of 17 scans", "WebP"],
)
def test_the_cost_of_decoding_is_the_memory_that_it_may_need_and_the_pixels_of_all_scans(
    data: bytes, edges_px: int, num_scans: int
) -> None:
    file = io.BytesIO(data)
    cost = decode_cost(file, limits=DecodeLimits())
    assert (cost.passes_px, file.tell()) == (edges_px * num_scans, 0)

    enough, too_low = (DecodeLimits(max_bytes=cost.num_bytes - less) for less in (0, 1))
    assert decode_cost(file, limits=enough) == cost
    with decoded_within(data, WHITE, limits=enough) as image:
        assert image.width * image.height == edges_px
    for refused in (
        lambda: decode_cost(file, limits=too_low),
        lambda: decoded_within(data, WHITE, limits=too_low).__enter__(),
    ):
        with pytest.raises(ImageError, match="too_much_memory"):
            refused()


def test_the_largest_number_of_pixels_is_accepted_and_one_less_rejected() -> None:
    data = saved(Image.fromarray(pattern()))
    assert read_header(data, max_px=24 * 40).size == Size(24, 40)
    assert decode(data, WHITE, max_px=24 * 40).size == (40, 24)
    for call in (
        lambda: read_header(data, max_px=24 * 40 - 1),
        lambda: decode(data, WHITE, max_px=24 * 40 - 1),
    ):
        with pytest.raises(ImageError, match="too_large"):
            call()


@pytest.mark.parametrize(("draft_px", "edge_px"), [(None, 512), (257, 512), (256, 256), (100, 128), (9, 64)])
def test_a_draft_of_a_jpeg_is_the_smallest_that_is_not_smaller_than_asked(
    draft_px: int | None, edge_px: int
) -> None:
    image = Image.fromarray(pattern()).resize((512, 512))
    for image_format, expected_px in (("JPEG", edge_px), ("PNG", 512)):
        data = saved(image, image_format)
        with decoded_within(data, WHITE, limits=DecodeLimits(), draft_px=draft_px) as draft:
            assert draft.size == (expected_px, expected_px)


def test_reading_a_header_reserves_memory_only_if_pixels_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[int] = []

    class RecordingBudget(MemoryBudget):
        @contextmanager
        def reserved(self, num_bytes: int) -> Iterator[None]:
            reserved.append(num_bytes)
            with super().reserved(num_bytes):
                yield

    monkeypatch.setattr("pipeline.images.decode.DECODE_MEMORY", RecordingBudget(10**9))
    read_header(saved(Image.fromarray(pattern()), exif=with_orientation(6)))
    assert reserved == []
    read_header(with_late_orientation(pattern()))
    assert reserved == [24 * 40 * 4]


def test_an_accepted_image_is_decoded_again_whatever_its_size_and_memory() -> None:
    assert limits_of_accepted(Size(2, 3)) == DecodeLimits(MAX_IMAGE_PX, max_bytes=None)
    assert limits_of_accepted(Size(MAX_IMAGE_PX, 3)) == DecodeLimits(3 * MAX_IMAGE_PX, max_bytes=None)


def test_a_large_file_is_read_from_its_start_and_must_not_change_until_it_has_been_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = tmp_path / "x.png", saved(Image.fromarray(pattern()))
    monkeypatch.setattr("pipeline.images.decode.MAX_BUFFERED_BYTES", 10)
    path.write_bytes(data)
    with open_content(path, hash_bytes(data)) as content:
        assert (content.tell(), content.read()) == (0, data)

    for change in (lambda: path.write_bytes(data + b"more"), lambda: os.utime(path, ns=(1, 1))):
        with pytest.raises(ImageError, match="changed"), open_content(path, hash_bytes(data)):
            change()


def test_the_version_of_a_decoder_names_the_plug_in_of_its_format_and_becomes_outdated() -> None:
    assert decoder_version("PNG") == decoder_version(None) == DECODER
    assert is_current_decoder(DECODER)
    assert not is_current_decoder("latentline-0 pillow-1.0")
    assert not is_current_decoder(f"{DECODER} pillow-heif-0.1")


def test_the_version_of_the_decoder_of_heic_files_has_the_version_of_the_plug_in() -> None:
    heif = pytest.importorskip("pillow_heif")
    assert decoder_version("HEIF") == f"{DECODER} pillow-heif-{heif.__version__}"
    assert is_current_decoder(decoder_version("HEIF"))


def test_an_image_error_can_be_pickled() -> None:
    error = ImageError("truncated", "half of it", where="a.jpg", fix="copy it again")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.reason, copy.detail, copy.where, copy.fix) == (
        "truncated",
        "half of it",
        "a.jpg",
        "copy it again",
    )
    assert str(copy) == str(error)


def test_I21_a_folder_named_like_an_image_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(ImageError) as excinfo:
        decode(tmp_path, WHITE)
    assert excinfo.value.reason == "unreadable"
