"""A few latents beside the images they were made of: which ones, and what was seen. Imports no torch.

    reports/vae_latents/<start of key>.jpg     an image as the VAE saw it, and what its latent decodes to
    reports/vae_latents/<start of key>.json    how near the two are: `Seen`
    reports/vae_latents/statistics.json        `statistics` of some of the stored latents, and of which

The encoding processes draw them when they have encoded all else; a run that encodes nothing shows what is
there. Which images are looked at follows from their contents alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipeline.cache.entry_format import LATENT, MEAN
from pipeline.reporting.pictures import jpeg, side_by_side
from pipeline.storage.atomic import write_bytes, write_text

if TYPE_CHECKING:
    import polars as pl

    from pipeline.cache.requests import RecipeEntries

NUM_DECODED = 8
"""Latents that are decoded."""

NUM_SHOWN = 4
"""Of those, in the UI: the one that is least like its image among them."""

NUM_IN_STATISTICS = 64

MAX_PICTURE_BYTES = 48_000
"""Of one pair; `NUM_SHOWN` of them stay below 200 KB."""

_EDGE_PX = 288
_STATISTICS_FILE = "statistics.json"
_LIKELY_ENOUGH = 8

Pixels = npt.NDArray[np.uint8]
"""Of one image, (H, W, 3)."""


@dataclass(frozen=True)
class Seen:
    """How near a decoded latent is to its image; both numbers as `psnr_db`.

    Attributes:
        key: Of the latent's entry.
        psnr_db: Of the decoded picture.
        plain_psnr_db: Of a picture of one colour, the image's mean.
        seconds: That the decoding took.
    """

    key: str
    psnr_db: float
    plain_psnr_db: float
    seconds: float

    @property
    def is_like(self) -> bool:
        """Whether the latent says more of its image than its mean colour does."""
        return self.psnr_db > self.plain_psnr_db


def sample_of(rows: pl.DataFrame, number: int) -> pl.DataFrame:
    """At most `number` rows with different contents, none mirrored, the same ones wherever the files lie.

    Args:
        rows: Columns `content_hash`, `key` and `flipped`. Hashes are spread evenly, so that of a large table
            the smallest ones are found without sorting it.
        number: At least 1.
    """
    import polars as pl  # only here: an encoding process has no use for it

    share = _LIKELY_ENOUGH * number / max(1, len(rows))
    below = "g" if share >= 1 else f"{int(share * 2**32):08x}"
    few = rows.filter((pl.col("content_hash") < below) & ~pl.col("flipped")).sort("content_hash", "key")
    return few.unique("content_hash", keep="first", maintain_order=True).head(number)


def psnr_db(image: Pixels, other: Pixels) -> float:
    """Peak signal-to-noise ratio of two images of one size, in decibels: 10 log10(255^2 / MSE).

    As in Huynh-Thu and Ghanbari (2008), https://doi.org/10.1049/el:20080522, over all pixels and channels.
    Equal images are given the ratio of images in which a single value is off by one.
    """
    error = float(((image.astype(np.float64) - other) ** 2).mean())
    return 10 * math.log10(255**2 / max(error, 1 / image.size))


def keep(folder: Path, key: str, image: Pixels, decoded: Pixels, *, seconds: float) -> Seen:
    """Write the picture and the numbers of one latent below `folder`.

    Raises:
        OSError: The folder cannot be written.
    """
    from PIL import Image

    mean = np.broadcast_to(image.mean(axis=(0, 1)).round().astype(np.uint8), image.shape)
    ratios = (round(psnr_db(image, other), 3) for other in (decoded, mean))
    seen = Seen(key, *ratios, seconds=round(seconds, 3))
    pair = side_by_side(Image.fromarray(image), Image.fromarray(decoded), edge_px=_EDGE_PX)
    write_bytes(_file(folder, key, ".jpg"), jpeg(pair, MAX_PICTURE_BYTES))
    write_text(_file(folder, key, ".json"), json.dumps(asdict(seen)))
    return seen


def read(folder: Path, keys: Sequence[str]) -> list[Seen]:
    """What was seen of the latents with these keys, in their order, as far as they were decoded."""
    found: list[Seen] = []
    for key in keys:
        try:
            seen = Seen(**json.loads(_file(folder, key, ".json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
        if seen.key == key:
            found.append(seen)
    return found


def report(folder: Path, looked_at: pl.DataFrame) -> dict[str, Any]:
    """The numbers of what was seen, and a row for each decoded latent; forgets those of other latents.

    Args:
        folder: Where the pictures are.
        looked_at: Columns `key` and `sample_id`.
    """
    keys = looked_at["key"].to_list()
    _forget_others(folder, keys)
    seen = read(folder, keys)
    if not seen:
        return {"decoded_note": "no latent was decoded for this output folder: that is done with encoding"}
    names = dict(looked_at.select("key", "sample_id").rows())
    ratios = [each.psnr_db for each in seen]
    numbers: dict[str, Any] = {
        "psnr_db": round(sum(ratios) / len(ratios), 3),
        "psnr_lowest_db": min(ratios),
        "decoded": [
            {
                "sample_id": names[each.key],
                "psnr_db": each.psnr_db,
                "mean_colour_db": each.plain_psnr_db,
                "picture": _file(folder, each.key, ".jpg").name,
            }
            for each in seen
        ],
    }
    unlike = sum(not each.is_like for each in seen)
    if unlike * 2 > len(seen):
        numbers["decoded_note"] = (
            f"{unlike} of {len(seen)} decoded latents are less like their images than a plain picture of the "
            "mean colour: the VAE's weights are random, as in the demo's toy, or damaged"
        )
    return numbers


def shown(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of the report's `decoded` rows the first few, and last the one with the lowest ratio of all."""
    if not rows:
        return []
    lowest = min(rows, key=lambda row: row["psnr_db"])
    return [*[row for row in rows if row is not lowest][: NUM_SHOWN - 1], lowest]


