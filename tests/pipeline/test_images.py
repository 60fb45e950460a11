"""Decoding: pixels against expectations made without the decoder, every failure as one error."""

from __future__ import annotations

import hashlib
import io
import pickle
import struct
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import skimage
from PIL import Image, ImageCms, ImageFile
from PIL.PngImagePlugin import PngInfo

from pipeline.colour import to_srgb
from pipeline.geometry import Buckets, Geometry, Placement, Size, ladder
from pipeline.image_formats import ImageError
from pipeline.images import (
    PREPROCESSING_VERSION,
    decode,
    hash_bytes,
    load_pixels,
    read_header,
)

Pixels = npt.NDArray[np.uint8]
WHITE = (255, 255, 255)
PHOTOS = Path(skimage.__file__).parent / "data"

# Pillow warns about damaged metadata; here warnings are errors, and an error would be a rejection.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")


def place(buckets: Buckets, size: Size) -> Geometry:
    geometry = Placement((buckets,)).assign(size)
    assert geometry is not None
    return geometry


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pattern(height: int = 24, width: int = 40) -> Pixels:
    """Colours that differ in each row and column, so that no flip or turn gives them back."""
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows * 255 // height, columns * 255 // width, (rows * columns) % 256], -1).astype(
        np.uint8
    )


def decoded(data: bytes, background: tuple[int, int, int] = WHITE) -> npt.NDArray[np.int64]:
    image = decode(data, background)
    assert image.mode == "RGB"
    return np.asarray(image).astype(np.int64)


def with_orientation(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[274] = orientation
    return exif.tobytes()


def upright(stored: Pixels, orientation: int) -> Pixels:
    """What the EXIF standard says of the eight values, by array indexing."""
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
    [("PNG", {}), ("TIFF", {}), ("WEBP", {"lossless": True}), ("JPEG", {"quality": 100, "subsampling": 0})],
)
def test_I09_header_and_pixels_agree_for_all_orientations(
    kind: str, options: dict[str, object], orientation: int
) -> None:
    stored = pattern()
    data = saved(Image.fromarray(stored), kind, exif=with_orientation(orientation), **options)
    wanted = upright(stored, orientation)
    header = read_header(data)
    pixels = decoded(data)
    assert header.size == Size(*wanted.shape[:2])
    assert header.orientation == orientation
    assert pixels.shape == wanted.shape
    if kind == "JPEG":
        assert np.abs(pixels - wanted).mean() < 4
    else:
        assert (pixels == wanted).all()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_I09_orientation_behind_the_pixels_of_a_png_counts() -> None:
    stored = pattern()
    plain = saved(Image.fromarray(stored))
    end = plain.index(b"IEND") - 4
    late = plain[:end] + chunk(b"eXIf", with_orientation(6).removeprefix(b"Exif\0\0")) + plain[end:]
    assert read_header(late).size == Size(40, 24)
    assert (decoded(late) == upright(stored, 6)).all()


def test_I09_orientation_in_xmp_counts() -> None:
    info = PngInfo()
    info.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="8"/>')
    data = saved(Image.fromarray(pattern()), pnginfo=info)
    assert read_header(data).size == Size(40, 24)
    assert (decoded(data) == upright(pattern(), 8)).all()


