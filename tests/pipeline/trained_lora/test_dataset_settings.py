"""Datasets with resolution, mirroring and caption dropout of their own, from keys to the plan."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pytest
import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from PIL import Image
from safetensors.torch import load_file

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.errors import RecipeError
from pipeline.maintenance.forecast import forecast
from pipeline.trained_lora.differences import describe_difference
from pipeline.trained_lora.export.model_card import training_rows
from pipeline.trained_lora.fingerprint import run_facts, run_id
from pipeline.trained_lora.identities import by_content
from pipeline.trained_lora.inputs import training_inputs
from pipeline.trained_lora.job import plan_inputs, plan_settings
from pipeline.trained_lora.plan.steps import TrainingPlan
from pipeline.trained_lora.provenance import shareable
from pipeline.trained_lora.stage import train_lora
from tests.pipeline.cached_job import Job, recipe_of
from tests.pipeline.trained_lora.fingerprint_case import Samples, samples

__all__ = ["samples"]

SMALL: dict[str, Any] = {"name": "small", "path": "@folder@/small", "resolution": 512, "caption_dropout": 0.5}
LARGE: dict[str, Any] = {"name": "large", "path": "@folder@/large", "flip": True}
VALUES: dict[str, Any] = {
    "datasets": [SMALL, LARGE],
    "buckets": {"resolution": 1024, "step": 64},
    "text": {"caption_dropout": 0.1},
    "training": {"steps": 400, "batch_size": 2},
}
SIZES_HW = [(1200, 1200), (900, 1600), (1500, 1000), (700, 2400)]


class Placed(NamedTuple):
    """Geometry of an image: sizes and crop as lists, as in the JSON of a key."""

    bucket: str
    resized: list[int]
    crop: list[int]


def place(height: int, width: int, resolution: int, step: int = 64) -> Placed:
    """Return what docs/buckets.md describes, by trying every size."""
    edges = range(step, resolution * resolution // step + 1, step)
    sizes = {(resolution, resolution)}
    for edge in edges:
        other = resolution * resolution // edge // step * step
        if other and max(edge, other) <= 3 * min(edge, other):
            sizes |= {(edge, other), (other, edge)}

    def distance(size: tuple[int, int]) -> tuple[float, int]:
        off = abs(math.log(size[1] / size[0]) - math.log(width / height))
        return round(off, 9), -size[0] * size[1]

    th, tw = min(sizes, key=distance)
    scale = max(Fraction(th, height), Fraction(tw, width))
    resized = [math.floor(edge * scale + Fraction(1, 2)) for edge in (height, width)]
    top, left = (resized[0] - th) // 2, (resized[1] - tw) // 2
    return Placed(f"{th}x{tw}", resized, [top, left, th, tw])


def bits(*parts: object) -> int:
    """Return the 64 random bits that the parts decide."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def validated(samples: Samples) -> pl.DataFrame:
    """The images of `SIZES_HW` in each of the two datasets, with other bytes in each."""
    first = samples.validated.row(0, named=True)
    rows = [
        {
            **first,
            "sample_id": f"{dataset}/{at}.png",
            "dataset": dataset,
            "path": f"{at}.png",
            "content_hash": hashlib.sha256(f"{dataset} {at}".encode()).hexdigest(),
            "height": height,
            "width": width,
            "caption": f"{dataset} photograph {at}",
            "more_captions": "[]",
        }
        for dataset in ("small", "large")
        for at, (height, width) in enumerate(SIZES_HW)
    ]
    return pl.DataFrame(rows, schema=samples.validated.schema).sort("sample_id")


