"""Plant faults in a clean dataset, and count which of them the checks of validated_dataset find.

    python -m demo.picture_faults work/faults --seeds 10

The clean dataset has crops of photographs that scikit-image includes, and generated pictures of overlapping
discs (the dead leaves model of Lee, Mumford and Huang, Occlusion models for natural images, 2001, which has
the power spectrum of photographs). Each fault is planted at three strengths, in an eighth of the images or in
the number that it needs. docs/dataset_checks.md has the table that the command prints.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from pipeline.raw_images.stage import scan
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.reporting.findings import CheckContext, Finding
from pipeline.storage.needed_columns import needed_columns
from pipeline.storage.tables import Tables
from pipeline.validated_dataset import checks
from pipeline.validated_dataset.stage import validate

Random: TypeAlias = np.random.Generator

RESOLUTION = 256
"""Training resolution of the recipe."""

PHOTOGRAPHS = (
    *("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "motorcycle_left.png", "camera.png"),
    *("coins.png", "grass.png", "gravel.png", "brick.png", "hubble_deep_field.jpg", "ihc.png", "retina.jpg"),
)
"""Photographs in the scikit-image package, without moon.png (flat) and clock_motion.png (blurred)."""

CROPS, DRAWINGS = 3, 9
"""Number of crops of each photograph, and number of generated pictures."""

PLANTED = 6
"""Number of images with a fault, unless it needs another number."""


@dataclass(frozen=True)
class Sample:
    """An image with its caption.

    Attributes:
        quality: Quality of its JPEG file; None for a PNG.
        subject_px: Edge of the white square in its mask, in pixels at the training size; None without masks.
    """

    image: Image.Image
    caption: str
    quality: int | None = None
    subject_px: float | None = None


Dataset: TypeAlias = dict[str, Sample]
"""Samples by name."""


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        check: Check that must report it.
        strengths: Its three strengths, from weak to strong.
        unit: What the strengths are.
        plant: Returns the dataset with the fault, and the names of the samples that have it.
    """

    check: str
    strengths: tuple[float, float, float]
    unit: str
    plant: Callable[[Dataset, float, Random], tuple[Dataset, set[str]]]


@cache
def clean_dataset(seed: int) -> Dataset:
    """Return crops of photographs and generated pictures, each with a caption of its own."""
    import skimage

    random = np.random.default_rng(seed)
    bundled = Path(skimage.__file__).parent / "data"
    images: list[tuple[str, Image.Image]] = []
    for name in PHOTOGRAPHS:
        with Image.open(bundled / name) as opened:
            photograph = opened.convert("RGB")
        images += [(name.partition(".")[0], _crop(photograph, random)) for _ in range(CROPS)]
    images += [("discs", dead_leaves(random)) for _ in range(DRAWINGS)]
    return {
        f"{number:02}_{name}": Sample(image, _caption(name, random))
        for number, (name, image) in enumerate(images)
    }


def _crop(photograph: Image.Image, random: Random) -> Image.Image:
    """Return a random crop of half of the area or more."""
    scale = random.uniform(0.7, 1.0, 2)
    width, height = (int(edge * each) for edge, each in zip(photograph.size, scale, strict=True))
    left = int(random.integers(photograph.width - width + 1))
    top = int(random.integers(photograph.height - height + 1))
    return photograph.crop((left, top, left + width, top + height))


def dead_leaves(random: Random, size_wh: tuple[int, int] = (480, 360)) -> Image.Image:
    """Return overlapping discs; the number of discs falls with the cube of their radius."""
    scale = 2  # drawn larger and averaged, so that edges are smooth
    width, height = (edge * scale for edge in size_wh)
    image = Image.new("RGB", (width, height))
    draw = ImageDraw.Draw(image)
    low, high = 2.0 * scale, 150.0 * scale
    radii = (low**-2 - random.random(6000) * (low**-2 - high**-2)) ** -0.5
    for radius in np.sort(radii)[::-1]:
        x, y = random.uniform(0, width), random.uniform(0, height)
        colour = tuple(int(level) for level in random.integers(10, 246, 3))
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    return image.reduce(scale)


_VIEWS = (
    "seen from above",
    "up close",
    "in soft light",
    "at noon",
    "from the left",
    "at an angle",
    "at dusk",
)


def _caption(name: str, random: Random) -> str:
    return (
        f"{name.replace('_', ' ')} {_VIEWS[int(random.integers(len(_VIEWS)))]}, take {random.integers(10**6)}"
    )


