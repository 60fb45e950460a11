from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from PIL import Image

from pipeline.cache.local_folder import LocalFolder
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.worker.tensors import read_torch
from pipeline.encoding.jobs import read_encoding
from pipeline.errors import ModelError, StoreError
from pipeline.images.geometry import Geometry
from pipeline.processes.launch import LocalLaunch, Meanwhile
from pipeline.reporting.reports import StageResult
from pipeline.vae_latents.stage import cache_latents


def cached(cache, launch, log_lines: list[str] | None = None) -> StageResult:
    log = log_lines.append if log_lines is not None else lambda _: None
    result = cache_latents(cache.recipe, cache.buckets(), cache.tables, launch=launch, log=log)
    return cache.keep("vae_latents", result)


def counts(result: StageResult) -> dict[str, int]:
    return {name: result.report[name] for name in ("encoded", "reused", "removed", "failed")}


def pixels_by_hand(path: Path, geometry: Geometry) -> torch.Tensor:
    """Return the resized and cropped image as a float tensor (1, 3, H, W) in [-1, 1]."""
    target = geometry.target_size
    with Image.open(path) as image:
        box = geometry.source_box
        resized = image.resize((target.width, target.height), Image.Resampling.BICUBIC, box=box)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)[None].float() / 127.5 - 1