def test_damaged_exif_does_not_cost_the_photograph() -> None:
    data = saved(Image.fromarray(pattern()), "PNG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert read_header(data).orientation == 1
    assert (decoded(data) == pattern()).all()


@pytest.mark.parametrize("mode", ["L", "P", "1", "YCbCr", "CMYK", "LA", "RGBA"])
def test_I11_modes_become_rgb(mode: str) -> None:
    data = saved(Image.fromarray(pattern()).convert(mode), "TIFF" if mode in {"YCbCr", "CMYK"} else "PNG")
    with Image.open(io.BytesIO(data)) as opened:
        wanted = np.asarray(opened.convert("RGB")).astype(np.int64)
    assert (decoded(data) == wanted).all()


@pytest.mark.parametrize("mode", ["PA", "RGBa", "La", "HSV", "LAB"])
def test_I11_modes_that_few_files_have_become_rgb(mode: str) -> None:
    if mode == "LAB":
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        grey = Image.fromarray(pattern()).convert("L").convert("RGB")
        image = ImageCms.profileToProfile(grey, srgb, lab, outputMode="LAB")
        assert image is not None
    else:
        through = {"PA": "P", "RGBa": "RGBA", "La": "LA"}.get(mode, "RGB")
        image = Image.fromarray(pattern()).convert(through).convert(mode)
        grey = image.convert({"La": "LA", "RGBa": "RGBA"}.get(mode, "RGB")).convert("RGB")
    pixels = np.asarray(to_srgb(image, WHITE)).astype(np.int64)
    assert np.abs(pixels - np.asarray(grey)).max() <= 3


def test_I11_sixteen_bit_grey_is_scaled_and_not_clipped() -> None:
    levels = np.linspace(0, 65535, 960).astype(np.uint16).reshape(24, 40)
    wanted = np.floor(levels.astype(np.float64) / 257 + 0.5)
    for kind in ("PNG", "TIFF"):
        pixels = decoded(saved(Image.fromarray(levels), kind))
        assert (pixels == wanted[..., None]).all()


@pytest.mark.parametrize(
    ("levels", "white"),
    [
        (np.linspace(0, 1, 960, dtype=np.float32), 1.0),
        (np.linspace(0.25, 255, 960, dtype=np.float32), 1.0),
        (np.linspace(0, 65535, 960).astype(np.int32), 65535.0),
        (np.linspace(0, 2**31 - 1, 960).astype(np.int32), 2.0**31 - 1),
    ],
)
def test_I11_float_and_32_bit_levels_are_scaled(levels: npt.NDArray[np.float32], white: float) -> None:
    white = 255.0 if levels.max() == 255 else white
    pixels = decoded(saved(Image.fromarray(levels.reshape(24, 40)), "TIFF"))
    wanted = np.floor(levels.astype(np.float64).reshape(24, 40) / white * 255 + 0.5)
    assert (pixels[..., 0] == wanted).all()


def test_I11_levels_that_are_no_numbers_are_refused() -> None:
    levels = np.full((4, 4), np.nan, dtype=np.float32)
    with pytest.raises(ImageError, match="not finite"):
        decode(saved(Image.fromarray(levels), "TIFF"), WHITE)


def blended(colours: Pixels, alpha: npt.NDArray[np.float64], background: tuple[int, int, int]) -> Pixels:
    share = alpha[..., None] / 255
    return (colours * share + np.array(background) * (1 - share)).round().astype(np.uint8)


def test_I10_transparency_shows_the_background() -> None:
    alpha = np.tile(np.linspace(0, 255, 40), (24, 1)).round()
    rgba = np.dstack([pattern(), alpha]).astype(np.uint8)
    pixels = decoded(saved(Image.fromarray(rgba, "RGBA")), (10, 200, 30))
    assert np.abs(pixels - blended(pattern(), alpha, (10, 200, 30))).max() <= 1
    assert (pixels[:, 0] == (10, 200, 30)).all()
    assert (pixels[:, -1] == pattern()[:, -1]).all()


def test_I10_grey_with_alpha_and_transparent_colours_show_the_background() -> None:
    alpha = np.tile(np.linspace(0, 255, 40), (24, 1)).round()
    grey = np.dstack([pattern()[..., 0], alpha]).astype(np.uint8)
    pixels = decoded(saved(Image.fromarray(grey, "LA")), (10, 200, 30))
    colours = np.repeat(grey[..., :1], 3, axis=-1)
    assert np.abs(pixels - blended(colours, alpha, (10, 200, 30))).max() <= 1

    keyed = np.zeros((2, 2, 3), np.uint8)
    keyed[0, 0] = (1, 2, 3)
    pixels = decoded(saved(Image.fromarray(keyed), transparency=(1, 2, 3)), (10, 200, 30))
    assert pixels[0, 0].tolist() == [10, 200, 30]
    assert pixels[1, 1].tolist() == [0, 0, 0]


def test_I10_palettes_with_transparency_show_the_background() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    assert decoded(saved(image, transparency=0), (9, 8, 7)).tolist() == [[[9, 8, 7], [0, 0, 255]]]
    some = saved(image, transparency=bytes([51, 255]))
    assert np.abs(decoded(some, (0, 0, 0)) - [[[51, 0, 0], [0, 0, 255]]]).max() <= 1


def test_I10_sixteen_bit_grey_with_a_transparent_level() -> None:
    levels = np.array([[0, 257, 65535]], dtype=np.uint16)
    pixels = decoded(saved(Image.fromarray(levels), transparency=257), (9, 8, 7))
    assert pixels.tolist() == [[[0, 0, 0], [9, 8, 7], [255, 255, 255]]]


def gamma_profile(red: tuple[float, float], gamma: float) -> bytes:
    """A matrix profile with sRGB's green, blue and white, another red, and a plain gamma curve."""

    def xyz(x: float, y: float) -> npt.NDArray[np.float64]:
        return np.array([x / y, 1.0, (1 - x - y) / y])

    primaries = np.stack([xyz(*red), xyz(0.3, 0.6), xyz(0.15, 0.06)], axis=1)
    white = xyz(0.3127, 0.3290)
    matrix = primaries * np.linalg.solve(primaries, white)
    bradford = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])
    d50 = np.array([0.9642, 1.0, 0.8249])
    adapt = np.linalg.inv(bradford) @ np.diag((bradford @ d50) / (bradford @ white)) @ bradford
    columns = (adapt @ matrix).T

    def fixed(values: npt.NDArray[np.float64]) -> bytes:
        return b"".join(struct.pack(">i", round(value * 65536)) for value in values)

    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256)) + b"\0\0"
    tags = [(b"wtpt", b"XYZ \0\0\0\0" + fixed(d50))]
    tags += [
        (name, b"XYZ \0\0\0\0" + fixed(c))
        for name, c in zip((b"rXYZ", b"gXYZ", b"bXYZ"), columns, strict=True)
    ]
    tags += [(name, curve) for name in (b"rTRC", b"gTRC", b"bTRC")]
    body, table, offset = b"", b"", 128 + 4 + 12 * len(tags)
    for name, data in tags:
        table += name + struct.pack(">II", offset + len(body), len(data))
        body += data
    size = offset + len(body)
    head = struct.pack(">I", size) + b"\0" * 4 + struct.pack(">I", 0x02100000) + b"mntrRGB XYZ " + b"\0" * 12
    head += b"acsp" + b"\0" * 28 + fixed(d50)
    return head.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + body