def _planted(
    change: Callable[[Image.Image, float, Random], Image.Image], number: int = PLANTED
) -> Callable[[Dataset, float, Random], tuple[Dataset, set[str]]]:
    """Return a function that changes some images."""

    def plant(dataset: Dataset, strength: float, random: Random) -> tuple[Dataset, set[str]]:
        names = _chosen(dataset, number, random)
        changed = {
            name: replace(dataset[name], image=change(dataset[name].image, strength, random))
            for name in sorted(names)
        }
        return dataset | changed, names

    return plant


def _training_scale(image: Image.Image) -> float:
    """Return the image's pixels per pixel in training."""
    return max(1.0, (image.width * image.height) ** 0.5 / RESOLUTION)


def blur(image: Image.Image, sigma: float, _: Random) -> Image.Image:
    """Blur with a Gaussian of this many pixels at the training size."""
    return image.filter(ImageFilter.GaussianBlur(sigma * _training_scale(image)))


def shake(image: Image.Image, length: float, random: Random) -> Image.Image:
    """Average along a horizontal or vertical line of this many pixels at the training size."""
    number = max(2, round(length * _training_scale(image)))
    pixels = np.asarray(image, dtype=np.float32)
    axis = int(random.integers(2))
    padded = np.pad(pixels, [(number, 0) if each == axis else (0, 0) for each in range(3)], mode="edge")
    sums = padded.cumsum(axis=axis, dtype=np.float64)
    ends = np.take(sums, range(number, padded.shape[axis]), axis=axis)
    starts = np.take(sums, range(padded.shape[axis] - number), axis=axis)
    return Image.fromarray(((ends - starts) / number).round().astype(np.uint8))


def enlarge(image: Image.Image, factor: float, _: Random) -> Image.Image:
    """Reduce to the training size divided by `factor`, and enlarge again."""
    shrink = factor * _training_scale(image)
    small = image.resize(
        (round(image.width / shrink), round(image.height / shrink)), Image.Resampling.LANCZOS
    )
    return small.resize(image.size, Image.Resampling.BICUBIC)


def compress(dataset: Dataset, quality: float, random: Random) -> tuple[Dataset, set[str]]:
    """Save some images as JPEG of this quality."""
    names = _chosen(dataset, PLANTED, random)
    return dataset | {name: replace(dataset[name], quality=int(quality)) for name in names}, names


def _levels(image: Image.Image, change: Callable[[Any], Any]) -> Image.Image:
    levels = np.clip(change(np.asarray(image, dtype=np.float32)), 0, 255)
    return Image.fromarray(levels.round().astype(np.uint8))


def darken(image: Image.Image, stops: float, _: Random) -> Image.Image:
    """Halve the linear light this many times (sRGB's exponent is 2.2)."""
    return _levels(image, lambda levels: levels * 2 ** (-stops / 2.2))


def overexpose(image: Image.Image, stops: float, _: Random) -> Image.Image:
    """Double the linear light this many times."""
    return _levels(image, lambda levels: levels * 2 ** (stops / 2.2))


def flatten(image: Image.Image, contrast: float, _: Random) -> Image.Image:
    """Reduce the contrast to this fraction, around the mean."""
    return _levels(image, lambda levels: levels.mean() + contrast * (levels - levels.mean()))


def add_bars(image: Image.Image, fraction: float, random: Random) -> Image.Image:
    """Cover this fraction of the height or width with black or white bars on both sides."""
    image, level = image.copy(), int(random.choice([0, 255]))
    horizontal = bool(random.integers(2))
    edge = image.height if horizontal else image.width
    bar = max(1, round(edge * fraction / 2))
    size = (image.width, bar) if horizontal else (bar, image.height)
    for start in (0, edge - bar):
        left, top = (0, start) if horizontal else (start, 0)
        image.paste((level,) * 3, (left, top, left + size[0], top + size[1]))
    return image


def stamp(image: Image.Image, opacity: float, _: Random) -> Image.Image:
    """Write a name in the lower right corner."""
    from PIL import ImageFont

    edge = min(image.size)
    font = ImageFont.load_default(size=edge * 0.07)
    layer = Image.new("L", image.size, 0)
    place = (image.width - edge * 0.03, image.height - edge * 0.03)
    ImageDraw.Draw(layer).text(place, "(c) PHOTO", fill=round(255 * opacity), font=font, anchor="rb")
    return Image.composite(Image.new("RGB", image.size, "white"), image, layer)


def repeat_view(dataset: Dataset, share: float, random: Random) -> tuple[Dataset, set[str]]:
    """Replace samples by views of one picture: slightly moved, zoomed and lit in another way."""
    names = sorted(dataset)
    view = dataset[names[int(random.integers(len(names)))]].image
    chosen = {str(name) for name in random.choice(names, round(share * len(names)), replace=False)}
    views = {name: Sample(_near_view(view, random), dataset[name].caption) for name in sorted(chosen)}
    return dataset | views, chosen