def assert_close(stored: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with the tolerance that docs/families.md states."""
    torch.testing.assert_close(stored, expected, rtol=0, atol=1e-4 * float(expected.std()))


@pytest.mark.parametrize("posterior", ["sample", "mean"])
def test_latents_equal_those_of_diffusers_for_the_same_pixels(
    cache, in_process_launch, tiny_sd, posterior
) -> None:
    from diffusers import AutoencoderKL

    cache = cache.with_settings(latents={"posterior": posterior, "dtype": "float32"})
    result = cached(cache, in_process_launch)
    vae = AutoencoderKL.from_pretrained(tiny_sd / "vae").to(memory_format=torch.channels_last)
    entries = RecipeEntries(cache.recipe)
    assert result.table.height == 5
    for row in result.table.to_dicts():
        spec = entries.latent_spec(row)
        assert spec.key == row["key"]
        with torch.no_grad():
            pixels = pixels_by_hand(cache.photos / row["path"], Geometry.from_row(row))
            encoded = vae.encode(pixels).latent_dist
        noise = torch.Generator("cpu").manual_seed(int(row["key"][:15], 16))
        raw = encoded.mean if posterior == "mean" else encoded.sample(noise)
        expected = raw[0] * vae.config.scaling_factor
        stored = read_torch(entries.store, spec)["latent"]
        assert stored.shape == (4, row["target_height"] // 8, row["target_width"] // 8)
        assert_close(stored, expected)
        assert 0.3 < stored.std() < 3


def test_moments_and_mirrored_latents_equal_those_of_diffusers(cache, in_process_launch, tiny_sd) -> None:
    from diffusers import AutoencoderKL

    cache = cache.with_settings(latents={"posterior": "moments", "flip": True, "dtype": "float32"})
    result = cached(cache, in_process_launch)
    vae = AutoencoderKL.from_pretrained(tiny_sd / "vae").to(memory_format=torch.channels_last)
    entries = RecipeEntries(cache.recipe)
    assert counts(result) == {"encoded": 10, "reused": 0, "removed": 0, "failed": 0}
    assert (result.report["samples"], result.report["kept"], result.report["in"]) == (5, 5, 5)
    assert result.table["sample_id"].n_unique() == 5
    for row in result.table.to_dicts():
        with torch.no_grad():
            pixels = pixels_by_hand(cache.photos / row["path"], Geometry.from_row(row))
            posterior = vae.encode(pixels.flip(3) if row["flipped"] else pixels).latent_dist
        stored = read_torch(entries.store, entries.latent_spec(row))
        scale = vae.config.scaling_factor
        assert_close(stored["mean"], posterior.mean[0] * scale)
        assert_close(stored["std"], posterior.std[0] * scale)
        assert (stored["std"] > 0).all()


def test_L11_adding_mirrored_latents_leaves_existing_entries_unchanged(
    cache, in_process_launch, entry_bytes
) -> None:
    cached(cache, in_process_launch)
    plain = entry_bytes()
    flipped = cache.with_settings(latents={"flip": True})
    assert counts(cached(flipped, in_process_launch)) == {
        "encoded": 5,
        "reused": 5,
        "removed": 0,
        "failed": 0,
    }
    assert plain.items() <= entry_bytes().items()
    assert counts(cached(cache, in_process_launch)) == {"encoded": 0, "reused": 5, "removed": 5, "failed": 0}


def test_a_sample_is_rejected_if_its_mirrored_latent_fails(cache, in_process_launch) -> None:
    buckets = cache.buckets()
    flipped = cache.with_settings(latents={"flip": True})
    (cache.photos / "cat.png").unlink()
    result = cache_latents(flipped.recipe, buckets, cache.tables, launch=in_process_launch, log=str)
    assert result.rejected.select("sample_id", "reason").rows() == [("photos/cat.png", "vanished")]
    assert "photos/cat.png" not in result.table["sample_id"].to_list()
    assert (result.report["in"], result.report["kept"], result.report["rejected"]) == (5, 4, 1)


def test_a_second_run_encodes_nothing_and_reuses_every_entry(
    cache, in_process_launch, forbidden_launch
) -> None:
    assert counts(cached(cache, in_process_launch)) == {"encoded": 5, "reused": 0, "removed": 0, "failed": 0}
    again = cached(cache, forbidden_launch)
    assert counts(again) == {"encoded": 0, "reused": 5, "removed": 0, "failed": 0}
    assert again.report["startup_seconds"] == 0


def test_a_warm_run_reads_no_entry_and_a_run_without_the_table_reads_all(
    cache, in_process_launch, forbidden_launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached(cache, in_process_launch)
    names: list[str] = []
    read = LocalFolder.read_with_stat
    monkeypatch.setattr(
        LocalFolder, "read_with_stat", lambda self, name: names.append(name) or read(self, name)
    )
    cached(cache, forbidden_launch)
    assert names == []
    cache.tables.path("vae_latents").unlink()
    assert cached(cache, forbidden_launch).report["reused"] == 5
    assert len(names) == 5


def test_workers_start_before_all_entries_are_checked_if_one_is_certainly_missing(
    cache, in_process_launch, forbidden_launch
) -> None:
    cached(cache, in_process_launch)
    checked_before_launch: list[bool] = []

    def launch(module: str, encoding: Path, meanwhile: Meanwhile) -> None:
        checked_before_launch.append(bool(log_lines))
        in_process_launch(module, encoding, meanwhile)

    log_lines: list[str] = []
    shutil.copy(cache.photos / "cat.png", cache.photos / "cat2.png")
    assert cached(cache, forbidden_launch).report["reused"] == 5, "the new image has an existing entry"
    with Image.open(cache.photos / "cat.png") as image:
        image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(cache.photos / "cat2.png")
    assert cached(cache, launch, log_lines).report["encoded"] == 1
    log_lines.clear()
    next((cache.recipe.cache_dir / "latents").glob("*/*")).unlink()
    assert cached(cache, launch, log_lines).report["encoded"] == 1
    assert checked_before_launch == [False, True], "entries recorded in a table are checked before the launch"


def test_L10_entries_written_by_a_concurrent_job_count_as_reused(cache, in_process_launch) -> None:
    def launch_twice(module: str, encoding: Path, meanwhile: Meanwhile) -> None:
        in_process_launch(module, encoding, meanwhile)
        in_process_launch(module, encoding)

    assert counts(cached(cache, launch_twice)) == {"encoded": 0, "reused": 5, "removed": 0, "failed": 0}


def test_editing_an_image_in_place_encodes_one_latent(cache, in_process_launch) -> None:
    cached(cache, in_process_launch)
    path = cache.photos / "cat.png"
    with Image.open(path) as image:
        flipped = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    flipped.save(path)
    assert counts(cached(cache, in_process_launch)) == {"encoded": 1, "reused": 4, "removed": 1, "failed": 0}


def test_renaming_duplicating_and_removing_images_encodes_nothing(
    cache, in_process_launch, forbidden_launch
) -> None:
    cached(cache, in_process_launch)
    (cache.photos / "cat.png").rename(cache.photos / "renamed.png")
    assert counts(cached(cache, forbidden_launch))["reused"] == 5
    (cache.photos / "twin.png").write_bytes((cache.photos / "coffee.png").read_bytes())
    twins = cached(cache, forbidden_launch)
    assert counts(twins) == {"encoded": 0, "reused": 5, "removed": 0, "failed": 0}
    assert twins.report["samples"] == 6
    (cache.photos / "camera.png").unlink()
    assert counts(cached(cache, forbidden_launch)) == {"encoded": 0, "reused": 4, "removed": 1, "failed": 0}


def test_L15_moving_the_dataset_and_the_cache_encodes_nothing(
    cache, in_process_launch, forbidden_launch, tmp_path
) -> None:
    cached(cache, in_process_launch)
    cache.photos = cache.photos.rename(tmp_path / "moved")
    moved = cache.recipe.cache_dir.rename(tmp_path / "cache2")
    again = cache.with_settings(
        cache_dir=str(moved), datasets=[{"name": "renamed", "path": str(cache.photos)}]
    )
    buckets = again.buckets().with_columns(dataset=pl.lit("renamed"))
    result = cache_latents(again.recipe, buckets, again.tables, launch=forbidden_launch, log=lambda _: None)
    assert counts(result)["reused"] == 5


def test_the_bytes_of_a_latent_do_not_depend_on_the_other_images_of_its_batch(
    cache, in_process_launch, entry_bytes
) -> None:
    cached(cache, in_process_launch)
    together = entry_bytes()
    for path in sorted(cache.photos.glob("*.png")):
        path.rename(path.with_suffix(".aside"))
    alone: dict[str, bytes] = {}
    for path in sorted(cache.photos.glob("*.aside")):
        shutil.rmtree(cache.recipe.cache_dir)
        path.rename(path.with_suffix(".png"))
        cached(cache, in_process_launch)
        alone |= entry_bytes()
        path.with_suffix(".png").rename(path)
    assert alone == together
    assert len(alone) == 5


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_each_stored_dtype_reads_back(cache, in_process_launch, dtype: str) -> None:
    cache = cache.with_settings(latents={"dtype": dtype})
    result = cached(cache, in_process_launch)
    entries = RecipeEntries(cache.recipe)
    for row in result.table.to_dicts():
        assert row["dtype"] == dtype
        latent = read_torch(entries.store, entries.latent_spec(row))["latent"]
        assert latent.dtype == getattr(torch, dtype)
        assert latent.isfinite().all()


def test_an_image_changed_after_the_scan_is_rejected_and_the_others_are_encoded(
    cache, in_process_launch
) -> None:
    buckets = cache.buckets()
    (cache.photos / "cat.png").write_bytes((cache.photos / "coffee.png").read_bytes())
    (cache.photos / "rocket.png").unlink()
    result = cache_latents(cache.recipe, buckets, cache.tables, launch=in_process_launch, log=lambda _: None)
    assert counts(result) == {"encoded": 3, "reused": 0, "removed": 0, "failed": 2}
    reasons = dict(result.rejected.select("sample_id", "reason").iter_rows())
    assert reasons == {"photos/cat.png": "changed", "photos/rocket.png": "vanished"}
    assert result.report["in"] == result.report["kept"] + result.report["rejected"] == 5


def test_L05_a_damaged_vae_is_an_error_and_writes_no_entry(cache, in_process_launch, tmp_path) -> None:
    """The weights of the VAE's first layer are infinite."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "damaged"
    shutil.copytree(cache.recipe.model.base, folder)
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights["encoder.conv_in.weight"] = weights["encoder.conv_in.weight"] * float("inf")
    save_file(weights, file, {"format": "pt"})
    recipe = cache.with_settings(model={"base": str(folder)})
    with pytest.raises(ModelError, match=r"NaN or infinite values.*(?s:.*)download the model again"):
        cached(recipe, in_process_launch)
    assert list(cache.recipe.cache_dir.rglob("*.safetensors")) == []


def test_L05_latents_outside_the_range_of_the_stored_dtype_are_an_error_that_names_a_wider_dtype(
    cache, in_process_launch, tmp_path
) -> None:
    folder = tmp_path / "loud"
    shutil.copytree(cache.recipe.model.base, folder)
    file = folder / "vae" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "scaling_factor": 1e6}))
    with pytest.raises(ModelError, match=r"does not fit into float16(?s:.*)set latents\.dtype to bfloat16"):
        cached(cache.with_settings(model={"base": str(folder)}), in_process_launch)
    fits = cache.with_settings(model={"base": str(folder)}, latents={"dtype": "bfloat16"})
    assert cached(fits, in_process_launch).report["failed"] == 0


