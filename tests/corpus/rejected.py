"""Files that are rejected or skipped, and captions as taggers and editors write them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from PIL.PngImagePlugin import PngInfo

from tests.corpus.drawing import FORMATS, RGB, Case, bmp_of, of_format, png_of, put, saved, with_inverted_byte


def broken() -> list[Case]:
    """I01, I02, I04, I14: unusable files with their reasons."""
    cases = [Case(f"broken/I04.{suffix}", put(b""), "empty_file") for suffix in FORMATS]
    for suffix in FORMATS:
        data = of_format(suffix)
        reason = "truncated or undecodable"  # not every decoder can distinguish them
        cases.append(Case(f"broken/I01 half.{suffix}", put(data[: len(data) // 2]), reason))
        cases.append(Case(f"broken/I01 start.{suffix}", put(data[:20]), reason))
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
    cases.append(Case("broken/I01.heic", put(b"\0\0\0\x18ftypheic" + bytes(60)), "undecodable"))
    cases.append(Case("broken/plug-in.jxl", put(b"\xff\x0a" + bytes(60)), "plugin_missing"))
    cases.append(Case("broken/I14 bomb.png", put(png_of(60_000, 60_000)), "too_large"))
    cases.append(Case("broken/I14 flood.bmp", put(bmp_of(50_000, 50_000)), "too_large"))
    text = PngInfo()
    text.add_text("comment", "x" * 3_000_000, zip=True)
    huge = saved(RGB, "PNG", pnginfo=text)
    cases.append(Case("broken/I15 huge text.png", put(huge), "undecodable"))
    cases.append(Case("broken/I02 crc.png", put(with_inverted_byte(of_format("png"), -20)), "undecodable"))
    cases.append(Case("broken/I02 zlib.png", put(png_of(8, 8, b"no zlib stream")), "undecodable"))
    return cases


def skipped() -> list[Case]:
    """I06, I25, I27: common files that are not images."""
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
    cases = [Case(f"other/{name}", png, "skipped", caption=None) for name in names]
    for name in ("I27.npz", "I27.safetensors", "I27.pt", "notes.md", "film.mp4", "list.json"):
        cases.append(Case(f"other/{name}", put(b"something"), "skipped", caption=None))
    cases.append(Case("other/I25 pipe.png", os.mkfifo, "skipped", caption=None))
    cases.append(Case("other/I25 folder.png", lambda path: path.mkdir(), "skipped", caption=None))
    cases.append(Case("other/I25 socket.png", _socket, "skipped", caption=None))
    return cases


def _socket(path: Path) -> None:
    working_directory = Path.cwd()
    os.chdir(path.parent)  # the path of a socket must be short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(working_directory)


def captions() -> list[Case]:
    """C01 to C07: captions as taggers and editors write them."""
    png = put(of_format("png"))
    accepted = {
        "C02 mark.png": b"\xef\xbb\xbfa caption",
        "C02 utf-16.png": "a caption".encode("utf-16"),
        "C02 utf-16 be.png": b"\xfe\xff" + "a caption".encode("utf-16-be"),
        "C02 unmarked.png": "a caption".encode("utf-16-le"),
        "C07 lines.png": b"  a  \r\n\r\n caption\t\n",
        "C07 controls.png": b"a\0 cap\x07tion\x1b",
        "C05 long.png": b"word " * 3000,
    }
    rejected = {
        "C01 windows.png": (b"na\xefve", "caption_undecodable"),
        "C04 empty.png": (b"", "caption_empty"),
        "C04 blank.png": b" \r\n\t ",
        "C04 nul.png": b"\0\0\0",
        "C03 missing.png": (None, "caption_missing"),
        "C07 huge.png": (b"x" * 1_000_001, "caption_unreadable"),
    }
    cases = [Case(f"captions/{name}", png, caption=data) for name, data in accepted.items()]
    for name, value in rejected.items():
        data, reason = value if isinstance(value, tuple) else (value, "caption_empty")
        cases.append(Case(f"captions/{name}", png, reason, caption=data))
    return cases