def test_keys_and_plan_of_two_datasets_equal_an_independent_computation(samples: Samples) -> None:
    recipe = samples.recipe(VALUES)
    entries, table = RecipeEntries(recipe), validated(samples)
    latents, text = samples.tables(entries, table)

    # Keys: 512 px without mirroring, and 1024 px with it.
    common = entries.latent_inputs(latents.row(0, named=True))
    expected: dict[tuple[str, bool], tuple[str, str]] = {}
    for row in table.iter_rows(named=True):
        is_small = row["dataset"] == "small"
        placed = place(row["height"], row["width"], 512 if is_small else 1024)
        for flip in (False,) if is_small else (False, True):
            key = latent_key(common, row["content_hash"], placed, flip=flip)
            expected[row["sample_id"], flip] = (placed.bucket, key)
    actual = latents.select("sample_id", "flipped", "bucket", "key").rows()
    assert {(name, flipped): (bucket, key) for name, flipped, bucket, key in actual} == expected

    # The plan: which captions are dropped, which views are drawn, and which samples share a batch.
    named = training_inputs(recipe, entries, latents, text)
    inputs = by_content(named, recipe, latents)
    plan = TrainingPlan(plan_inputs(inputs), plan_settings(recipe, inputs))
    buckets = {name: bucket for (name, _), (bucket, _) in expected.items()}
    identities = {row["sample_id"]: row["content_hash"][:32] for row in table.iter_rows(named=True)}
    drawn: Counter[tuple[int, str]] = Counter()
    dropped: Counter[str] = Counter()
    for step in plan:
        for micro in step.micro_batches:
            assert len({buckets[slot.variant_id] for share in micro for slot in share}) == 1
        for slot in step.slots():
            dataset = slot.variant_id.partition("/")[0]
            random = (identities[slot.variant_id], slot.epoch, slot.occurrence)
            rate, num_views = (0.5, 1) if dataset == "small" else (0.1, 2)
            assert slot.drop_caption == (bits(42, "dropout", *random) < rate * 2**64)
            assert slot.view == bits(42, "view", *random) % num_views
            drawn[slot.epoch, slot.variant_id] += 1
            dropped[dataset] += slot.drop_caption
    complete = [times for (epoch, _), times in drawn.items() if epoch < plan.num_epochs - 1]
    assert {*complete} == {1}
    assert dropped["small"] > 3 * dropped["large"] > 0


def test_R11_settings_of_datasets_are_explained_by_the_names_of_the_datasets(samples: Samples) -> None:
    table = validated(samples)

    def facts(*datasets: dict[str, Any]) -> dict[str, Any]:
        recipe = samples.recipe({**VALUES, "datasets": list(datasets)})
        entries = RecipeEntries(recipe)
        latents, text = samples.tables(entries, table)
        inputs = by_content(training_inputs(recipe, entries, latents, text), recipe, latents)
        return run_facts(recipe, entries, inputs)

    one = facts(SMALL, LARGE)
    other = facts({**SMALL, "caption_dropout": 0.3}, LARGE)
    assert describe_difference(one, other) == ["plan.caption_dropouts.small 0.5 -> 0.3"]

    # Names of datasets are not part of the id, and neither is the section that sets a value for all.
    assert "plan.caption_dropout" not in str(one["samples"])
    plain, small = {"name": "small", "path": "@folder@/small"}, {**SMALL, "caption_dropout": None}
    same = facts({**small, "caption_dropout": 0.1}, {**LARGE, "caption_dropout": 0.1})
    assert run_id(same) == run_id(facts(small, LARGE))
    assert run_id(facts(plain, LARGE)) != run_id(facts(small, LARGE))


@pytest.mark.parametrize(
    ("datasets", "buckets", "where", "message"),
    [
        (
            [{**SMALL, "resolution": 500}, LARGE],
            {},
            "datasets[0].resolution",
            "datasets[0].resolution must be a multiple of buckets.step, got 500 and 64",
        ),
        (
            [{**SMALL, "resolutions": [512, 768]}, LARGE],
            {},
            "datasets[0].resolutions",
            "resolution and resolutions cannot be used together",
        ),
        ([SMALL, LARGE], {"per_image": "each"}, "buckets.per_image", "each requires several resolutions"),
        (
            [{**SMALL, "slider": 1}, {**LARGE, "slider": -1}],
            {},
            "datasets[1].flip",
            "flip must be the same for all datasets with slider, got True and False",
        ),
    ],
)
def test_settings_of_datasets_that_contradict_others_are_mistakes(
    samples: Samples, datasets: list[dict[str, Any]], buckets: dict[str, Any], where: str, message: str
) -> None:
    with pytest.raises(RecipeError) as excinfo:
        samples.recipe({**VALUES, "datasets": datasets, "buckets": {**VALUES["buckets"], **buckets}})
    assert where in str(excinfo.value)
    assert message in str(excinfo.value)


def test_several_resolutions_of_one_dataset_are_enough_for_each(samples: Samples) -> None:
    several = {**SMALL, "resolution": None, "resolutions": [256, 512]}
    values = {**VALUES, "datasets": [several, LARGE], "buckets": {**VALUES["buckets"], "per_image": "each"}}
    entries = RecipeEntries(samples.recipe(values))
    latents, _ = samples.tables(entries, validated(samples))
    rows = latents.group_by("dataset", "flipped").len().sort("dataset", "flipped").rows()
    assert rows == [("large", False, 4), ("large", True, 4), ("small", False, 8)]


