"""The sample of decoded latents, their statistics and their pictures, drawn by the real encoder."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from skimage.metrics import peak_signal_noise_ratio

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.worker.tensors import read_torch
from pipeline.encoding.jobs import read_encoding
from pipeline.encoding.progress import Progress
from pipeline.images.decode import load_pixels
from pipeline.images.geometry import Geometry
from pipeline.processes.launch import Meanwhile
from pipeline.reporting.reports import StageResult
from pipeline.vae_latents import report as decoded
from pipeline.vae_latents.stage import cache_latents
from pipeline.vae_latents.worker.encoder import LatentEncoder
from pipeline.vae_latents.worker.reconstruct import draw_pictures
from tests.in_process_worker import run

WHITE = (255, 255, 255)


@pytest.fixture
def all_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode all five photographs of the tests."""
    monkeypatch.setattr(decoded, "MIN_DECODED", 5)


def cached(cache: Any, launch: Any) -> StageResult:
    result = cache_latents(cache.recipe, cache.buckets(), cache.tables, launch=launch, log=lambda _: None)
    return cache.keep("vae_latents", result)


def folder_of(cache: Any) -> Path:
    return cache.recipe.output_dir / "reports" / "vae_latents"


def pictures(cache: Any) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder_of(cache).glob("*.jpg")}


def some_rows(number: int, **columns: Any) -> pl.DataFrame:
    hashes = [hashlib.sha256(b"%d" % index).hexdigest() for index in range(number)]
    rows = pl.DataFrame({"content_hash": hashes, "key": hashes[::-1], "flipped": [False] * number})
    return rows.with_columns(**{name: pl.Series(values) for name, values in columns.items()})


@pytest.mark.parametrize(("latents", "expected"), [(0, 3), (60, 3), (80, 4), (160, 8), (10**6, 8)])
def test_more_latents_are_decoded_for_larger_datasets(latents: int, expected: int) -> None:
    assert decoded.num_decoded(latents) == expected


@pytest.mark.parametrize("number", [3, 8, 64, 5000])
def test_the_sample_does_not_depend_on_row_order_and_has_the_requested_size(number: int) -> None:
    rows = some_rows(number)
    sample = decoded.choose(rows, 8)
    assert len(sample) == min(8, number)
    assert sample.equals(decoded.choose(rows.sample(fraction=1.0, shuffle=True, seed=1), 8))
    assert sample["content_hash"].to_list() == sorted(rows["content_hash"].to_list())[:8]


def test_the_sample_contains_each_image_once_and_no_mirrored_latents() -> None:
    rows = pl.concat([some_rows(5), some_rows(5, flipped=[True] * 5), some_rows(5, key=list("abcde"))])
    sample = decoded.choose(rows, 8)
    assert sample["content_hash"].n_unique() == len(sample) == 5
    assert not sample["flipped"].any()
    assert decoded.choose(rows.clear(), 8).is_empty()


def test_psnr_equals_that_of_scikit_image_and_is_finite_for_equal_images() -> None:
    generator = np.random.default_rng(3)
    image, other = generator.integers(0, 256, (2, 40, 30, 3), dtype=np.uint8)
    assert decoded.psnr_db(image, other) == pytest.approx(peak_signal_noise_ratio(image, other), abs=1e-9)
    assert decoded.psnr_db(image, image) == pytest.approx(10 * np.log10(255**2 * image.size))


@pytest.mark.usefixtures("all_decoded")
def test_each_picture_shows_the_image_next_to_the_latent_decoded_as_diffusers_does(
    cache: Any, in_process_launch: Any, tiny_sd: Path
) -> None:
    from diffusers import AutoencoderKL

    cache = cache.with_settings(buckets={"resolution": 192, "step": 64})
    result = cached(cache, in_process_launch)
    rows, table = result.report["decoded"], {row["sample_id"]: row for row in result.table.to_dicts()}
    assert {row["sample_id"] for row in rows} == set(table)
    vae, entries = AutoencoderKL.from_pretrained(tiny_sd / "vae"), RecipeEntries(cache.recipe)
    for reported in rows:
        row = table[reported["sample_id"]]
        path, geometry = cache.photos / row["path"], Geometry.from_row(row)
        image = load_pixels(path, geometry, WHITE, content_hash=row["content_hash"])
        stored = read_torch(entries.store, entries.latent_spec(row))["latent"].float()
        with torch.no_grad():
            drawn = vae.decode(stored[None] / vae.config.scaling_factor).sample
        picture = (drawn / 2 + 0.5).clamp(0, 1)[0].permute(1, 2, 0).numpy()
        expected = peak_signal_noise_ratio(image, (picture * 255).round().astype(np.uint8))
        assert reported["psnr_db"] == pytest.approx(expected, abs=0.01)
        with Image.open(folder_of(cache) / reported["picture"]) as pair:
            left = np.asarray(pair.convert("RGB"), dtype=float)[:, : row["target_width"]]
        assert left.shape == image.shape
        assert np.abs(left - image).mean() < 6  # JPEG is lossy
    ratios = [row["psnr_db"] for row in rows]
    assert result.report["psnr_db"] == pytest.approx(np.mean(ratios), abs=1e-3)
    assert result.report["psnr_lowest_db"] == min(ratios)
    assert result.report["pictures_seconds"] > 0
    assert "5 latents decoded" in "\n".join(in_process_launch.lines)


