from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.images.decode import DecodeLimits, hash_bytes
from pipeline.images.formats import ImageError
from pipeline.images.geometry import Geometry, Placement, Size, ladder
from pipeline.images.mask import (
    MaskContent,
    fit_mask,
    load_mask,
    mask_weights,
    read_mask,
    show_mask,
)
from tests.pipeline.images.tiffs import grey_tiff
from tests.profiles import DISPLAY_P3, gamma_curve, grey_profile, matrix_profile

NUM_GEOMETRIES = 1_000
FACTOR = 8
PLACEMENTS = [Placement((ladder(64, 16, 3.0),), crop=crop) for crop in ("centre", "top", "random", "focus")]


def random_geometry(rng: np.random.Generator) -> Geometry:
    """Return the geometry of an image of random size, with a random kind of crop."""
    height, width = (int(edge) for edge in rng.integers(33, 260, 2))
    placement = PLACEMENTS[int(rng.integers(len(PLACEMENTS)))]
    focus = ([rng.random()], [rng.random()])
    return placement.assign_many([height], [width], [str(rng.integers(10**6))], focus).columns.one(0)


def smooth_image(rng: np.random.Generator, size: Size) -> Image.Image:
    """Return a coloured picture of gradients and blobs that stays away from black and white."""
    coarse = rng.integers(40, 216, (5, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((size.width, size.height), Image.Resampling.BILINEAR)


def luminance(pixels: np.ndarray) -> np.ndarray:
    return np.asarray(Image.fromarray(pixels).convert("L")).astype(int)


def test_a_mask_of_the_luminance_stays_the_luminance_over_random_geometries() -> None:
    rng = np.random.default_rng(1)
    largest = 0
    for _ in range(NUM_GEOMETRIES):
        geometry = random_geometry(rng)
        image = smooth_image(rng, geometry.original_size)
        target = geometry.target_size
        resized = image.resize(
            (target.width, target.height), Image.Resampling.BICUBIC, box=geometry.source_box
        )
        mask = fit_mask(image.convert("L"), geometry, flipped=False)
        largest = max(largest, int(np.abs(luminance(np.array(resized)) - mask).max()))
    assert largest <= 2


def test_mirroring_and_cropping_commute_exactly_with_averaging_over_random_geometries() -> None:
    rng = np.random.default_rng(2)
    for _ in range(NUM_GEOMETRIES):
        geometry = random_geometry(rng)
        original, target = geometry.original_size, geometry.target_size
        size = Size(target.height // FACTOR, target.width // FACTOR)
        mask = Image.fromarray(rng.integers(0, 256, original, dtype=np.uint8))
        values = fit_mask(mask, geometry, flipped=False)
        mirrored = fit_mask(mask, geometry, flipped=True)
        weights = mask_weights(values, size)
        np.testing.assert_array_equal(mask_weights(mirrored, size), weights[..., ::-1])

        rows, columns = (int(rng.integers(1, edge + 1)) for edge in size)
        part = mask_weights(values[: rows * FACTOR, : columns * FACTOR], Size(rows, columns))
        np.testing.assert_array_equal(part, weights[:, :rows, :columns])


def test_weights_are_the_means_of_the_pixels_of_each_latent_value() -> None:
    values = np.random.default_rng(3).integers(0, 256, (32, 48), dtype=np.uint8)
    weights = mask_weights(values, Size(4, 6))
    assert weights.shape == (1, 4, 6)
    for row in range(4):
        for column in range(6):
            area = values[row * 8 : row * 8 + 8, column * 8 : column * 8 + 8]
            assert weights[0, row, column] == np.float16(area.mean() / 255)
    assert (mask_weights(np.full((32, 48), 255, np.uint8), Size(4, 6)) == 1).all()


def png(image: Image.Image, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def half_white(mode: str = "L") -> Image.Image:
    mask = Image.new("L", (20, 10), 0)
    mask.paste(255, (0, 0, 10, 10))
    return mask.convert(mode)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "RGB", "RGBA", "P", "I;16", "CMYK"])
def test_grey_masks_of_every_mode_have_the_same_values(mode: str) -> None:
    if mode == "I;16":
        mask = Image.fromarray(np.asarray(half_white()).astype(np.uint16) * 257)
    else:
        mask = half_white(mode)
    file = io.BytesIO()
    mask.save(file, "TIFF" if mode == "CMYK" else "PNG")
    file.seek(0)
    content = read_mask(file, "file", limits=DecodeLimits())
    assert content.size == Size(10, 20)
    assert content.mean == pytest.approx(0.5, abs=0.01)


def test_a_mask_is_turned_by_its_exif_orientation() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = read_mask(io.BytesIO(png(half_white(), exif=exif)), "file", limits=DecodeLimits())
    assert content.size == Size(20, 10)


@pytest.mark.parametrize(
    ("image", "source", "reason"),
    [
        (Image.new("L", (9, 9), 0), "file", "mask_black"),
        (Image.new("L", (9, 9), 1), "file", "mask_black"),
        (Image.new("RGB", (9, 9), (200, 0, 0)), "file", "mask_not_grey"),
        (Image.new("LA", (9, 9), (255, 90)), "file", "mask_transparent"),
        (Image.new("RGB", (9, 9), (9, 9, 9)), "alpha", "mask_alpha_missing"),
        (Image.new("RGBA", (9, 9), (9, 9, 9, 0)), "alpha", "mask_black"),
    ],
    ids=["black", "0 and 1", "coloured", "transparent", "without opacity", "fully transparent"],
)
def test_a_mask_that_would_train_nothing_or_something_else_is_an_error(
    image: Image.Image, source: str, reason: str
) -> None:
    with pytest.raises(ImageError) as caught:
        read_mask(io.BytesIO(png(image)), source, limits=DecodeLimits())  # pyright: ignore[reportArgumentType]
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("colour", "expected"),
    [
        ((9, 9, 9), "accepted"),
        ((8, 8, 8), "mask_black"),
        ((200, 232, 200), "accepted"),
        ((200, 233, 216), "mask_not_grey"),
        ((216, 200, 233), "mask_not_grey"),
        ((200, 216, 233), "mask_not_grey"),
    ],
    ids=["least white", "too dark", "most colourful", "red and green", "green and blue", "red and blue"],
)
def test_a_mask_is_accepted_up_to_the_limits_of_darkness_and_colour(
    colour: tuple[int, ...], expected: str
) -> None:
    outcome = "accepted"
    try:
        read_mask(io.BytesIO(png(Image.new("RGB", (9, 9), colour))), "file", limits=DecodeLimits())
    except ImageError as err:
        outcome = err.reason
    assert outcome == expected, f"a mask of the colour {colour}"


def test_the_weights_of_a_mask_with_a_tint_are_its_green_values() -> None:
    tinted = Image.new("RGB", (9, 9), (200, 210, 220))
    content = read_mask(io.BytesIO(png(tinted)), "file", limits=DecodeLimits())
    assert content.mean == pytest.approx(210 / 255)


def test_the_opacity_of_an_image_is_its_mask(tmp_path: Path) -> None:
    pixels = np.full((32, 32, 4), 90, dtype=np.uint8)
    pixels[:, :16, 3], pixels[:, 16:, 3] = 255, 51
    path = tmp_path / "cut out.png"
    Image.fromarray(pixels).save(path)
    geometry = Placement((ladder(32, 32, 1.0),)).assign(Size(32, 32))
    assert geometry is not None
    options = {"content_hash": hash_bytes(path.read_bytes())}
    values = load_mask(path, geometry, "alpha", flipped=False, **options)
    np.testing.assert_array_equal(values, pixels[..., 3])
    mirrored = load_mask(path, geometry, "alpha", flipped=True, **options)
    np.testing.assert_array_equal(mirrored, pixels[:, ::-1, 3])


def test_a_changed_mask_file_is_not_read_as_the_recorded_one(tmp_path: Path) -> None:
    path = tmp_path / "mask.png"
    path.write_bytes(png(Image.new("L", (32, 32), 255)))
    geometry = Placement((ladder(32, 32, 1.0),)).assign(Size(32, 32))
    assert geometry is not None
    with pytest.raises(ImageError, match="changed"):
        load_mask(path, geometry, "file", flipped=False, content_hash="0" * 64)


def test_the_picture_of_a_mask_keeps_the_white_part_and_darkens_the_black_part(tmp_path: Path) -> None:
    path = tmp_path / "mask.png"
    path.write_bytes(png(half_white()))
    image = Image.new("RGB", (10, 5), (100, 150, 200))
    shown = show_mask(image, mask=path, source="file")
    assert shown.size == image.size
    assert shown.getpixel((1, 2)) == (100, 150, 200)
    red, green, blue = np.asarray(shown)[2, 8]
    assert red > green
    assert max(green, blue) < 60


GREY_PROFILES = {
    "linear": grey_profile(gamma_curve(1.0)),
    "gamma 1.8": grey_profile(gamma_curve(1.8)),
    "gamma 2.6": grey_profile(gamma_curve(2.6)),
    "wide gamut": matrix_profile(DISPLAY_P3, gamma_curve(1.4)),
}


def read(image: Image.Image, **options: object) -> MaskContent:
    return read_mask(io.BytesIO(png(image, **options)), "file", limits=DecodeLimits())


@pytest.mark.parametrize("mode", ["L", "I;16", "RGB", "P"])
@pytest.mark.parametrize("name", GREY_PROFILES)
def test_I33_a_profile_does_not_change_the_weights_of_a_mask(name: str, mode: str, tmp_path: Path) -> None:
    grey = np.arange(1_024, dtype=np.uint16).reshape(32, 32) % 256
    deep = Image.fromarray(grey * 257)
    mask = deep if mode == "I;16" else Image.fromarray(grey.astype(np.uint8)).convert(mode)
    plain = read(mask)
    with_profile = read(mask, icc_profile=GREY_PROFILES[name])
    assert (with_profile.mean, with_profile.size) == (plain.mean, plain.size)

    # Where the profile did not suit the mode, 0.3.0 used the stored numbers too.
    was_converted = name == "wide gamut" or mode in {"L", "I;16"}
    assert (plain.decoding, with_profile.decoding) == (None, "stored_numbers" if was_converted else None)

    path = tmp_path / "mask.png"
    path.write_bytes(png(mask, icc_profile=GREY_PROFILES[name]))
    geometry = Placement((ladder(32, 32, 1.0),)).assign(Size(32, 32))
    assert geometry is not None
    values = load_mask(path, geometry, "file", flipped=False, content_hash=hash_bytes(path.read_bytes()))
    np.testing.assert_array_equal(values, grey)


@pytest.mark.parametrize("name", GREY_PROFILES)
def test_I33_a_black_and_white_mask_with_a_profile_is_what_it_was(name: str) -> None:
    """Its key must not change: a profile maps black to black and white to white."""
    assert read(half_white(), icc_profile=GREY_PROFILES[name]) == read(half_white())


def test_I28_I29_levels_of_masks_are_decoded_as_those_of_images() -> None:
    halves = np.zeros((10, 20), np.uint16)
    halves[:, :5] = 65_535
    floats = (halves / 65_535).astype(np.float32)
    hot = np.where(floats > 0, np.float32(1.1), floats)
    for levels, mean, decoding in (
        (halves, 0.75, "white_is_zero"),
        (floats, 0.75, "white_is_zero"),
        (hot, 0.75, "levels white_is_zero"),
    ):
        content = io.BytesIO(grey_tiff(levels, white_is_zero=True))
        assert read_mask(content, "file", limits=DecodeLimits()) == MaskContent(Size(10, 20), mean, decoding)
