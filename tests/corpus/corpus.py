"""A folder as people really have it: broken and odd files and captions, and what must become of each.

Every image shows `PATTERN`, whose pixels are known without a decoder, so that each repair has an expectation
of its own. Nothing is drawn at random.
"""

from __future__ import annotations

import io
import os
import socket
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageCms
from PIL.PngImagePlugin import PngInfo

Pixels = npt.NDArray[np.uint8]

HEIGHT, WIDTH = 48, 72
_rows, _columns = np.mgrid[0:HEIGHT, 0:WIDTH]
PATTERN: Pixels = np.stack(
    [_rows * 255 // HEIGHT, _columns * 255 // WIDTH, (_rows * 3 + _columns) * 255 // (HEIGHT * 3 + WIDTH)], -1
).astype(np.uint8)
GREY: Pixels = PATTERN[..., 1]
WHITE = 255


@dataclass(frozen=True)
class Case:
    """One file, and what must become of it.

    Attributes:
        name: Its path in the folder.
        put: Makes it.
        reason: Why it is rejected, or "one or other"; None where it is kept, "passed over" where it is no
            image.
        pixels: What it decodes to, (H, W, 3); None where only its being kept matters.
        tolerance: Largest difference of a level.
        caption: The sidecar's bytes; None for no sidecar.
    """

    name: str
    put: Callable[[Path], object]
    reason: str | None = None
    pixels: Pixels | None = None
    tolerance: int = 0
    caption: bytes | None = b"a caption"


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def put(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def grey3(levels: npt.NDArray[Any]) -> Pixels:
    return np.repeat(levels.astype(np.uint8)[..., None], 3, axis=2)


def over_white(colours: Pixels, alpha: npt.NDArray[Any]) -> Pixels:
    """Colours laid over white, rounded to nearest."""
    share = alpha.astype(np.float64)[..., None] / 255
    return np.floor(colours * share + WHITE * (1 - share) + 0.5).astype(np.uint8)


RGB = Image.fromarray(PATTERN)
ALPHA: Pixels = ((_rows * 7) % 256).astype(np.uint8)
RGBA = Image.fromarray(np.dstack([PATTERN, ALPHA]))
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "png": ("PNG", {}),
    "jpg": ("JPEG", {"quality": 95, "subsampling": 0}),
    "webp": ("WEBP", {"lossless": True}),
    "tif": ("TIFF", {}),
    "bmp": ("BMP", {}),
    "gif": ("GIF", {}),
    "avif": ("AVIF", {"quality": 95}),
    "jp2": ("JPEG2000", {}),
}
LOSSY = {"jpg": 8, "avif": 24, "gif": 90}
"""Largest difference of a level that the format's own loss may make (GIF: 256 colours)."""


def of_format(suffix: str) -> bytes:
    kind, options = FORMATS[suffix]
    return saved(RGB, kind, **options)


def plain() -> list[Case]:
    """Each format as it should be, and under suffixes that it may have."""
    cases = [
        Case(f"plain/{kind}.{kind}", put(of_format(kind)), pixels=PATTERN, tolerance=LOSSY.get(kind, 0))
        for kind in FORMATS
    ]
    suffixes = {"JPG": "jpg", "jpeg": "jpg", "JPEG": "jpg", "jpe": "jpg", "jfif": "jpg"}
    suffixes |= {"PNG": "png", "apng": "png", "TIFF": "tif", "Tif": "tif", "DIB": "bmp", "WebP": "webp"}
    for index, (suffix, kind) in enumerate(suffixes.items()):
        cases.append(Case(f"plain/I07 {index}.{suffix}", put(of_format(kind))))
    return cases


def oriented() -> list[Case]:
    """I09: what EXIF says of the eight values, by array indexing."""
    upright = {
        1: PATTERN,
        2: PATTERN[:, ::-1],
        3: PATTERN[::-1, ::-1],
        4: PATTERN[::-1],
        5: PATTERN.swapaxes(0, 1),
        6: PATTERN[::-1].swapaxes(0, 1),
        7: PATTERN[::-1, ::-1].swapaxes(0, 1),
        8: PATTERN[:, ::-1].swapaxes(0, 1),
    }
    cases: list[Case] = []
    for value, wanted in upright.items():
        exif = Image.Exif()
        exif[274] = value
        for suffix in ("png", "jpg", "webp", "tif"):
            kind, options = FORMATS[suffix]
            data = saved(RGB, kind, exif=exif.tobytes(), **options)
            name = f"oriented/I09 {suffix} {value}.{suffix}"
            cases.append(Case(name, put(data), pixels=wanted, tolerance=LOSSY.get(suffix, 0)))
    return cases


def modes() -> list[Case]:
    """I10, I11: every way to store a pixel."""
    bilevel = Image.fromarray(GREY > 100)
    deep = (GREY.astype(np.uint16) << 8) | GREY
    palette = RGB.quantize(64, dither=Image.Dither.NONE)
    colours = np.asarray(palette.convert("RGB"))
    indices = np.asarray(palette)
    holes = np.where(indices == 5, 0, 255)
    cmyk = np.dstack([255 - PATTERN, np.zeros_like(GREY)])
    fractions = Image.fromarray((GREY / 255).astype(np.float32))
    whole = Image.fromarray(GREY.astype(np.int32) * 257)
    mask = (PATTERN[3, 4] == PATTERN).all(axis=2)
    table = [
        ("I11 1.png", saved(bilevel, "PNG"), grey3((GREY > 100) * 255), 0),
        ("I11 L.png", saved(Image.fromarray(GREY), "PNG"), grey3(GREY), 0),
        ("I11 L.jpg", saved(Image.fromarray(GREY), "JPEG", quality=98), grey3(GREY), 6),
        ("I11 L.bmp", saved(Image.fromarray(GREY), "BMP"), grey3(GREY), 0),
        ("I11 1.bmp", saved(bilevel, "BMP"), grey3((GREY > 100) * 255), 0),
        ("I11 1.tif", saved(bilevel, "TIFF"), grey3((GREY > 100) * 255), 0),
        ("I11 16 bit.png", saved(Image.fromarray(deep), "PNG"), grey3(GREY), 0),
        ("I11 16 bit.tif", saved(Image.fromarray(deep), "TIFF"), grey3(GREY), 0),
        ("I11 32 bit.tif", saved(whole, "TIFF"), grey3(GREY), 0),
        ("I11 float.tif", saved(fractions, "TIFF"), grey3(GREY), 0),
        ("I11 P.png", saved(palette, "PNG"), colours, 0),
        ("I11 P.gif", saved(palette, "GIF"), colours, 0),
        ("I11 P.bmp", saved(palette, "BMP"), colours, 0),
        ("I11 P.tif", saved(palette, "TIFF"), colours, 0),
        ("I10 P hole.png", saved(palette, "PNG", transparency=5), over_white(colours, holes), 0),
        ("I10 P hole.gif", saved(palette, "GIF", transparency=5), over_white(colours, holes), 0),
        ("I10 RGBA.png", saved(RGBA, "PNG"), over_white(PATTERN, ALPHA), 1),
        ("I10 RGBA.tif", saved(RGBA, "TIFF"), over_white(PATTERN, ALPHA), 1),
        (
            "I10 LA.png",
            saved(Image.merge("LA", [Image.fromarray(GREY), Image.fromarray(ALPHA)]), "PNG"),
            over_white(grey3(GREY), ALPHA),
            1,
        ),
        (
            "I10 colour key.png",
            saved(RGB, "PNG", transparency=tuple(PATTERN[3, 4].tolist())),
            over_white(PATTERN, np.where(mask, 0, 255)),
            0,
        ),
        ("I11 CMYK.tif", saved(Image.fromarray(cmyk, "CMYK"), "TIFF"), PATTERN, 0),
        ("I11 CMYK.jpg", saved(Image.fromarray(cmyk, "CMYK"), "JPEG", quality=98), PATTERN, 12),
        ("I11 YCbCr.tif", saved(RGB.convert("YCbCr"), "TIFF"), PATTERN, 3),
        (
            "plain progressive.jpg",
            saved(RGB, "JPEG", quality=95, subsampling=0, progressive=True),
            PATTERN,
            8,
        ),
        (
            "plain arithmetic size.jpg",
            saved(RGB, "JPEG", quality=95, subsampling=0, optimize=True),
            PATTERN,
            8,
        ),
    ]
    return [
        Case(f"modes/{name}", put(data), pixels=wanted, tolerance=near) for name, data, wanted, near in table
    ]


def profiles() -> list[Case]:
    """I12: Display P3, by its matrix and sRGB's curve; and profiles that are none."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    broken = profile[:40] + b"\0" * 200
    return [
        Case(
            "profiles/I12 sRGB.png", put(saved(RGB, "PNG", icc_profile=profile)), pixels=PATTERN, tolerance=1
        ),
        Case("profiles/I12 broken.png", put(saved(RGB, "PNG", icc_profile=broken)), pixels=PATTERN),
        Case("profiles/I12 empty.png", put(saved(RGB, "PNG", icc_profile=b"")), pixels=PATTERN),
        Case(
            "profiles/I12 noise.jpg",
            put(saved(RGB, "JPEG", quality=95, subsampling=0, icc_profile=b"abc")),
            pixels=PATTERN,
            tolerance=8,
        ),
    ]


def animated() -> list[Case]:
    """I13: the first frame."""
    other = Image.fromarray(255 - PATTERN)
    return [
        Case(
            "animated/I13.webp",
            put(saved(RGB, "WEBP", save_all=True, append_images=[other], lossless=True)),
            pixels=PATTERN,
        ),
        Case(
            "animated/I13.png", put(saved(RGB, "PNG", save_all=True, append_images=[other])), pixels=PATTERN
        ),
        Case(
            "animated/I13.tif", put(saved(RGB, "TIFF", save_all=True, append_images=[other])), pixels=PATTERN
        ),
        Case(
            "animated/I13.gif",
            put(saved(RGB, "GIF", save_all=True, append_images=[other])),
            tolerance=90,
            pixels=PATTERN,
        ),
    ]


def misnamed() -> list[Case]:
    """I03: the first bytes decide."""
    cases: list[Case] = []
    suffixes = list(FORMATS)
    for kind, wrong in zip(suffixes, suffixes[1:] + suffixes[:1], strict=True):
        data = of_format(kind)
        near = LOSSY.get(kind, 0)
        cases.append(Case(f"misnamed/I03 {kind}.{wrong}", put(data), pixels=PATTERN, tolerance=near))
    return cases


def names() -> list[Case]:
    """I16, I18: names that are hard on programs."""
    hard = [
        "a b.png",
        "it's.png",
        'say "x".png',
        "tab\tin.png",
        "new\nline.png",
        "percent%20.png",
        "#hash.png",
        "a.b.png",
        "a.c.png",
        "under__score_1024x768.png",
        "\U0001f339 rose.png",
        "\u732b.png",
        "\u00e9.png",
        "-dash.png",
        "~tilde.png",
        "x" * 190 + ".png",
        "$HOME.png",
        "back\\slash.png",
        "*.png",
        "semi;colon.png",
    ]
    return [Case(f"names/I18 {name}", put(of_format("png"))) for name in hard]


def broken() -> list[Case]:
    """I01, I02, I04, I14: what cannot be used, each with its reason."""
    cases = [Case(f"broken/I04.{suffix}", put(b""), "empty_file") for suffix in FORMATS]
    for suffix in FORMATS:
        whole = of_format(suffix)
        cut = "truncated or undecodable"  # not every decoder can tell
        cases.append(Case(f"broken/I01 half.{suffix}", put(whole[: len(whole) // 2]), cut))
        cases.append(Case(f"broken/I01 start.{suffix}", put(whole[:20]), cut))
    texts = {
        "I02 text.png": b"this is a text\n" * 20,
        "I02 page.jpg": b"<!DOCTYPE html><html>404</html>",
        "I02 archive.png": b"PK\x03\x04" + bytes(200),
        "I02 document.jpg": b"%PDF-1.7\n" + bytes(200),
        "I02 vector.png": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "I02 zeros.jpg": bytes(5000),
        "I02 pickle.webp": b"\x80\x04K\x01." + bytes(40),
        "I02 film.gif": b"\0\0\0\x18ftypmp42" + bytes(60),
    }
    cases += [Case(f"broken/{name}", put(data), "not_an_image") for name, data in texts.items()]
    cases.append(Case("broken/plug-in.heic", put(b"\0\0\0\x18ftypheic" + bytes(60)), "plugin_missing"))
    cases.append(Case("broken/plug-in.jxl", put(b"\xff\x0a" + bytes(60)), "plugin_missing"))
    cases.append(Case("broken/I14 bomb.png", put(png_of(60_000, 60_000)), "too_large"))
    cases.append(Case("broken/I14 flood.bmp", put(bmp_of(50_000, 50_000)), "too_large"))
    text = PngInfo()
    text.add_text("comment", "x" * 3_000_000, zip=True)
    huge = saved(RGB, "PNG", pnginfo=text)
    cases.append(Case("broken/I15 huge text.png", put(huge), "undecodable"))
    cases.append(Case("broken/I02 crc.png", put(flipped(of_format("png"), -20)), "undecodable"))
    cases.append(Case("broken/I02 zlib.png", put(png_of(8, 8, b"no zlib stream")), "undecodable"))
    return cases


def png_of(width: int, height: int, data: bytes | None = None) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    packed = zlib.compress(b"\0" * 100) if data is None else data
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def bmp_of(width: int, height: int) -> bytes:
    start = struct.pack("<IHHI", 54, 0, 0, 54)
    return (
        b"BM" + start + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0) + bytes(100)
    )


def flipped(data: bytes, at: int) -> bytes:
    raw = bytearray(data)
    raw[at] ^= 255
    return bytes(raw)


def passed_over() -> list[Case]:
    """I06, I25, I27: what lies in such folders and is no image."""
    png = put(of_format("png"))
    names = (
        "._I06.jpg",
        ".hidden.png",
        "Thumbs.db",
        "I06.jpg~",
        "__MACOSX/I06.png",
        ".ipynb_checkpoints/I06.png",
        ".DS_Store",
        "@eaDir/I06.png",
        "desktop.ini",
    )
    cases = [Case(f"other/{name}", png, "passed over", caption=None) for name in names]
    for name in ("I27.npz", "I27.safetensors", "I27.pt", "notes.md", "film.mp4", "list.json"):
        cases.append(Case(f"other/{name}", put(b"something"), "passed over", caption=None))
    cases.append(Case("other/I25 pipe.png", os.mkfifo, "passed over", caption=None))
    cases.append(Case("other/I25 folder.png", lambda path: path.mkdir(), "passed over", caption=None))
    cases.append(Case("other/I25 socket.png", _socket, "passed over", caption=None))
    return cases


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def captions() -> list[Case]:
    """C01 to C07: captions as taggers and editors leave them."""
    png = put(of_format("png"))
    kept = {
        "C02 mark.png": b"\xef\xbb\xbfa caption",
        "C02 utf-16.png": "a caption".encode("utf-16"),
        "C02 utf-16 be.png": b"\xfe\xff" + "a caption".encode("utf-16-be"),
        "C02 unmarked.png": "a caption".encode("utf-16-le"),
        "C07 lines.png": b"  a  \r\n\r\n caption\t\n",
        "C07 controls.png": b"a\0 cap\x07tion\x1b",
        "C05 long.png": b"word " * 3000,
    }
    refused = {
        "C01 windows.png": (b"na\xefve", "caption_undecodable"),
        "C04 empty.png": (b"", "caption_empty"),
        "C04 blank.png": b" \r\n\t ",
        "C04 nul.png": b"\0\0\0",
        "C03 missing.png": (None, "caption_missing"),
        "C07 huge.png": (b"x" * 1_000_001, "caption_unreadable"),
    }
    cases = [Case(f"captions/{name}", png, caption=data) for name, data in kept.items()]
    for name, said in refused.items():
        data, reason = said if isinstance(said, tuple) else (said, "caption_empty")
        cases.append(Case(f"captions/{name}", png, reason, caption=data))
    return cases


def all_cases() -> list[Case]:
    """Every case, each name once."""
    makers = (plain, oriented, modes, profiles, animated, misnamed, names, broken, passed_over, captions)
    return [case for maker in makers for case in maker()]


def make(root: Path, cases: list[Case]) -> None:
    """Put the cases below `root`, with their captions."""
    for case in cases:
        path = root / case.name
        path.parent.mkdir(parents=True, exist_ok=True)
        case.put(path)
        if case.caption is not None:
            path.with_suffix(".txt").write_bytes(case.caption)