def test_a_run_that_encodes_nothing_shows_the_previous_pictures(
    cache: Any, in_process_launch: Any, forbidden_launch: Any
) -> None:
    first = cached(cache, in_process_launch)
    drawn = pictures(cache)
    again = cached(cache, forbidden_launch)
    shown = {"decoded", "psnr_db", "psnr_lowest_db", "latent_mean", "latent_std", "channels"}
    assert {name: again.report[name] for name in shown} == {name: first.report[name] for name in shown}
    assert pictures(cache) == drawn
    assert again.report["pictures_seconds"] == 0
    shutil.rmtree(folder_of(cache))
    report_without_pictures = cached(cache, forbidden_launch).report
    assert "no latent has been decoded" in report_without_pictures["decoded_note"]
    assert "psnr_db" not in report_without_pictures
    assert report_without_pictures["latent_std"] == first.report["latent_std"]


@pytest.mark.usefixtures("all_decoded")
def test_only_changed_images_are_drawn_again_and_their_old_pictures_are_deleted(
    cache: Any, in_process_launch: Any
) -> None:
    cached(cache, in_process_launch)
    before = {path.name: path.stat().st_mtime_ns for path in folder_of(cache).iterdir()}
    with Image.open(cache.photos / "cat.png") as image:
        image.rotate(180).save(cache.photos / "cat.png")
    cached(cache, in_process_launch)
    after = {path.name: path.stat().st_mtime_ns for path in folder_of(cache).iterdir()}
    assert len([name for name in after if name.endswith(".jpg")]) == 5
    new = set(after.items()) - set(before.items())
    assert len(new) == 3  # one pair, its numbers, and the statistics
    assert len(set(before) - set(after)) == 2


@pytest.mark.usefixtures("all_decoded")
def test_two_ranks_draw_each_picture_once_including_those_of_existing_entries(
    cache: Any, in_process_launch: Any
) -> None:
    """Rank 0 draws the latents that it encoded and the existing ones; rank 1 draws only its own."""
    copied_encodings: list[Path] = []
    by_rank_1: dict[str, bytes] = {}

    def launch(module: str, encoding: Path, meanwhile: Meanwhile) -> None:
        meanwhile()
        copied = shutil.copytree(encoding.parent, folder_of(cache).parent / "encoding")
        copied_encodings.append(copied / encoding.name)
        run(encoding, in_process_launch, rank=1, num_ranks=2)
        by_rank_1.update(pictures(cache))
        for name in by_rank_1:
            (folder_of(cache) / name).write_bytes(b"drawn once")
        run(encoding, in_process_launch, rank=0, num_ranks=2)

    (cache.photos / "cat.png").rename(cache.photos / "cat.later")
    cached(cache, in_process_launch)
    (cache.photos / "cat.later").rename(cache.photos / "cat.png")
    shutil.rmtree(folder_of(cache))
    for name in ("coffee", "rocket"):
        entries, row = RecipeEntries(cache.recipe), cache.buckets().filter(pl.col("path") == f"{name}.png")
        entries.store.path(entries.latent_spec(row.row(0, named=True))).unlink()
    cached(cache, launch)
    encoding = read_encoding(copied_encodings[0])
    assert {job.name for job in encoding.jobs} == {"photos/cat.png", "photos/coffee.png", "photos/rocket.png"}
    assert len(pictures(cache)) == 5
    assert 1 <= len(by_rank_1) <= 2
    assert {name: pictures(cache)[name] for name in by_rank_1} == dict.fromkeys(by_rank_1, b"drawn once")


