"""Report of vae_latents: some decoded latents next to their images, and statistics of stored latents.

    reports/vae_latents/<start of key>.jpg     image as the VAE saw it, and its decoded latent
    reports/vae_latents/<start of key>.json    similarity of the two, see `DecodedLatent`
    reports/vae_latents/statistics.json        moments of some stored latents by key, see `statistics`

The encoding processes draw the pictures after encoding. A run that encodes nothing shows the existing ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipeline.cache.entry_format import LATENT, MEAN
from pipeline.reporting.pictures import jpeg, side_by_side
from pipeline.storage.atomic import write_bytes
from pipeline.storage.checked_json import read_checked, write_checked

if TYPE_CHECKING:
    import polars as pl

    from pipeline.cache.recipe_entries import RecipeEntries

MIN_DECODED, MAX_DECODED = 3, 8
"""Number of latents that are decoded for a small and a large dataset."""

NUM_SHOWN = 4
"""Maximum number of pictures in the UI, including the one with the lowest PSNR."""

# Decoding takes a VAE about twice as long as encoding, so it adds a tenth.
_LATENTS_PER_DECODED = 20

NUM_IN_STATISTICS = 64
"""Number of latents in the statistics."""

MAX_PICTURE_BYTES = 48_000
"""Maximum size of one picture; `NUM_SHOWN` of them stay below 200 KB."""

_EDGE_PX = 288
_STATISTICS_FILE = "statistics.json"

# Large enough for the preselection to contain the choice almost surely.
_OVERSAMPLING = 8
"""Factor by which the preselection exceeds the choice."""

Moments = npt.NDArray[np.float64]
"""Number of values, mean, variance, minimum and maximum of each channel of a latent, (C, 5)."""

_NUM_MOMENTS = 5

Pixels = npt.NDArray[np.uint8]
"""Pixels of one image, (H, W, 3)."""


@dataclass(frozen=True)
class DecodedLatent:
    """Similarity of a decoded latent and its image, as `psnr_db`.

    `plain_psnr_db` is the similarity of the image and its mean colour.
    """

    key: str
    psnr_db: float
    plain_psnr_db: float
    seconds: float

    @property
    def is_like(self) -> bool:
        """Whether the decoded latent is closer to the image than its mean colour."""
        return self.psnr_db > self.plain_psnr_db


def num_decoded(num_latents: int) -> int:
    """Return how many latents of a dataset are decoded: 3, or more for more than 60 latents, at most 8."""
    return max(MIN_DECODED, min(MAX_DECODED, num_latents // _LATENTS_PER_DECODED))


def choose(rows: pl.DataFrame, number: int) -> pl.DataFrame:
    """Return at most `number` rows with distinct contents, not mirrored, independent of file names."""
    import polars as pl  # encoding processes import this module but have no use for Polars

    # Hashes are spread evenly, so a threshold preselects the smallest ones without sorting a large table.
    fraction = _OVERSAMPLING * number / max(1, len(rows))

    # Every hash in hexadecimal is below "g".
    threshold = "g" if fraction >= 1 else f"{int(fraction * 2**32):08x}"
    smallest = rows.filter((pl.col("content_hash") < threshold) & ~pl.col("flipped"))
    smallest = smallest.sort("content_hash", "key")
    return smallest.unique("content_hash", keep="first", maintain_order=True).head(number)


def psnr_db(image: Pixels, other: Pixels) -> float:
    """Return the peak signal-to-noise ratio of two images of equal size, in decibels.

    10 log10(255^2 / MSE) over all pixels and channels, as in Huynh-Thu and Ghanbari (2008),
    https://doi.org/10.1049/el:20080522.
    """
    error = float(((image.astype(np.float64) - other) ** 2).mean())

    # Equal images, which have no finite ratio, count as if one value differed by one.
    return 10 * math.log10(255**2 / max(error, 1 / image.size))


def save(folder: Path, key: str, image: Pixels, decoded: Pixels, *, seconds: float) -> DecodedLatent:
    """Write the picture and the similarity of one latent into `folder`.

    Raises:
        OSError: The folder cannot be written.
    """
    from PIL import Image

    mean = np.broadcast_to(image.mean(axis=(0, 1)).round().astype(np.uint8), image.shape)
    ratios = (round(psnr_db(image, other), 3) for other in (decoded, mean))
    similarity = DecodedLatent(key, *ratios, seconds=round(seconds, 3))
    pair = side_by_side(Image.fromarray(image), Image.fromarray(decoded), edge_px=_EDGE_PX)
    write_bytes(_file(folder, key, ".jpg"), jpeg(pair, MAX_PICTURE_BYTES))
    write_checked(_file(folder, key, ".json"), asdict(similarity))
    return similarity


def read(folder: Path, keys: Sequence[str]) -> list[DecodedLatent]:
    """Read the similarities of these latents, in their order; latents that were not decoded are omitted."""
    similarities: list[DecodedLatent] = []
    for key in keys:
        try:
            similarity = DecodedLatent(**read_checked(_file(folder, key, ".json")))
        except (OSError, ValueError, TypeError):
            continue

        # The name of the file has only the beginning of the key.
        if similarity.key == key:
            similarities.append(similarity)
    return similarities


def report(folder: Path, picture_rows: pl.DataFrame) -> dict[str, Any]:
    """Return the numbers of the decoded latents, and delete the pictures of other latents."""
    keys = picture_rows["key"].to_list()
    _delete_others(folder, keys)
    decoded = read(folder, keys)
    if not decoded:
        return {"decoded_note": "no latent has been decoded: a run that encodes latents decodes some of them"}

    names = dict(picture_rows.select("key", "sample_id").rows())
    ratios = [each.psnr_db for each in decoded]
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
            for each in decoded
        ],
    }

    # A low PSNR alone may be a hard image. Most pictures worse than one colour mean a broken VAE.
    num_unlike = sum(not each.is_like for each in decoded)
    if num_unlike * 2 > len(decoded):
        numbers["decoded_note"] = (
            f"{num_unlike} of {len(decoded)} decoded latents are less similar to their images than an image "
            "of the mean colour: the VAE's weights are random, as in the demo's tiny model, or damaged"
        )
    return numbers


def shown(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the first few of the report's `decoded` rows, and last the one with the lowest PSNR."""
    if not rows:
        return []
    lowest = min(rows, key=lambda row: row["psnr_db"])
    return [*[row for row in rows if row is not lowest][: NUM_SHOWN - 1], lowest]