def _near_view(image: Image.Image, random: Random) -> Image.Image:
    zoom = random.uniform(0.9, 0.97)
    width, height = image.width * zoom, image.height * zoom
    left, top = random.uniform(0, image.width - width), random.uniform(0, image.height - height)
    view = image.resize(image.size, Image.Resampling.BICUBIC, box=(left, top, left + width, top + height))
    gain = random.uniform(0.85, 1.15)
    return _levels(view, lambda levels: levels * gain)


def _chosen(dataset: Dataset, number: int, random: Random) -> set[str]:
    return {str(name) for name in random.choice(sorted(dataset), number, replace=False)}


def shrink_subjects(dataset: Dataset, edge_px: float, random: Random) -> tuple[Dataset, set[str]]:
    """Give all samples masks, with small subjects in some."""
    names = _chosen(dataset, PLANTED, random)
    sizes = {name: edge_px if name in names else random.uniform(60, 200) for name in sorted(dataset)}
    return {name: replace(sample, subject_px=sizes[name]) for name, sample in dataset.items()}, names


def repeat_phrase(dataset: Dataset, share: float, random: Random) -> tuple[Dataset, set[str]]:
    """Add a phrase to this share of the captions."""
    names = _chosen(dataset, round(share * len(dataset)), random)
    captions = {name: f"{dataset[name].caption}, on a wooden table" for name in names}
    return dataset | {name: replace(dataset[name], caption=captions[name]) for name in names}, names


def omit_opening(dataset: Dataset, share: float, random: Random) -> tuple[Dataset, set[str]]:
    """Start all captions with a trigger word, except for this share."""
    names = _chosen(dataset, max(1, round(share * len(dataset))), random)
    return {
        name: sample if name in names else replace(sample, caption=f"sks, {sample.caption}")
        for name, sample in dataset.items()
    }, names


def contradict(dataset: Dataset, number: float, random: Random) -> tuple[Dataset, set[str]]:
    """Add brighter copies of this many samples, with another colour in the caption."""
    names = sorted(_chosen(dataset, int(number), random))
    changed: Dataset = {}
    for name in names:
        sample = dataset[name]
        copy = _levels(sample.image, lambda levels: levels * 1.05)
        changed[name] = replace(sample, caption=f"{sample.caption}, a red cup")
        changed[f"{name}_copy"] = replace(sample, image=copy, caption=f"{sample.caption}, a blue cup")
    return dataset | changed, set(changed)


FAULTS: dict[str, Fault] = {
    "blurred": Fault("pictures_sharp", (1.5, 2.5, 4.0), "sigma in px", _planted(blur)),
    "shaken": Fault("pictures_sharp", (4.0, 8.0, 16.0), "length in px", _planted(shake)),
    "enlarged": Fault("pictures_sharp", (2.0, 3.0, 4.0), "factor", _planted(enlarge)),
    "compressed": Fault("pictures_sharp", (40, 25, 10), "JPEG quality", compress),
    "dark": Fault("pictures_exposed", (3.0, 4.0, 5.0), "stops", _planted(darken)),
    "overexposed": Fault("pictures_exposed", (2.0, 3.0, 4.0), "stops", _planted(overexpose)),
    "flat": Fault("pictures_exposed", (0.3, 0.2, 0.1), "contrast", _planted(flatten)),
    "bars": Fault("pictures_unframed", (0.05, 0.1, 0.25), "share of the edge", _planted(add_bars)),
    "watermark": Fault("pictures_unframed", (0.25, 0.5, 1.0), "opacity", _planted(stamp, 36)),
    "one view": Fault("views_varied", (0.25, 0.5, 0.75), "share of the images", repeat_view),
    "small subject": Fault("subjects_visible", (28, 20, 12), "px", shrink_subjects),
    "phrase": Fault("captions_repeated", (0.85, 0.9, 1.0), "share of the captions", repeat_phrase),
    "no trigger": Fault("captions_repeated", (0.02, 0.1, 0.15), "share of the captions", omit_opening),
    "contradiction": Fault("look_alikes_agree", (1, 3, 6), "pairs", contradict),
}
"""The kinds of faults."""

CHECKS = tuple(dict.fromkeys(fault.check for fault in FAULTS.values()))