def test_I12_a_profile_is_converted_to_srgb_as_the_arithmetic_says() -> None:
    """Greys of a gamma 1.8 profile: linear light is level ** 1.8, encoded again by the sRGB curve."""
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    data = saved(Image.fromarray(np.dstack([levels] * 3)), icc_profile=gamma_profile((0.64, 0.33), 1.8))
    light = (levels / 255.0) ** (round(1.8 * 256) / 256)
    encoded = np.where(light <= 0.0031308, light * 12.92, 1.055 * light ** (1 / 2.4) - 0.055)
    assert np.abs(decoded(data) - (encoded * 255)[..., None]).max() <= 1.5
    assert read_header(data).notes == ("colour_profile",)


def test_I12_a_wider_red_becomes_a_stronger_red() -> None:
    muted = Image.fromarray(np.full((4, 4, 3), (200, 100, 100), np.uint8))
    same = decoded(saved(muted, icc_profile=gamma_profile((0.64, 0.33), 2.2)))[0, 0]
    wide = decoded(saved(muted, icc_profile=gamma_profile((0.68, 0.32), 2.2)))[0, 0]
    assert wide[0] - wide[1] > same[0] - same[1] + 2


def test_I12_srgb_itself_changes_nothing() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    data = saved(Image.fromarray(pattern()), icc_profile=profile)
    assert (decoded(data) == pattern()).all()
    assert read_header(data).notes == ()