class Drawing:
    """An encoder with finished entries, and the pictures to draw from them."""

    def __init__(self, cache: Any, in_process_launch: Any) -> None:
        self.cache = cache
        self.lines: list[str] = in_process_launch.lines
        entries = RecipeEntries(cache.recipe)
        encodings = [read_encoding(self._encoding(cache, in_process_launch))]
        progress = Progress(in_process_launch, cache.photos, jobs=range(5), what="latents", rank=0)
        self.encoder = LatentEncoder(encodings[0], "cpu", progress)
        assert encodings[0].pictures is not None
        self.pictures, self.store, self.progress = encodings[0].pictures, entries.store, progress
        shutil.rmtree(folder_of(cache))
        self.lines.clear()

    def _encoding(self, cache: Any, in_process_launch: Any) -> Path:
        kept: list[Path] = []

        def launch(module: str, encoding: Path, meanwhile: Meanwhile) -> None:
            meanwhile()
            kept.append(shutil.copytree(encoding.parent, cache.photos.parent / "encoding") / encoding.name)
            in_process_launch(module, encoding)

        cached(cache, launch)
        return kept[0]

    def draw(self) -> list[decoded.DecodedLatent]:
        draw_pictures(self.pictures, self.encoder, self.store, self.progress)
        return decoded.read(self.pictures.folder, [job.spec.key for job in self.pictures.jobs])


@pytest.mark.usefixtures("all_decoded")
def test_images_that_are_unreadable_or_too_large_for_memory_are_logged_and_the_rest_are_drawn(
    cache: Any, in_process_launch: Any
) -> None:
    drawing = Drawing(cache, in_process_launch)
    (cache.photos / "cat.png").unlink()
    decode = drawing.encoder.family.vae.decode

    def decode_with_little_memory(vae: Any, latent: torch.Tensor) -> torch.Tensor:
        if latent.shape[-1] > latent.shape[-2]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return decode(vae, latent)

    drawing.encoder.family.vae.decode = decode_with_little_memory  # type: ignore[method-assign]
    wide = cache.buckets().filter(pl.col("target_width") > pl.col("target_height"))
    decoded_latents = drawing.draw()
    assert len(decoded_latents) == 5 - 1 - len(wide)
    assert len(wide) > 0
    log = "\n".join(drawing.lines)
    assert log.count("memory ran out") == len(wide), log
    assert log.count("photos/cat.png: ImageError") == 1, log


@pytest.mark.usefixtures("all_decoded")
def test_a_decoder_that_overflows_in_half_precision_runs_again_in_float32(
    cache: Any, in_process_launch: Any, tiny_sd: Path, tmp_path: Path
) -> None:
    base = shutil.copytree(tiny_sd, tmp_path / "loud")
    file = base / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights["decoder.conv_in.weight"] *= 1e6  # a later normalisation cancels the factor
    weights["decoder.conv_in.bias"] *= 1e6
    save_file(weights, file, metadata={"format": "pt"})
    half, full = (
        cache.with_settings(model={"base": str(base)}, latents={"compute_dtype": dtype, "posterior": "mean"})
        for dtype in ("float16", "float32")
    )
    psnr_by_sample = []
    for each in (half, full):
        psnr_by_sample.append(
            {row["sample_id"]: row["psnr_db"] for row in cached(each, in_process_launch).report["decoded"]}
        )
        shutil.rmtree(folder_of(each))
    assert len(psnr_by_sample[0]) == 5
    assert psnr_by_sample[0] == pytest.approx(psnr_by_sample[1], abs=0.1)


