"""An AVIF with AV1 pictures of other sizes than its boxes state is rejected before it is decoded (I14)."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.images.avif import boxes
from pipeline.images.decode import DecodeLimits, decode, decode_cost, read_header
from pipeline.images.formats import ImageError
from tests.pipeline.pixels import WHITE, saved


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    levels = np.linspace(0, 255, width * height).astype(np.uint8).reshape(height, width)
    return Image.fromarray(levels).convert(mode)


def avif(width: int, height: int, mode: str = "RGB", **options: Any) -> bytes:
    return saved(picture(width, height, mode), "AVIF", speed=10, **options)


def animation(width: int, height: int) -> bytes:
    frames = [picture(width, height), picture(width, height).rotate(180)]
    return saved(frames[0], "AVIF", speed=10, save_all=True, append_images=frames[1:])


def stating(data: bytes, width: int, height: int) -> bytes:
    """Return a file whose boxes `ispe` state another size."""
    first, *others = data.split(b"ispe\0\0\0\0")
    return b"".join(
        [first, *(b"ispe\0\0\0\0" + struct.pack(">II", width, height) + each[8:] for each in others)]
    )


def track_stating(data: bytes, width: int, height: int) -> bytes:
    """Return an animation whose tracks state another size."""
    data = stating(data, width, height)
    position = 0
    while (position := data.find(b"tkhd", position + 1)) > 0:
        end = position - 4 + int.from_bytes(data[position - 4 : position], "big")
        data = data[: end - 8] + struct.pack(">II", width << 16, height << 16) + data[end:]
    return data


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(content), kind) + content


def grid(tile: bytes, stated_wh: tuple[int, int], canvas_wh: tuple[int, int], columns: int) -> bytes:
    """Return an AVIF with a grid of one row, whose tiles are all the picture of the file `tile`."""
    meta = dict(boxes(dict(boxes(tile))[b"meta"][4:]))
    properties = dict(boxes(dict(boxes(meta[b"iprp"]))[b"ipco"]))
    coded = bytes(dict(boxes(tile))[b"mdat"])
    layout = struct.pack(">BBBBHH", 0, 0, 0, columns - 1, *canvas_wh)
    items = range(1, columns + 2)

    ftyp = box(b"ftyp", b"avif\0\0\0\0avifmif1miaf")
    hdlr = box(b"hdlr", bytes(8) + b"pict" + bytes(13))
    pitm = box(b"pitm", bytes(4) + struct.pack(">H", 1))
    infe = [
        box(b"infe", b"\2\0\0\0" + struct.pack(">HH4sx", item, 0, b"grid" if item == 1 else b"av01"))
        for item in items
    ]
    iinf = box(b"iinf", bytes(4) + struct.pack(">H", len(infe)) + b"".join(infe))
    iref = box(
        b"iref", bytes(4) + box(b"dimg", struct.pack(f">HH{columns}H", 1, columns, *range(2, columns + 2)))
    )
    ispe = [box(b"ispe", bytes(4) + struct.pack(">II", *size)) for size in (canvas_wh, stated_wh)]
    ipco = box(
        b"ipco", b"".join(ispe) + box(b"av1C", properties[b"av1C"]) + box(b"pixi", properties[b"pixi"])
    )
    links = [struct.pack(">HB", item, 2) + (b"\1\4" if item == 1 else b"\2\x83") for item in items]
    links = [link[:2] + b"\3" + link[3:] + b"\4" if number else link for number, link in enumerate(links)]
    ipma = box(b"ipma", bytes(4) + struct.pack(">I", len(links)) + b"".join(links))

    def iloc(start: int) -> bytes:
        places = [(start, 8), *((start + 8, len(coded)) for _ in range(columns))]
        listed = (
            struct.pack(">HHHII", item, 0, 1, *place) for item, place in zip(items, places, strict=True)
        )
        return box(b"iloc", bytes(4) + b"\x44\0" + struct.pack(">H", len(places)) + b"".join(listed))

    def all_of_meta(start: int) -> bytes:
        return box(b"meta", bytes(4) + hdlr + pitm + iinf + iref + iloc(start) + box(b"iprp", ipco + ipma))

    start = len(ftyp) + len(all_of_meta(0)) + 8
    return ftyp + all_of_meta(start) + box(b"mdat", layout + coded)


def with_long_box_first(data: bytes) -> bytes:
    """Return a file with a box of a 64-bit length before "meta", and its data where they were."""
    size = int.from_bytes(data[:4], "big")
    empty = struct.pack(">I4sQ", 1, b"free", 16)
    position = data.index(b"iloc")
    # Version 0 with 4-byte offsets: item, reference, number of extents, offset.
    offset = position + 12 + 6
    old = int.from_bytes(data[offset : offset + 4], "big")
    patched = data[:offset] + struct.pack(">I", old + len(empty)) + data[offset + 4 :]
    return patched[:size] + empty + patched[size:]


TILE = avif(64, 64)


def with_meta_last(data: bytes) -> bytes:
    """Return a file with "meta" behind the data, with size 0, which means up to the end of the file."""
    named = dict(boxes(data))
    ftyp, meta, mdat = (bytes(named[kind]) for kind in (b"ftyp", b"meta", b"mdat"))
    position = meta.index(b"iloc") + 4 + 14
    offset = int.from_bytes(meta[position : position + 4], "big") - len(meta) - 8
    meta = meta[:position] + struct.pack(">I", offset) + meta[position + 4 :]
    return box(b"ftyp", ftyp) + box(b"mdat", mdat) + bytes(4) + b"meta" + meta


VALID = {
    "usual": (avif(64, 48), (64, 48)),
    "odd edges": (avif(37, 61), (37, 61)),
    "transparent": (avif(64, 48, "RGBA"), (64, 48)),
    "animated": (animation(64, 48), (64, 48)),
    "animated, odd edges": (animation(33, 35), (33, 35)),
    "one tile": (grid(TILE, (64, 64), (64, 64), 1), (64, 64)),
    "three tiles": (grid(TILE, (64, 64), (192, 64), 3), (192, 64)),
    "cropped tiles": (grid(TILE, (64, 64), (100, 50), 2), (100, 50)),
    "meta up to the end": (with_meta_last(avif(64, 48)), (64, 48)),
    "64-bit box": (with_long_box_first(avif(64, 48)), (64, 48)),
}

LARGE_TILE = avif(256, 256)
LYING = {
    "larger picture": stating(avif(256, 256), 64, 64),
    "larger in one direction": stating(avif(64, 256), 64, 64),
    "smaller picture": stating(avif(64, 64), 256, 256),
    "edges exchanged": stating(avif(64, 128), 128, 64),
    "larger transparency": stating(avif(256, 256, "RGBA"), 64, 64),
    "larger by one": stating(avif(65, 65), 64, 64),
    "animation": track_stating(animation(256, 256), 64, 64),
    "smaller animation": track_stating(animation(64, 64), 256, 256),
    "tiles larger than stated": grid(LARGE_TILE, (64, 64), (192, 64), 3),
    "tile larger than the canvas": grid(LARGE_TILE, (256, 256), (64, 64), 1),
    "meta up to the end": stating(with_meta_last(avif(256, 256)), 64, 64),
    "behind a 64-bit box": stating(with_long_box_first(avif(256, 256)), 64, 64),
}


@pytest.mark.parametrize("name", VALID)
def test_I14_valid_avif_files_are_decoded(name: str) -> None:
    data, size_wh = VALID[name]
    assert decode(data, WHITE).size == size_wh


@pytest.mark.parametrize("name", LYING)
def test_I14_an_avif_that_states_another_size_than_its_picture_is_rejected(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.avif"
    path.write_bytes(LYING[name])
    assert read_header(path).format == "AVIF", "the scan lists it"
    for open_file in (path.read_bytes, lambda: path):
        with pytest.raises(ImageError, match="its container states") as caught:
            decode(open_file(), WHITE)
        assert caught.value.reason == "size_disagrees"
        assert "save the image again" in caught.value.fix
    with pytest.raises(ImageError, match="size_disagrees"):
        decode_cost(io.BytesIO(LYING[name]), limits=DecodeLimits())


def test_I14_the_message_names_both_sizes() -> None:
    with pytest.raises(ImageError) as caught:
        decode(stating(avif(256, 128), 64, 32), WHITE)
    expected = "its container states 32x64 (height x width), but its AV1 picture has 128x256"
    assert caught.value.detail == expected


def bits(*fields: tuple[int, int]) -> str:
    """Return numbers with their lengths as binary digits."""
    return "".join(f"{value:0{length}b}" if length else "" for value, length in fields)


def unit(kind: int, digits: str) -> bytes:
    """Return a unit of AV1 with these binary digits."""
    data = bytes(int(digits[start : start + 8].ljust(8, "0"), 2) for start in range(0, len(digits), 8))
    return bytes([kind << 3 | 2, len(data) & 127 | 128, len(data) >> 7 & 127 | 128, len(data) >> 14]) + data


def still(frame_px: int | None, *, max_px: int = 64, size_bits: int = 16, features: str = "") -> bytes:
    """Return a grey AVIF of `max_px` whose sequence header is not reduced.

    Its key frame states `frame_px` as its own size unless it is None. The features are optional fields that
    come before that size in the headers.
    """
    has = {name: name in features for name in ("timing", "model", "ids", "order", "screen", "integer")}
    sequence = bits((0, 3), (1, 1), (0, 1), (has["timing"], 1))
    if has["timing"]:
        sequence += bits((1, 32), (25, 32), (0, 1), (has["model"], 1))
        sequence += bits((9, 5), (1, 32), (9, 5), (9, 5)) if has["model"] else ""
    sequence += bits((0, 1), (0, 5), (0, 12), (31, 5), (0, 1), *([(0, 1)] if has["model"] else []))
    sequence += bits((size_bits - 1, 4), (size_bits - 1, 4), (max_px - 1, size_bits), (max_px - 1, size_bits))
    sequence += bits(
        (has["ids"], 1), *([(5, 4), (3, 3)] if has["ids"] else []), (0, 3 + 4), (has["order"], 1)
    )
    sequence += bits((0, 2)) if has["order"] else ""
    # Screen content and integer motion: chosen by each frame, or never.
    sequence += bits((1, 1), (has["integer"], 1)) if has["screen"] else bits((0, 2))
    sequence += bits((0, 1)) if has["screen"] and not has["integer"] else ""
    sequence += bits((6, 3)) if has["order"] else ""
    sequence += bits((0, 3), (0, 1), (1, 1), (0, 1), (1, 1), (0, 1), (1, 1))

    edge_px = frame_px or max_px
    frame = bits((0, 1), (0, 2), (1, 1), *([(7, 10)] if has["model"] else []), (1, 1))
    frame += bits((1, 1), *([(1, 1)] if has["integer"] else [])) if has["screen"] else ""
    frame += bits(
        *([(9, 11)] if has["ids"] else []), (frame_px is not None, 1), *([(0, 7)] if has["order"] else [])
    )
    frame += bits((0, 1)) if has["model"] else ""
    frame += bits((edge_px - 1, size_bits), (edge_px - 1, size_bits)) if frame_px else ""
    # The same size when rendered, no block copies, one tile, a quantizer, and no filters.
    frame += bits((0, 1), *([(0, 1)] if has["screen"] else []))
    frame += bits((1, 1), *([(0, 2)] if edge_px > 64 else []), (100, 8), (0, 4), (0, 6 + 6 + 3), (0, 3))
    frame += "0" * (-len(frame) % 8 + 8 * 3_000)
    coded = unit(2, "") + unit(1, sequence) + unit(6, frame)

    ftyp = box(b"ftyp", b"avif\0\0\0\0avifmif1miaf")
    infe = box(b"infe", b"\2\0\0\0" + struct.pack(">HH4sx", 1, 0, b"av01"))
    head = box(b"hdlr", bytes(8) + b"pict" + bytes(13)) + box(b"pitm", bytes(4) + struct.pack(">H", 1))
    head += box(b"iinf", bytes(4) + struct.pack(">H", 1) + infe)
    ispe = box(b"ispe", bytes(4) + struct.pack(">II", max_px, max_px))
    ipco = box(b"ipco", ispe + box(b"av1C", b"\x81\x1f\x1c\0") + box(b"pixi", bytes(4) + b"\1\x08"))
    ipma = box(b"ipma", bytes(4) + struct.pack(">IHB", 1, 1, 3) + b"\1\x82\3")

    def meta(start: int) -> bytes:
        iloc = bytes(4) + b"\x44\0" + struct.pack(">HHHHII", 1, 1, 0, 1, start, len(coded))
        return box(b"meta", bytes(4) + head + box(b"iloc", iloc) + box(b"iprp", ipco + ipma))

    return ftyp + meta(len(ftyp) + len(meta(0)) + 8) + box(b"mdat", coded)


@pytest.mark.parametrize(
    "features",
    [
        "",
        "timing",
        "timing model",
        "ids",
        "order",
        "screen",
        "screen integer",
        "timing model ids order screen",
    ],
)
def test_I14_a_frame_that_states_a_larger_size_than_its_sequence_is_rejected(features: str) -> None:
    """The decoder decodes it: 64x64 with a frame of 12000x12000 takes 159 MB and half a second."""
    for size_bits in (6, 16):
        assert decode(still(None, size_bits=size_bits, features=features), WHITE).size == (64, 64)
    larger = still(128, features=features)
    with Image.open(io.BytesIO(larger)) as image:
        image.load()
    with pytest.raises(ImageError, match="but a frame of it has another size, up to 65536x65536") as caught:
        decode(larger, WHITE)
    assert caught.value.reason == "size_disagrees"


@pytest.mark.parametrize(("max_px", "frame_px", "size_bits"), [(64, 48, 6), (64, 64, 6), (100, 96, 7)])
def test_I14_a_frame_with_its_own_size_is_decoded_if_the_sequence_limits_it(
    max_px: int, frame_px: int, size_bits: int
) -> None:
    """Encoders write such frames for layers that are smaller than the image."""
    assert decode(still(frame_px, max_px=max_px, size_bits=size_bits), WHITE).size == (max_px, max_px)