def statistics(entries: RecipeEntries, rows: pl.DataFrame, folder: Path) -> dict[str, Any]:
    """Return mean and standard deviation of some stored latents, over all values and per channel.

    They should be near 0 and 1, which is the purpose of a VAE's shift and scaling.

    Returns:
        `latent_mean`, `latent_std` and `channels` with one row each; nothing without latents.
    """
    chosen, file = choose(rows, NUM_IN_STATISTICS), folder / _STATISTICS_FILE
    if chosen.is_empty():
        return {}

    # Reading an entry takes a millisecond or a request, so that moments of the last run are reused.
    saved = _read_moments(file)
    moments: dict[str, Moments] = {}
    for row in chosen.iter_rows(named=True):
        key = row["key"]
        moments[key] = saved[key] if key in saved else _moments(_values(entries, row))
    if moments.keys() != saved.keys():
        write_checked(file, {"latents": {key: each.tolist() for key, each in moments.items()}})
    return _numbers(np.stack(list(moments.values())))


def _values(entries: RecipeEntries, row: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    """Return the values (C, N) of a stored latent, or of its mean."""
    tensors = entries.store.read(entries.latent_spec(row))
    values = tensors.get(LATENT, tensors.get(MEAN))
    assert values is not None
    if values.dtype == np.uint16:  # bfloat16: the upper half of a float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64).reshape(len(values), -1)


def _moments(values: npt.NDArray[np.float64]) -> Moments:
    """Return the moments of values (C, N)."""
    counts = np.full(len(values), values.shape[1], np.float64)
    columns = (counts, values.mean(axis=1), values.var(axis=1), values.min(axis=1), values.max(axis=1))
    return np.stack(columns, axis=1)


def _read_moments(file: Path) -> dict[str, Moments]:
    try:
        latents = read_checked(file)["latents"]

        # A damaged file is replaced: the moments can be computed again.
        return {key: np.array(each, np.float64).reshape(-1, _NUM_MOMENTS) for key, each in latents.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _numbers(latents: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Return the statistics of latents with the moments (N, C, 5)."""
    channels = [{"channel": number, **_rounded(latents[:, number])} for number in range(latents.shape[1])]
    total = _rounded(latents.reshape(-1, _NUM_MOMENTS))
    return {"latent_mean": total["mean"], "latent_std": total["std"], "channels": channels}


def _rounded(moments: npt.NDArray[np.float64]) -> dict[str, float]:
    """Return the statistics of all values in groups with the moments (N, 5), with four digits."""
    counts, means, variances, least, most = moments.T
    mean = np.average(means, weights=counts)
    # The total variance is the variance within the groups plus the variance of their means.
    variance = np.average(variances + (means - mean) ** 2, weights=counts)
    numbers = {"mean": mean, "std": variance**0.5, "least": least.min(), "most": most.max()}
    return {name: float(f"{value:.4g}") for name, value in numbers.items()}


def _file(folder: Path, key: str, suffix: str) -> Path:
    return folder / f"{key[:16]}{suffix}"


def _delete_others(folder: Path, keys: Sequence[str]) -> None:
    kept = {_file(folder, key, suffix).name for key in keys for suffix in (".jpg", ".json")}
    for path in folder.glob("*") if folder.is_dir() else ():
        if path.suffix in {".jpg", ".json"} and path.name not in {*kept, _STATISTICS_FILE}:
            path.unlink(missing_ok=True)