def statistics(entries: RecipeEntries, rows: pl.DataFrame, folder: Path) -> dict[str, Any]:
    """Mean and deviation of the values of a sample of stored latents, over all and for each channel.

    They should be near 0 and 1: that is what a VAE's shift and scaling are for. Read anew only when the
    sample has changed.

    Args:
        entries: Of the recipe.
        rows: Table vae_latents, with valid entries.
        folder: Where the last answer is kept.

    Returns:
        `latent_mean`, `latent_std` and `channels`, a row each; nothing where there are no latents.

    Raises:
        StoreError: An entry cannot be read.
    """
    sample = sample_of(rows, NUM_IN_STATISTICS)
    keys, file = sample["key"].to_list(), folder / _STATISTICS_FILE
    if not keys:
        return {}
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["keys"] == keys:
            return kept["numbers"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    latents: list[npt.NDArray[np.float64]] = []
    for row in sample.iter_rows(named=True):
        tensors = entries.store.read(entries.latent_spec(row))
        values = tensors.get(LATENT, tensors.get(MEAN))
        assert values is not None
        if values.dtype == np.uint16:  # bfloat16: the upper half of a float32
            values = (values.astype(np.uint32) << 16).view(np.float32)
        latents.append(values.astype(np.float64).reshape(len(values), -1))
    numbers = _numbers(np.concatenate(latents, axis=1))
    write_text(file, json.dumps({"keys": keys, "numbers": numbers}))
    return numbers


def _numbers(channels: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Of values (C, N)."""
    rows = [
        {
            "channel": number,
            **{
                name: float(f"{value:.4g}")
                for name, value in (
                    ("mean", values.mean()),
                    ("std", values.std()),
                    ("least", values.min()),
                    ("most", values.max()),
                )
            },
        }
        for number, values in enumerate(channels)
    ]
    mean, std = (float(f"{value:.4g}") for value in (channels.mean(), channels.std()))
    return {"latent_mean": mean, "latent_std": std, "channels": rows}


def _file(folder: Path, key: str, suffix: str) -> Path:
    return folder / f"{key[:16]}{suffix}"


def _forget_others(folder: Path, keys: Sequence[str]) -> None:
    kept = {_file(folder, key, suffix).name for key in keys for suffix in (".jpg", ".json")}
    for path in folder.glob("*") if folder.is_dir() else ():
        if path.suffix in {".jpg", ".json"} and path.name not in {*kept, _STATISTICS_FILE}:
            path.unlink(missing_ok=True)