@pytest.mark.parametrize("profile", [b"no profile", b"\0" * 200])
def test_I12_an_unusable_profile_is_ignored(profile: bytes) -> None:
    assert (decoded(saved(Image.fromarray(pattern()), icc_profile=profile)) == pattern()).all()


def test_I12_an_rgb_profile_fits_grey_images_and_no_cmyk() -> None:
    profile = gamma_profile((0.64, 0.33), 1.8)
    grey = pattern()[..., 0]
    colours = decoded(saved(Image.fromarray(np.dstack([grey] * 3)), icc_profile=profile))
    assert (decoded(saved(Image.fromarray(grey), icc_profile=profile)) == colours).all()
    assert (colours[12] != grey[12, :, None]).all()
    inks = Image.fromarray(pattern()).convert("CMYK")
    assert (decoded(saved(inks, "TIFF", icc_profile=profile)) == np.asarray(inks.convert("RGB"))).all()


def test_I13_the_first_frame_of_an_animation_is_taken() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert (decoded(data) == (255, 0, 0)).all(), kind
        assert read_header(data).notes == ("animated",), kind


def test_I03_the_first_bytes_decide() -> None:
    assert read_header(saved(Image.fromarray(pattern()), "BMP")).format == "BMP"
    assert read_header((PHOTOS / "rocket.jpg").read_bytes()).format == "JPEG"