def test_computing_in_half_precision_gives_nearly_the_same_latents(cache, in_process_launch) -> None:
    exact, half = (
        cached(cache.with_settings(latents={"compute_dtype": dtype, "posterior": "mean"}), in_process_launch)
        for dtype in ("float32", "bfloat16")
    )
    a = RecipeEntries(cache.with_settings(latents={"posterior": "mean"}).recipe)
    b = RecipeEntries(cache.with_settings(latents={"compute_dtype": "bfloat16", "posterior": "mean"}).recipe)
    for row, other in zip(exact.table.to_dicts(), half.table.to_dicts(), strict=True):
        assert row["key"] != other["key"]
        first, second = (e.store.read(e.latent_spec(row))["latent"] for e in (a, b))
        assert np.abs(first - second).max() < 0.25


def test_L06_L07_damaged_entries_are_logged_and_encoded_again(cache, in_process_launch, entry_bytes) -> None:
    cached(cache, in_process_launch)
    sound = entry_bytes()
    names = sorted(sound)
    cut, grown, flipped, deleted = (cache.recipe.cache_dir / name for name in names[:4])
    cut.write_bytes(sound[names[0]][:-5])
    grown.write_bytes(sound[names[1]] + b"x")
    raw = bytearray(sound[names[2]])
    raw[-1] ^= 64
    flipped.write_bytes(raw)
    deleted.unlink()
    log_lines: list[str] = []
    result = cached(cache, in_process_launch, log_lines)
    assert result.report["encoded"] == 4
    assert result.report["damaged"] == 3
    assert entry_bytes() == sound
    for path in (cut, grown, flipped):
        assert any(str(path) in line for line in log_lines), path


