"""Limits of decoding: the scans of a JPEG, the memory of pixels, and the processor time of a header."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pipeline.images.decode import DecodeLimits, decode, decode_cost, decoded, read_header
from pipeline.images.decode_limits import MAX_JPEG_SCANS, MemoryBudget, TimedFile, count_scans
from pipeline.images.formats import ImageError
from pipeline.images.geometry import Size
from tests.hostile_images import float_tiff, jpeg_with_scans, png, png_chunk
from tests.pipeline.dataset_folder import Folder

WHITE = (255, 255, 255)
SOS, EOI = b"\xff\xda", b"\xff\xd9"


def jpeg(size: int = 64, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.radial_gradient("L").resize((size, size)).convert("RGB").save(file, "JPEG", **options)
    return file.getvalue()


def test_a_baseline_jpeg_has_one_scan_and_a_progressive_one_ten() -> None:
    assert count_scans(io.BytesIO(jpeg())) == 1
    assert count_scans(io.BytesIO(jpeg(progressive=True))) == 10


def test_thumbnails_and_appended_data_are_no_scans() -> None:
    thumbnails = b"\xff\xe1\xff\xfe" + SOS * 32_766
    baseline = jpeg()
    assert count_scans(io.BytesIO(baseline[:2] + thumbnails + baseline[2:] + SOS * 200)) == 1
    progressive = jpeg(progressive=True)
    data = progressive[:2] + thumbnails + progressive[2:] + SOS * 200
    assert count_scans(io.BytesIO(data)) == 10
    assert decode(data, WHITE).size == (64, 64)


class Remote(io.BufferedReader):
    """A file whose descriptor is missing in one of the ways of libraries for remote files."""

    def __init__(self, data: bytes, error: Exception) -> None:
        super().__init__(io.BytesIO(data))  # pyright: ignore[reportArgumentType] - it has a raw file's methods
        self._error = error

    def fileno(self) -> int:
        raise self._error


def test_the_count_is_the_same_in_any_file_and_leaves_its_position(tmp_path: Path) -> None:
    path, data = tmp_path / "a.jpg", jpeg_with_scans(50)
    path.write_bytes(data)
    remote = [Remote(data, error) for error in (OSError(), ValueError(), AttributeError())]
    with path.open("rb") as local:
        for file in (local, io.BytesIO(data), *remote):
            file.seek(len(data) - 3)
            assert (count_scans(file), file.tell()) == (50, len(data) - 3)


FRAMES = [0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF]
PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}
OTHER_SEGMENTS = [0xC4, 0xC8, 0xCC, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, *range(0xE0, 0xF0), 0xFE]


def segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2, "big") + content


def frame(marker: int, channels: int) -> bytes:
    return segment(marker, bytes([8, 0, 64, 0, 64, channels]) + b"\x01\x11\x00" * channels)


def scan(channels: int) -> bytes:
    return segment(SOS[1], bytes([channels]) + b"\x01\x00" * channels + bytes(3))


@pytest.mark.parametrize("marker", FRAMES)
def test_every_scan_counts_if_the_frame_is_progressive_or_its_first_scan_lacks_a_channel(marker: int) -> None:
    start = b"\xff\xd8" + frame(marker, 3)
    complete, incomplete = start + scan(3) * 4 + EOI, start + scan(2) + scan(1) + scan(3) + EOI
    assert count_scans(io.BytesIO(complete)) == (4 if marker in PROGRESSIVE else 1)
    assert count_scans(io.BytesIO(incomplete)) == 3


@pytest.mark.parametrize("marker", OTHER_SEGMENTS)
def test_only_frames_state_the_number_of_channels(marker: int) -> None:
    like_a_frame = segment(marker, frame(0xC2, 9)[4:])
    data = b"\xff\xd8" + frame(0xC0, 3) + like_a_frame + scan(3) * 2 + EOI
    assert count_scans(io.BytesIO(data)) == 1


hidden = st.sampled_from([b"", b"\0", b"\xff", SOS, EOI, EOI + SOS * 120, frame(0xC2, 9), bytes(5) + b"\x09"])
other_segments = st.builds(segment, st.sampled_from(OTHER_SEGMENTS), hidden)
without_content = st.sampled_from([b"\xff\xfe\0\0", b"\xff\xfe\0\x01", b"\xff\x01", b"\xff\xd8"])
skipped = st.sampled_from(
    [b"\xff\x00", b"\xff\xff", b"\x07\xda", *(b"\xff" + bytes([0xD0 + n]) for n in range(8))]
)
anything_else = st.lists(other_segments | without_content | skipped, max_size=4).map(b"".join)
scans = st.lists(st.integers(1, 4), min_size=1, max_size=6)


@given(
    marker=st.sampled_from(FRAMES),
    channels=st.integers(1, 4),
    scans=scans,
    between=st.lists(anything_else, min_size=9, max_size=9),
    end=st.sampled_from([b"", EOI, EOI + SOS * 120, EOI + b"\0\2" + scan(3) * 3]),
)
def test_scans_are_counted_whatever_is_between_them(
    marker: int, channels: int, scans: list[int], between: list[bytes], end: bytes
) -> None:
    before, after, *rest = between
    data = b"\xff\xd8" + before + frame(marker, channels) + after
    data += b"".join(scan(number) + other for number, other in zip(scans, rest, strict=False)) + end
    has_all_channels = scans[0] >= channels and marker not in PROGRESSIVE
    assert count_scans(io.BytesIO(data)) == (1 if has_all_channels else len(scans))


def test_the_largest_number_of_scans_decodes_and_one_more_is_rejected_with_a_fix() -> None:
    assert decode(jpeg_with_scans(MAX_JPEG_SCANS), WHITE).size == (64, 64)
    with pytest.raises(ImageError, match="at most 100 scans") as caught:
        decode(jpeg_with_scans(MAX_JPEG_SCANS + 1), WHITE)
    assert caught.value.reason == "too_many_scans"
    assert "save it again" in caught.value.fix


def test_an_end_marker_inside_a_segment_does_not_hide_the_scans_behind_it() -> None:
    comment = b"\xff\xfe\x00\x06" + EOI + SOS
    data = jpeg_with_scans(500, between=comment)
    assert count_scans(io.BytesIO(data)) == MAX_JPEG_SCANS + 1


def test_a_segment_ends_where_its_length_says() -> None:
    """The last byte of the comment and the damaged bytes behind it would otherwise look like a scan."""
    comment = segment(0xFE, b"\0\xff") + SOS[1:] + b"\0\2"
    data = b"\xff\xd8" + frame(0xC2, 3) + scan(3) + comment + scan(3) + EOI
    assert count_scans(io.BytesIO(data)) == 2


def test_only_the_number_of_channels_decides_and_not_their_names() -> None:
    channels = b"\x03\x01\x22\0\x02\x11\0\x03\x11\0"
    start = b"\xff\xd8" + segment(0xC0, bytes([8, 0, 64, 0, 64]) + channels)
    for first in (b"\0", b"\x7f"):
        complete = segment(SOS[1], b"\x03" + (first + b"\0") * 3 + bytes(3))
        incomplete = segment(SOS[1], b"\x02" + (first + b"\0") * 2 + bytes(3))
        assert count_scans(io.BytesIO(start + complete * 2 + EOI)) == 1
        assert count_scans(io.BytesIO(start + incomplete * 2 + EOI)) == 2


@pytest.mark.timeout(10)
def test_thousands_of_scans_are_rejected_at_once(tmp_path: Path) -> None:
    path = tmp_path / "slow.jpg"
    path.write_bytes(jpeg_with_scans(2_000, edge_px=1_024))
    with pytest.raises(ImageError) as caught:
        decode(path, WHITE)
    assert caught.value.reason == "too_many_scans"
    assert caught.value.where == str(path)


@pytest.mark.parametrize(
    "data",
    [b"\xff\xd8\xff", b"\xff\xd8\xff\xda", b"\xff\xd8\xff\xc2\x00\x00\xff\xda\0", b"\xff\xd8" + scan(0) * 2],
)
def test_a_damaged_header_is_no_error_of_the_count(data: bytes) -> None:
    assert count_scans(io.BytesIO(data)) == 1


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


GIF = saved(Image.radial_gradient("L").resize((300, 200)), "GIF")


def with_canvas(width: int, height: int) -> bytes:
    """Return a GIF of another canvas; its frame has 300x200 pixels."""
    return GIF[:6] + struct.pack("<HH", width, height) + GIF[10:]


@pytest.mark.parametrize(("width", "height"), [(60_000, 60_000), (65_535, 3_000), (20_000, 10_000)])
def test_a_gif_with_a_canvas_that_is_too_large_is_rejected_by_the_scan(width: int, height: int) -> None:
    with pytest.raises(ImageError, match="it must have at most") as caught:
        read_header(with_canvas(width, height))
    assert caught.value.reason == "too_large"


@pytest.mark.parametrize(("width", "height"), [(10, 10), (299, 200), (300, 1)])
def test_a_gif_with_a_frame_larger_than_its_canvas_counts_with_the_size_of_the_frame(
    width: int, height: int
) -> None:
    data = with_canvas(width, height)
    assert read_header(data).size == Size(200, 300)
    assert decode_cost(io.BytesIO(data), limits=DecodeLimits()).num_bytes >= 300 * 200 * 4
    with pytest.raises(ImageError, match="at most 59,999 pixels, got 60,000"):
        decode(data, WHITE, max_px=59_999)


def test_only_the_first_frame_of_a_gif_is_decoded() -> None:
    """500 further frames of 60000x60000 would take 3.6 GB each."""
    frame = b"\x2c" + struct.pack("<HHHH", 0, 0, 60_000, 60_000) + b"\0\2\2\x44\1\0"
    image = decode(GIF[:-1] + frame * 500 + GIF[-1:], WHITE)
    assert image.tobytes() == decode(GIF, WHITE).tobytes()


@pytest.mark.parametrize("stated_wh", [(64, 64), (511, 512), (512, 513), (1024, 1024), (16, 4096)])
def test_a_heic_that_states_another_size_than_its_picture_is_rejected(stated_wh: tuple[int, int]) -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    file = io.BytesIO()
    pillow_heif.from_pillow(Image.new("RGB", (512, 512))).save(file)
    heic = file.getvalue()
    assert decode(heic, WHITE).size == (512, 512)
    lying = heic.replace(struct.pack(">II", 512, 512), struct.pack(">II", *stated_wh))
    assert lying != heic
    with pytest.raises(
        ImageError, match=r"Security limit exceeded|does not have the size signaled"
    ) as caught:
        decode(lying, WHITE)
    assert caught.value.reason == "undecodable"


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


LONG_HEADER = png(edge_px=16, bit_depth=8, colour_type=2, chunks=png_chunk(b"quIz", b"") * 100_000)


def test_a_header_that_takes_too_long_is_rejected_and_the_other_images_are_kept(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.add("long.png", LONG_HEADER)
    folder.add("good.png")
    assert len(folder.scan().table) == 2

    monkeypatch.setattr("pipeline.images.decode.MAX_HEADER_CPU_S", 0.01)
    monkeypatch.setattr("pipeline.images.decode.MAX_QUICK_BYTES", 1_000_000)
    result = folder.scan()
    assert result.rejected.select("path", "reason").rows() == [("long.png", "too_slow")]
    assert "0.01 s of processor time" in result.rejected["detail"].item()
    assert result.table["path"].to_list() == ["good.png"]


def test_reading_within_the_time_gives_the_file_s_bytes() -> None:
    file = TimedFile(io.BytesIO(b"abcdef"), max_cpu_s=10)
    assert file.read(2) == b"ab"
    file.seek(4)
    assert (file.tell(), file.read()) == (4, b"ef")
    with pytest.raises(ImageError, match="too_slow"):
        TimedFile(io.BytesIO(b"abcdef"), max_cpu_s=-1).read()


def test_the_limit_is_far_above_the_time_of_a_usual_header() -> None:
    assert read_header(LONG_HEADER).size == (16, 16)