def test_gates_and_plan_know_the_settings_of_each_dataset(
    tmp_path: Path, photos: Path, tiny_sd: Path, in_process_launch: Any
) -> None:
    small = {"name": "photos", "path": str(photos), "duplicates": "keep_all"}
    large = {**small, "name": "large", "resolution": 96, "flip": True}
    both = recipe_of(tmp_path, tiny_sd, datasets=[small, large])
    job = Job(recipe_of(tmp_path, tiny_sd, datasets=[small]), in_process_launch)
    job.run()
    latents = len(job.tables.read("vae_latents"))

    # The entries of the first dataset are shared, and so are all captions.
    expected = forecast(both, job.tables, log=lambda _: None)
    assert (expected.latents.there, expected.latents.to_make) == (latents, 2 * latents)
    assert expected.text.to_make == 0
    job.recipe = both
    job.run()
    assert len(job.tables.read("vae_latents")) == 3 * latents
    assert {asset: job.failing(asset) for asset in ("vae_latents", "text_embeddings")} == {
        "vae_latents": {},
        "text_embeddings": {},
    }

    # Both gates compare the table with the recipe as it reads now.
    without = recipe_of(tmp_path, tiny_sd, datasets=[small, {**large, "flip": None}])
    problems = job.failing("vae_latents", without)["completeness"].rows
    assert {row["problem"] for row in problems} == {"the recipe does not need its mirrored latent"}
    smaller = recipe_of(tmp_path, tiny_sd, datasets=[small, {**large, "resolution": None}])
    wrong = job.failing("vae_latents", smaller)["shape_uniformity"].rows
    assert {row["sample_id"].partition("/")[0] for row in wrong} == {"large"}


def test_a_training_shows_each_dataset_with_its_own_settings(
    tmp_path: Path, photos: Path, tiny_sd: Path, in_process_launch: Any
) -> None:
    """The losses of a first step, before any weight has changed, equal diffusers' own for these inputs."""
    for file in sorted(photos.glob("*.png")):
        with Image.open(file) as image:
            rotated = image.transpose(Image.Transpose.ROTATE_180)
        (tmp_path / "large").mkdir(exist_ok=True)
        rotated.save(tmp_path / "large" / file.name)
        shutil.copy(file.with_suffix(".txt"), tmp_path / "large")
    recipe = recipe_of(
        tmp_path,
        tiny_sd,
        datasets=[
            {"name": "small", "path": str(photos), "caption_dropout": 1.0},
            {"name": "large", "path": str(tmp_path / "large"), "resolution": 128, "flip": True},
        ],
        latents={"posterior": "mean"},
        text={"caption_dropout": 0.0},
        training={
            "steps": 1,
            "batch_size": 2,
            "gradient_accumulation": 20,
            "sample_every": 0,
            "lora": {"rank": 2, "modules": ["mid_block.*.to_q"]},
        },
        accelerate={"mixed_precision": "no"},
    )
    job = Job(recipe, in_process_launch)
    job.run()
    latents, text = job.tables.read("vae_latents"), job.tables.read("text_embeddings")
    train_lora(recipe, latents, text, launch=in_process_launch, log=lambda _: None)

    # The step trained each image once, at the size of its dataset.
    (folder,) = (recipe.output_dir / "runs").iterdir()
    (line,) = map(json.loads, (folder / "logs" / "sample_losses.jsonl").read_text("utf-8").splitlines())
    names = pl.read_parquet(folder / "inputs.parquet")["sample_id"].gather(line["samples"])
    images = {row["sample_id"]: row for row in job.tables.read("validated_dataset").iter_rows(named=True)}
    assert sorted(names) == sorted(images)
    assert len(images) == 10

    common = RecipeEntries(recipe).latent_inputs(latents.row(0, named=True))
    keys = dict(text.select("sample_id", "key").iter_rows())
    (empty,) = {*(path.stem for path in (recipe.cache_dir / "text").glob("*/*.safetensors"))} - {
        *keys.values()
    }
    unet = UNet2DConditionModel.from_pretrained(tiny_sd, subfolder="unet")
    schedule = DDPMScheduler.from_pretrained(tiny_sd, subfolder="scheduler")
    losses: list[float] = []
    for index, (name, timestep) in enumerate(zip(names, line["timesteps"], strict=True)):
        image, is_small = images[name], name.startswith("small/")
        placed = place(image["height"], image["width"], 64 if is_small else 128, step=16)
        flip = not is_small and bool(bits(42, "view", image["content_hash"][:32], 0, 0) % 2)
        key = latent_key(common, image["content_hash"], placed, flip=flip)
        latent = cached(recipe.cache_dir / "latents", key)
        caption = cached(recipe.cache_dir / "text", empty if is_small else keys[name])
        seed = hashlib.blake2b(f"42\0noise\0{0}\0{index}".encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(seed, "big")))
        noise = torch.from_numpy(generator.standard_normal(latent.shape, dtype=np.float32))
        at = torch.tensor([int(timestep)])
        with torch.no_grad():
            noisy = schedule.add_noise(latent[None], noise[None], at)
            predicted = unet(noisy, at, caption[None]).sample[0]
        losses.append(float(((predicted - noise) ** 2).mean()))
    assert line["losses"] == pytest.approx(losses, rel=1e-4)


