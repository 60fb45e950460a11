"""Valid files of every format that the fuzz tests damage."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pillow_heif
import polars as pl
from PIL import Image
from safetensors.numpy import save

from pipeline.cache.entry_format import EntrySpec, TensorSpec, serialise
from tests.corpus.drawing import RGB, RGBA, saved
from tests.hostile_images import jpeg_with_scans

ENTRY = EntrySpec("latents", "0123456789abcdef", {"latent": TensorSpec("float16", (4, 8, 8))})
ROWS = {
    "path": ["good.png", "a/b.png"],
    "caption": ["a rose, red", 'a "tulip"'],
    "x": [0.5, 0.25],
    "n": [1, 2],
}


def images() -> list[tuple[str, bytes]]:
    """Return (suffix, bytes) of small images of every format and of its unusual variants."""
    pillow_heif.register_heif_opener()
    palette, grey = RGB.convert("P"), RGB.convert("L")
    deep = Image.fromarray(np.arange(48 * 72, dtype=np.uint16).reshape(48, 72))
    frames: dict[str, Any] = {"save_all": True, "append_images": [RGBA, RGB]}
    exif = Image.Exif()
    exif[0x0112] = 6
    return [
        ("png", saved(RGB, "PNG", exif=exif)),
        ("png", saved(palette, "PNG", transparency=3)),
        ("png", saved(deep, "PNG")),
        ("apng", saved(RGBA, "PNG", **frames)),
        ("jpg", saved(RGB, "JPEG", exif=exif)),
        ("jpg", saved(RGB.convert("CMYK"), "JPEG")),
        ("jpg", jpeg_with_scans(20)),
        ("mpo", saved(RGB, "MPO", save_all=True, append_images=[RGB])),
        ("webp", saved(RGBA, "WEBP", lossless=True)),
        ("webp", saved(RGB, "WEBP", **frames)),
        ("avif", saved(RGB, "AVIF")),
        ("gif", saved(palette, "GIF", save_all=True, append_images=[grey])),
        ("bmp", saved(RGB, "BMP")),
        ("dib", saved(grey, "DIB")),
        ("tif", saved(RGB, "TIFF", compression="tiff_lzw")),
        ("tif", saved(deep, "TIFF", compression="tiff_adobe_deflate")),
        ("tif", saved(RGB, "TIFF", compression="jpeg")),
        ("tif", saved(grey.convert("1"), "TIFF", compression="group4")),
        ("tif", saved(grey.convert("F"), "TIFF")),
        ("jp2", saved(RGB, "JPEG2000")),
        ("heic", saved(RGB, "HEIF")),
    ]


def captions() -> list[bytes]:
    """Return texts of caption files."""
    return [b"a red rose", "eine rote Bl\u00fcte".encode("utf-16"), b'{"caption": ["a rose", "red"]}']


def manifests() -> list[tuple[str, bytes]]:
    """Return (suffix, bytes) of manifests in each format."""
    rows = pl.DataFrame(ROWS)
    nested = rows.with_columns(
        tags=pl.Series([["a", "b"], None]), when=pl.Series(["2026", "x"]).cast(pl.Categorical)
    )
    csv, json_lines = io.BytesIO(), io.BytesIO()
    rows.write_csv(csv)
    nested.write_ndjson(json_lines)
    data, more = csv.getvalue(), json_lines.getvalue()
    lines = [(".jsonl", each) for each in (more, more * 3, more.splitlines()[0], b"\n" + more)]
    tables = [(".csv", each) for each in (data, data.replace(b"\n", b"\r\n"), data[:-1], data * 2)]

    # Each Parquet file starts a process, so there are fewer of them.
    return [*lines, *tables, (".parquet", _parquet(nested))]


def _parquet(rows: pl.DataFrame) -> bytes:
    file = io.BytesIO()
    rows.write_parquet(file)
    return file.getvalue()


def safetensors_files() -> list[bytes]:
    """Return small safetensors files: a checkpoint, LoRAs with and without a record, and a cache entry."""
    weight = np.ones((4, 4), np.float32)
    lora = {"unet.mid.to_q.lora_A.weight": weight[:2], "unet.mid.to_q.lora_B.weight": weight[:, :2]}
    text = {"text_encoder.q.lora_A.weight": weight[:2], "text_encoder.q.lora_B.weight": weight[:, :2]}
    record = {"latentline_provenance": json.dumps({"recipe": {"name": "x"}, "samples": {"number": 1}})}
    entry = serialise(ENTRY, {"latent": np.zeros((4, 8, 8), np.float16)}, {"note": "x"})
    return [save({"weight": weight}, {"format": "pt"}), save(lora), save({**lora, **text}, record), entry]


def recipes() -> list[bytes]:
    """Return the recipes of this repository."""
    folder = Path(__file__).parents[2] / "configs"
    return [path.read_bytes() for path in sorted([*folder.glob("*.yaml"), *folder.glob("examples/*.yaml")])]