@pytest.mark.usefixtures("all_decoded")
def test_on_a_cpu_only_the_centre_of_a_large_image_is_decoded(
    cache: Any, in_process_launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.vae_latents.worker.reconstruct.CPU_WINDOW_PX", 40)
    result = cached(cache, in_process_launch)
    sizes = {row["sample_id"]: (row["target_height"], row["target_width"]) for row in result.table.to_dicts()}
    assert len(result.report["decoded"]) == 5
    for row in result.report["decoded"]:
        height, width = (min(40, edge) for edge in sizes[row["sample_id"]])
        with Image.open(folder_of(cache) / row["picture"]) as pair:
            assert pair.size == (2 * width + 4, height)


def keep(folder: Path, number: int, noise: int) -> str:
    generator = np.random.default_rng(number)
    image = generator.integers(0, 256, (300, 600, 3), dtype=np.uint8)
    other = np.clip(image + generator.integers(-noise, noise + 1, image.shape), 0, 255).astype(np.uint8)
    key = hashlib.sha256(b"%d" % number).hexdigest()
    decoded.save(folder, key, image, other, seconds=0.1)
    return key


def test_a_note_warns_when_most_pictures_are_worse_than_their_mean_colour(tmp_path: Path) -> None:
    keys = [keep(tmp_path, number, noise) for number, noise in enumerate((10, 20, 5, 255, 255))]
    sample = pl.DataFrame({"key": keys, "sample_id": [f"photos/{number}" for number in range(5)]})
    report = decoded.report(tmp_path, sample)
    assert "decoded_note" not in report
    assert report["psnr_db"] == pytest.approx(
        np.mean([row["psnr_db"] for row in report["decoded"]]), abs=1e-3
    )
    last = decoded.report(tmp_path, sample.tail(3))
    assert last["decoded_note"].startswith("2 of 3 ")
    assert len(list(tmp_path.glob("*.jpg"))) == 3


def test_the_report_shows_the_first_pictures_and_always_the_worst_one(tmp_path: Path) -> None:
    rows = [{"psnr_db": ratio} for ratio in (30.0, 31.0, 32.0, 33.0, 34.0, 20.0, 35.0)]
    assert [row["psnr_db"] for row in decoded.shown(rows)] == [30.0, 31.0, 32.0, 20.0]
    assert decoded.shown(rows[:1]) == rows[:1]
    assert decoded.shown([]) == []


def test_the_picture_file_is_small_even_for_noise(tmp_path: Path) -> None:
    keep(tmp_path, 1, 255)
    (file,) = tmp_path.glob("*.jpg")
    assert file.stat().st_size * decoded.NUM_SHOWN <= 200_000


def test_results_of_another_key_and_truncated_results_are_ignored(tmp_path: Path) -> None:
    key = keep(tmp_path, 1, 9)
    same_prefix = key[:16] + "0" * 48
    assert decoded.read(tmp_path, [same_prefix]) == []
    (file,) = tmp_path.glob("*.json")
    file.write_text(file.read_text("utf-8")[:20], encoding="utf-8")
    assert decoded.read(tmp_path, [key]) == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("posterior", ["sample", "moments"])
def test_statistics_equal_those_of_the_stored_values(
    cache: Any, in_process_launch: Any, dtype: str, posterior: str
) -> None:
    cache = cache.with_settings(latents={"dtype": dtype, "posterior": posterior, "flip": True})
    result = cached(cache, in_process_launch)
    entries, stored = RecipeEntries(cache.recipe), list[torch.Tensor]()
    for row in result.table.filter(~pl.col("flipped")).to_dicts():
        tensors = read_torch(entries.store, entries.latent_spec(row))
        stored.append(tensors["mean" if posterior == "moments" else "latent"].double().flatten(1))
    values = torch.cat(stored, dim=1)
    assert result.report["latent_mean"] == pytest.approx(float(values.mean()), rel=1e-3)
    assert result.report["latent_std"] == pytest.approx(float(values.std(correction=0)), rel=1e-3)
    last = result.report["channels"][3]
    assert last["channel"] == 3
    assert last["most"] == pytest.approx(float(values[3].max()), rel=1e-3)
    assert last["std"] == pytest.approx(float(values[3].std(correction=0)), rel=1e-3)
    statistics = json.loads((folder_of(cache) / "statistics.json").read_text("utf-8"))
    assert len(statistics["latents"]) == 5


def test_only_latents_that_are_new_in_the_statistics_are_read(
    cache: Any, in_process_launch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = cached(cache, in_process_launch).table
    entries, keys_read = RecipeEntries(cache.recipe), list[str]()
    read = entries.store.read

    def record(spec: Any) -> Any:
        keys_read.append(spec.key)
        return read(spec)

    monkeypatch.setattr(entries.store, "read", record)
    decoded.statistics(entries, table[1:], tmp_path / "one")
    keys_read.clear()
    numbers = decoded.statistics(entries, table, tmp_path / "one")
    assert keys_read == [table["key"][0]]
    assert numbers == decoded.statistics(entries, table, tmp_path / "two")

    (tmp_path / "one/statistics.json").write_text('{"latents": {"a": [[1]]}}', "utf-8")
    assert decoded.statistics(entries, table, tmp_path / "one") == numbers