def test_an_entry_that_was_reported_as_encoded_but_is_missing_is_an_error(cache) -> None:
    def launch_without_writing(_: str, encoding: Path, meanwhile: Meanwhile) -> None:
        meanwhile()
        keys = [job.spec.key for job in read_encoding(encoding).jobs]
        lines = [json.dumps({"key": key, "outcome": "made", "failure": None}) for key in keys]
        (encoding.parent / "results-0.jsonl").write_text(
            "\n".join([*lines, '{"work_s": 0.1, "aside_s": 0.0}', ""])
        )

    with pytest.raises(StoreError, match="was written, but now it is missing"):
        cached(cache, launch_without_writing)


def test_the_last_progress_line_counts_all_latents(cache, in_process_launch) -> None:
    cached(cache, in_process_launch)
    assert in_process_launch.lines[-1] == "5/5 latents encoded"


@pytest.mark.slow
def test_L10_two_jobs_on_an_empty_cache_write_equal_entries(cache, in_process_launch, entry_bytes) -> None:
    """Both jobs run real child processes and start at the same time."""
    cached(cache, in_process_launch)
    expected_entries = entry_bytes()
    shutil.rmtree(cache.recipe.cache_dir)
    launch = LocalLaunch(cache.recipe.accelerate)
    buckets = cache.buckets()

    def job(_: int) -> StageResult:
        return cache_latents(cache.recipe, buckets, cache.tables, launch=launch, log=lambda _: None)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(job, range(2))
    assert entry_bytes() == expected_entries
    assert first.table["key"].to_list() == second.table["key"].to_list()
    assert first.report["startup_seconds"] > first.report["seconds"]
    assert not list(cache.recipe.cache_dir.rglob("*.tmp"))
    for result in (first, second):
        assert result.report["encoded"] + result.report["reused"] == 5