def latent_key(common: Any, content_hash: str, placed: Placed, *, flip: bool) -> str:
    """Return the key of a latent with the fields of `common` that do not depend on the image."""
    values = {**vars(common), "content_hash": content_hash, "flip": flip}
    values |= {"resized_size": placed.resized, "crop": placed.crop}
    text = json.dumps({"latents": values}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def cached(folder: Path, key: str) -> torch.Tensor:
    """Return the only tensor of the entry `key`."""
    (path,) = folder.glob(f"*/{key}.safetensors")
    (tensor,) = load_file(path).values()
    return tensor.float()


def test_plan_counts_each_text_with_dropped_tags_and_an_epoch_trains_on_one(
    tmp_path: Path, photos: Path, tiny_sd: Path, in_process_launch: Any
) -> None:
    for at, file in enumerate(sorted(photos.glob("*.txt"))):
        file.write_text(", ".join(f"{at} {tag}" for tag in "abcdefgh"), encoding="utf-8")
    captions = {"drop_tags": {"rate": 0.4, "variants": 3, "keep": 2}}
    dataset = {"name": "photos", "path": str(photos), "captions": captions}
    training = {"steps": 30, "sample_every": 0}
    recipe = recipe_of(tmp_path, tiny_sd, datasets=[dataset], training=training)
    job = Job(recipe, in_process_launch)

    # Tags are dropped by a hash of variant, caption and tag.
    wanted: dict[str, list[str]] = {}
    for file in sorted(photos.glob("*.txt")):
        text = file.read_text("utf-8")
        tags = text.split(", ")
        sample_id = f"photos/{file.with_suffix('.png').name}"
        wanted[sample_id] = [text]
        for variant in (1, 2):
            hashes = {tag: hashlib.sha256(f"drop\0{variant}\0{text}\0{tag}".encode()) for tag in tags}
            kept = [tag for tag in tags[2:] if int(hashes[tag].hexdigest()[:16], 16) >= 0.4 * 2**64]
            wanted[sample_id].append(", ".join(tags[:2] + kept))
    texts = {text for each in wanted.values() for text in each}
    assert len(texts) > 2 * len(wanted)
    assert forecast(recipe, job.tables, log=lambda _: None).text.to_make == len(texts) + 1, (
        "and the empty one"
    )

    job.run()
    assert job.failing("text_embeddings") == {}
    latents, text_table = (job.tables.read(asset) for asset in ("vae_latents", "text_embeddings"))
    entries = RecipeEntries(recipe)
    inputs = by_content(training_inputs(recipe, entries, latents, text_table), recipe, latents)
    assert {each.sample_id: [one.caption for one in each.variants] for each in inputs} == wanted
    plan = TrainingPlan(plan_inputs(inputs), plan_settings(recipe, inputs))
    for step in plan:
        for slot in step.slots():
            identity = inputs.named(slot.variant_id).identity
            assert slot.variant == bits(42, "variant", identity, slot.epoch, slot.occurrence) % 3


def test_the_model_card_names_the_settings_of_each_dataset(samples: Samples) -> None:
    large = {**LARGE, "captions": {"drop_tags": {"rate": 0.2}}}
    record = {
        "recipe": shareable(samples.recipe({**VALUES, "datasets": [SMALL, large]})),
        "model": {"base": "base"},
        "samples": {"number": 8},
    }
    rows = dict(training_rows(record, 400))
    assert rows["resolution"] == "1024"
    assert rows["dataset small"] == "resolution 512, caption dropout 0.5"
    assert rows["dataset large"] == "mirrored, tag dropout 0.2"
