"""The memory of decoding is estimated before it happens, limited per image, and shared by all threads."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.images.decode import DecodeLimits, decode, decoded
from pipeline.images.decode_limits import MemoryBudget
from pipeline.images.formats import ImageError
from tests.hostile_images import float_tiff, png

WHITE = (255, 255, 255)
EDGE_PX = 2_000

_MEASURE = """
import json, sys
from contextlib import contextmanager
from pathlib import Path
from pipeline.images import decode

def memory(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) * 1024

reserved = []

class RecordingBudget:
    @contextmanager
    def reserved(self, num_bytes):
        reserved.append(num_bytes)
        yield

decode.DECODE_MEMORY = RecordingBudget()
measured = []
# The first image also loads the libraries that decode and convert.
decode.decode(next(Path(sys.argv[1]).glob("16 bit.png")).read_bytes(), (255, 255, 255))
for path in sorted(Path(sys.argv[1]).iterdir()):
    data = path.read_bytes()
    open("/proc/self/clear_refs", "w").write("5")
    before = memory("VmRSS")
    decode.decode(data, (255, 255, 255))
    measured.append([path.name, memory("VmHWM") - before, reserved[-1]])
print(json.dumps(measured))
"""


def picture() -> Image.Image:
    levels = np.zeros((EDGE_PX, EDGE_PX, 3), dtype=np.uint8)
    levels[:, :, 0] = np.arange(EDGE_PX) % 251
    levels[:, :, 1] = (np.arange(EDGE_PX) % 241)[:, None]
    return Image.fromarray(levels)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def rotated() -> Any:
    exif = Image.Exif()
    exif[274] = 6
    return exif.tobytes()


GREY = np.asarray(picture())[:, :, 0]
CASES: dict[str, bytes] = {
    "RGB.jpg": saved(picture(), "JPEG"),
    "rotated.jpg": saved(picture(), "JPEG", exif=rotated()),
    "progressive.jpg": saved(picture(), "JPEG", progressive=True, subsampling=0),
    "RGBA.png": saved(picture().convert("RGBA"), "PNG", compress_level=1),
    "16 bit.png": saved(Image.fromarray(GREY.astype(np.uint16) * 200), "PNG", compress_level=1),
    "palette.gif": saved(picture(), "GIF"),
    "float.tif": saved(Image.fromarray(GREY.astype(np.float32)), "TIFF", compression="tiff_deflate"),
    "one strip.tif": saved(picture(), "TIFF", compression="tiff_deflate", strip_size=3 * EDGE_PX**2),
    "a.webp": saved(picture(), "WEBP", method=0),
    "a.avif": saved(picture(), "AVIF", speed=10),
    "a.jp2": saved(picture(), "JPEG2000"),
    "CMYK.jpg": saved(picture().convert("CMYK"), "JPEG"),
}


def test_images_need_no_more_memory_than_is_reserved_for_them(tmp_path: Path) -> None:
    for name, data in CASES.items():
        (tmp_path / name).write_bytes(data)
    command = [sys.executable, "-c", _MEASURE, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, check=True, text=True)
    for name, measured, reserved in json.loads(result.stdout):
        # Strips and the decoders' libraries need up to 30 MB in addition.
        assert measured <= reserved + 40_000_000, name
        assert reserved <= 20 * EDGE_PX**2, name


def test_an_image_above_the_limit_is_rejected_with_the_limit_that_would_accept_it() -> None:
    data = saved(Image.new("I;16", (100, 100)), "PNG")
    with (
        pytest.raises(ImageError, match="needs 60,000 bytes of memory, and the limit is 59,999") as caught,
        decoded(data, WHITE, limits=DecodeLimits(max_bytes=59_999)),
    ):
        pytest.fail("it was decoded")
    assert caught.value.reason == "too_much_memory"
    assert "checks.max_decode_bytes to 60000" in caught.value.fix
    with decoded(data, WHITE, limits=DecodeLimits(max_bytes=60_000)) as image:
        assert image.size == (100, 100)


@pytest.mark.parametrize(
    "data",
    [float_tiff(), png(), png(bit_depth=8, colour_type=6)],
    ids=["TIFF of floats", "PNG of 16 bits", "PNG with opacity"],
)
def test_small_files_with_many_pixels_are_rejected_before_they_are_decoded(data: bytes) -> None:
    assert len(data) < 4_000_000
    with pytest.raises(ImageError, match="max_decode_bytes") as caught:
        decode(data, WHITE)
    assert caught.value.reason == "too_much_memory"


def test_threads_share_the_budget_and_a_large_request_is_not_delayed_forever() -> None:
    budget = MemoryBudget(10)
    lock, current, most = threading.Lock(), [0], [0]
    done: list[int] = []

    def use(number: int) -> None:
        with budget.reserved(number):
            with lock:
                current[0] += number
                most[0] = max(most[0], current[0])
            time.sleep(0.01)
            with lock:
                current[0] -= number
        done.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in (4, 4, 4, 25, 4, 4, 10, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert sorted(done) == [1, 4, 4, 4, 4, 4, 10, 25]
    assert most[0] == 25  # more than the budget only alone


def test_the_budget_is_free_again_after_an_error() -> None:
    budget = MemoryBudget(10)
    for _ in range(3):
        with pytest.raises(ValueError, match="x"), budget.reserved(10):
            raise ValueError("x")


def test_converting_in_strips_changes_no_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    grey = rng.integers(0, 65_536, (61, 47))
    rgba = Image.fromarray(rng.integers(0, 256, (61, 47, 4), dtype=np.uint8), "RGBA")
    exif = rotated()
    images = [
        saved(Image.fromarray(grey.astype(np.uint16)), "PNG"),
        saved(Image.fromarray(grey.astype(np.int32) - 500), "TIFF"),
        saved(Image.fromarray((grey / 70_000).astype(np.float32)), "TIFF"),
        saved(rgba, "PNG", exif=exif),
        saved(rgba.convert("LA"), "PNG"),
        saved(rgba.convert("RGB").quantize(16), "PNG", transparency=3),
        saved(rgba.convert("RGB"), "PNG", transparency=(1, 2, 3)),
        saved(rgba.convert("RGB").convert("CMYK"), "TIFF"),
        saved(rgba.convert("RGB").convert("LAB"), "TIFF"),
    ]
    whole = [np.asarray(decode(data, (9, 99, 199))) for data in images]
    # Strips of two rows, and of one, as for an image that is wider than a strip.
    for strip_px in (100, 10):
        monkeypatch.setattr("pipeline.images.colour.STRIP_PX", strip_px)
        for data, expected in zip(images, whole, strict=True):
            np.testing.assert_array_equal(np.asarray(decode(data, (9, 99, 199))), expected)