def write_dataset(dataset: Dataset, folder: Path) -> None:
    """Write images, captions and masks."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, sample in dataset.items():
        image = folder / "images" / f"{name}.{'png' if sample.quality is None else 'jpg'}"
        image.parent.mkdir(parents=True, exist_ok=True)
        if sample.quality is None:
            sample.image.save(image, compress_level=1)
        else:
            sample.image.save(image, quality=sample.quality)
        image.with_suffix(".txt").write_text(sample.caption, encoding="utf-8")
        if sample.subject_px is not None:
            mask = folder / "masks" / f"{name}.png"
            mask.parent.mkdir(exist_ok=True)
            _mask(sample.image.size, sample.subject_px).save(mask)


def _mask(size_wh: tuple[int, int], subject_px: float) -> Image.Image:
    edge = round(subject_px * (size_wh[0] * size_wh[1]) ** 0.5 / RESOLUTION)
    left, top = (size_wh[0] - edge) // 2, (size_wh[1] - edge) // 2
    mask = Image.new("L", size_wh, 0)
    mask.paste(255, (left, top, left + edge, top + edge))
    return mask


def recipe_of(folder: Path, *, masks: bool) -> Recipe:
    """Return a recipe for the dataset that `write_dataset` wrote."""
    dataset = {"name": "pictures", "path": str(folder / "images")}
    values = {
        "datasets": [{**dataset, "mask": {"path": str(folder / "masks")}} if masks else dataset],
        "cache_dir": str(folder / "cache"),
        "output_dir": str(folder / "out"),
        "model": {"base": "none/needed"},
        "buckets": {"resolution": RESOLUTION},
    }
    return recipe_from_mapping("faults", values)


def findings_of(dataset: Dataset, folder: Path) -> dict[str, Finding]:
    """Return the findings of validated_dataset by check."""
    write_dataset(dataset, folder)
    recipe = recipe_of(folder, masks=any(each.subject_px is not None for each in dataset.values()))
    tables = Tables(recipe.output_dir)
    raw = scan(recipe, tables, log=_discard)
    tables.write("raw_images", raw.table)
    needed = tables.read("raw_images", needed_columns("validated_dataset", "raw_images"))
    result = validate(recipe, needed, tables, log=_discard)
    tables.write("validated_dataset", result.table)
    return {finding.name: finding for finding in checks.run(CheckContext(recipe, tables))}


def _discard(line: str) -> None:
    """Discard a log line of a stage."""


@dataclass(frozen=True)
class Count:
    """Numbers of planted samples, and of others; of each, how many are named by a check."""

    planted: int
    found: int
    false_alarms: int
    others: int


def count_found(fault: Fault, strength: float, seed: int, folder: Path) -> Count:
    """Plant a fault in a clean dataset, and compare it with the findings."""
    dataset, planted = fault.plant(clean_dataset(seed), strength, np.random.default_rng((seed, 1)))
    findings = findings_of(dataset, folder)
    named = {name: named_samples(findings[name]) for name in CHECKS}
    others = set(dataset) - planted
    # Its rows are phrases of the dataset, not samples.
    names_captions = fault.check == "captions_repeated" and not findings[fault.check].passed
    return Count(
        planted=len(planted),
        found=len(planted) if names_captions else len(planted & named[fault.check]),
        false_alarms=len(others & set[str]().union(*named.values())),
        others=len(others),
    )


def named_samples(finding: Finding) -> set[str]:
    """Return the names of the samples in the rows of a finding."""
    texts = [str(row.get("images") or row.get("sample_id") or "") for row in finding.rows]
    return {Path(each).stem for text in texts for each in text.split(" | ")} if not finding.passed else set()


def table_of_faults(folder: Path, seeds: Sequence[int]) -> list[tuple[str, float, Count]]:
    """Return the counts of each fault and strength, added over the seeds."""
    rows: list[tuple[str, float, Count]] = []
    for name, fault in FAULTS.items():
        for strength in fault.strengths:
            counts = [count_found(fault, strength, seed, folder) for seed in seeds]
            total = Count(*(sum(each) for each in zip(*(_numbers(count) for count in counts), strict=True)))
            rows.append((name, strength, total))
    return rows


def _numbers(count: Count) -> tuple[int, int, int, int]:
    return count.planted, count.found, count.false_alarms, count.others


def as_markdown(rows: Sequence[tuple[str, float, Count]]) -> Iterator[str]:
    """Yield the lines of the table in docs/dataset_checks.md."""
    yield "| fault | strengths | check | found: weak | medium | strong | false alarms |"
    yield "|---|---|---|---|---|---|---|"
    for name, fault in FAULTS.items():
        counts = [count for other, _, count in rows if other == name]
        found = " | ".join(f"{count.found / count.planted:.0%}" for count in counts)
        alarms = sum(count.false_alarms for count in counts) / sum(count.others for count in counts)
        strengths = ", ".join(f"{strength:g}" for strength in fault.strengths)
        yield f"| {name} | {strengths} {fault.unit} | `{fault.check}` | {found} | {alarms:.1%} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    for line in as_markdown(table_of_faults(arguments.folder, range(arguments.seeds))):
        print(line)


if __name__ == "__main__":
    main()
