"""The perceptual hash of an image (FAILURES I24)."""

from __future__ import annotations

import io

import imagehash
import numpy as np
import pytest
from PIL import Image, ImageEnhance
from scipy.fft import dctn
from skimage import data

from pipeline.images.pixel_values import perceptual_hash

PHOTOS = [Image.fromarray(photo) for photo in (data.astronaut(), data.coffee(), data.cat(), data.rocket())]


def distance(one: Image.Image, other: Image.Image) -> int:
    hashes = perceptual_hash(one), perceptual_hash(other)
    assert hashes[0] is not None
    assert hashes[1] is not None
    return (hashes[0] ^ hashes[1]).bit_count()


def jpeg(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")


@pytest.mark.parametrize("photo", PHOTOS, ids=lambda photo: str(photo.size))
def test_I24_a_scaled_recompressed_or_brightened_photograph_stays_similar(photo: Image.Image) -> None:
    smaller = photo.resize((photo.width // 2, photo.height // 2))
    for changed in (
        smaller,
        photo.resize((800, 700)),
        jpeg(photo, 40),
        ImageEnhance.Brightness(photo).enhance(1.1),
    ):
        assert distance(photo, changed) <= 4
    for other in PHOTOS:
        assert other is photo or distance(photo, other) > 16


def library_hash(image: Image.Image) -> int:
    """The same picture's pHash by ImageHash, with its own conversion and transform."""
    return int(str(imagehash.phash(image)), 16)


def test_I24_the_hash_equals_that_of_imagehash_for_photographs_and_noise() -> None:
    # Edges below 128 pixels are not shrunk first, so both get the same picture.
    random = np.random.default_rng(7)
    for _ in range(1000):
        photo = PHOTOS[int(random.integers(len(PHOTOS)))]
        width, height = (int(edge) for edge in random.integers(20, 127, 2))
        left, top = int(random.integers(photo.width - 90)), int(random.integers(photo.height - 90))
        image = photo.crop((left, top, left + 90, top + 90)).resize((width, height))
        assert perceptual_hash(image) == library_hash(image)
    for _ in range(1000):
        height, width = random.integers(8, 64, 2)
        noise = Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
        assert perceptual_hash(noise) == library_hash(noise)
    for photo in PHOTOS:
        assert perceptual_hash(photo) == library_hash(photo.reduce(min(photo.size) // 64))


def test_I24_equal_frequencies_have_equal_bits_where_imagehash_depends_on_rounding() -> None:
    random = np.random.default_rng(0)
    library_differs = 0
    for _ in range(50):
        blocks = np.kron(random.integers(0, 256, (4, 4, 1)), np.ones((8, 8, 3)))  # many frequencies are zero
        image = Image.fromarray(blocks.astype(np.uint8))
        grey = np.asarray(image.convert("L"), dtype=np.longdouble)
        low = dctn(grey)[:8, :8].round(6)
        exact = int("".join("01"[bit] for bit in (low > np.median(low)).ravel().astype(int)), 2)
        assert perceptual_hash(image) == exact
        library_differs += library_hash(image) != exact
    assert library_differs


@pytest.mark.parametrize("size", [(1, 1), (3, 500), (64, 64), (1000, 700)], ids=str)
def test_a_single_colour_image_has_no_hash(size: tuple[int, int]) -> None:
    assert perceptual_hash(Image.new("RGB", size, (12, 200, 0))) is None


@pytest.mark.parametrize(
    ("height", "width", "sampled_wh", "shrink"),
    [
        (100, 127, None, 1),
        (128, 190, None, 2),
        (191, 128, None, 2),
        (192, 200, None, 3),
        (1023, 1100, None, 15),
        (1024, 1101, (550, 512), 8),
        (1101, 1025, (512, 550), 8),
    ],
)
def test_large_images_are_sampled_and_averaged_first_in_the_same_way_in_every_version(
    height: int, width: int, sampled_wh: tuple[int, int] | None, shrink: int
) -> None:
    """Hashes are stored, and those of different versions are compared with each other."""
    random = np.random.default_rng(height)
    noise = Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
    sampled = noise.resize(sampled_wh, Image.Resampling.NEAREST) if sampled_wh else noise
    assert perceptual_hash(noise) == library_hash(sampled.reduce(shrink))