REFUSED = {
    "empty_file": b"",
    "not_an_image": b"hello, world: this is some text",
    "plugin_missing": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
    "undecodable": b"\x89PNG\r\n\x1a\n" + b"\xff" * 50,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_I04_files_that_are_no_images_are_refused_with_their_reason(tmp_path: Path, reason: str) -> None:
    path = tmp_path / "x.jpg"
    path.write_bytes(REFUSED[reason])
    for call in (lambda: read_header(path), lambda: decode(path, WHITE)):
        with pytest.raises(ImageError) as caught:
            call()
        assert caught.value.reason == reason
        assert caught.value.where == str(path)
        assert caught.value.detail
        assert caught.value.fix


@pytest.mark.parametrize(
    ("start", "word"),
    [(b"<!DOCTYPE html><html>", "web page"), (b"\0" * 64, "zeros"), (b"\xff\x0a1234", "jxl")],
)
def test_what_a_file_is_instead_is_said(start: bytes, word: str) -> None:
    with pytest.raises(ImageError, match=word):
        read_header(start)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP"])
def test_I01_truncated_files_are_found_by_decoding(kind: str) -> None:
    with Image.open(PHOTOS / "chelsea.png") as photo:
        data = saved(photo, kind)
    with pytest.raises(ImageError) as caught:
        decode(data[: len(data) * 2 // 3], WHITE)
    assert caught.value.reason in {"truncated", "undecodable"}


def test_I02_random_damage_raises_nothing_but_image_errors() -> None:
    random = np.random.default_rng(3)
    small = Image.fromarray(pattern())
    for kind in ("JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP", "AVIF"):
        whole = np.frombuffer(saved(small, kind, exif=with_orientation(6)), np.uint8)
        for _ in range(60):
            data = whole.copy()
            data[random.integers(0, len(data), 4)] = random.integers(0, 256, 4)
            with suppress(ImageError):
                header = read_header(data.tobytes())
                pixels = decode(data.tobytes(), WHITE)
                assert Size(pixels.height, pixels.width) == header.size


def test_I05_truncated_images_are_never_allowed() -> None:
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    sources = Path(__file__).parents[2] / "pipeline"
    setting = "LOAD_TRUNCATED_IMAGES ="
    assert not [file for file in sources.rglob("*.py") if setting in file.read_text(encoding="utf-8")]


def test_I14_a_bomb_is_refused_by_its_header() -> None:
    head = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    bomb = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    )
    with pytest.raises(ImageError, match=r"2,500,000,000 pixels") as caught:
        read_header(bomb)
    assert caught.value.reason == "too_large"
    with pytest.raises(ImageError, match="limit is 100"):
        decode(saved(Image.fromarray(pattern())), WHITE, max_px=100)
    with pytest.raises(ImageError, match="longer than 65,535"):
        read_header(saved(Image.new("1", (65_536, 1))))


def test_I15_a_huge_text_chunk_is_no_crash() -> None:
    plain = saved(Image.fromarray(pattern()))
    bomb = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(b"x" * 80_000_000))
    data = plain[:33] + bomb + plain[33:]
    with pytest.raises(ImageError) as caught:
        read_header(data)
    assert caught.value.reason == "undecodable"


def test_I20_a_file_that_went_or_changed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    data = saved(Image.fromarray(pattern()))
    geometry = place(ladder(16, 8, 2.0), Size(24, 40))
    with pytest.raises(ImageError) as caught:
        load_pixels(path, geometry, WHITE, content_hash=hash_bytes(data))
    assert caught.value.reason == "vanished"
    path.write_bytes(data)
    with pytest.raises(ImageError) as caught:
        load_pixels(path, geometry, WHITE, content_hash=hash_bytes(b"another"))
    assert caught.value.reason == "changed"
    wrong = place(ladder(16, 8, 2.0), Size(24, 41))
    with pytest.raises(ImageError) as caught:
        load_pixels(path, wrong, WHITE, content_hash=hash_bytes(data))
    assert caught.value.reason == "size_disagrees"


@pytest.mark.parametrize("photo", ["chelsea.png", "rocket.jpg"])
@pytest.mark.parametrize(("resolution", "step"), [(256, 64), (96, 8), (512, 64)])
def test_B04_the_crop_of_the_source_is_what_resizing_all_and_cropping_gives(
    photo: str, resolution: int, step: int
) -> None:
    path = PHOTOS / photo
    whole = decode(path, WHITE)
    geometry = place(ladder(resolution, step, 3.0), Size(whole.height, whole.width))
    resized = whole.resize(
        (geometry.resized_size.width, geometry.resized_size.height), Image.Resampling.BICUBIC
    )
    top, left, height, width = geometry.crop
    wanted = np.asarray(resized)[top : top + height, left : left + width].astype(int)
    pixels = load_pixels(path, geometry, WHITE, content_hash=hash_bytes(path.read_bytes()))
    assert pixels.shape == (*geometry.target_size, 3)
    assert pixels.dtype == np.uint8
    assert np.abs(pixels - wanted).max() <= 1


def test_I26_a_strip_is_resized_within_bounded_memory(tmp_path: Path) -> None:
    """Covering 60000x1 whole at 576 px would take 34,560,000x576 pixels, 60 GB."""
    path = tmp_path / "strip.png"
    path.write_bytes(saved(Image.new("RGB", (60_000, 1), (1, 2, 3))))
    geometry = place(ladder(1024, 64, 3.0), Size(1, 60_000))
    pixels = load_pixels(path, geometry, WHITE, content_hash=hash_bytes(path.read_bytes()))
    assert pixels.shape == (576, 1728, 3)
    assert (pixels == (1, 2, 3)).all()


GOLDEN = {1: "90b817bb7c23085d1869be82a40deebcd61e1eda163a077ae0d9123954aac288"}


def test_golden_pixels_force_a_new_preprocessing_version(tmp_path: Path) -> None:
    """If this fails, the same file gives other pixels: raise PREPROCESSING_VERSION and add its digest."""
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


def test_the_error_survives_a_process_boundary() -> None:
    error = ImageError("truncated", "half of it", where="a.jpg", fix="copy it again")
    back = pickle.loads(pickle.dumps(error))
    assert (back.reason, back.detail, back.where, back.fix) == (
        "truncated",
        "half of it",
        "a.jpg",
        "copy it again",
    )
    assert str(back) == str(error)


def test_I21_a_folder_named_like_an_image_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(ImageError) as caught:
        decode(tmp_path, WHITE)
    assert caught.value.reason == "unreadable"
