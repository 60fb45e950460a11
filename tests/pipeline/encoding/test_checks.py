"""The checks of both cache stages, on tables and entries written by the real stages.

One test damages every entry of a small cache in every way. The last ones check entries in threads.
"""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipeline.cache.entry_format import DATA_START, serialise
from pipeline.cache.local_folder import LocalFolder
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.store import EntrySpec, EntryState, Store, TensorSpec
from pipeline.encoding import checks
from pipeline.encoding.checks import check_entries
from pipeline.log import discard
from pipeline.reporting.findings import CheckContext
from pipeline.text_embeddings import checks as text_embeddings
from pipeline.vae_latents import checks as vae_latents
from tests.pipeline.cached_job import ASSETS, Job
from tests.pipeline.packs_case import spec_of, write_entries

NUM_ENTRIES = {"vae_latents": 5, "text_embeddings": 6}
"""Number of entries of the project's cache: one per image, and one per caption and the empty one."""


@pytest.mark.parametrize("asset", ASSETS)
@pytest.mark.parametrize("change", [-1, 4096], ids=["cut short", "padded"])
def test_L02_only_file_size_outliers_reports_an_entry_of_the_wrong_size(
    job: Job, asset: str, change: int
) -> None:
    path = job.entry(asset)
    raw = path.read_bytes()
    path.write_bytes(raw[:change] if change < 0 else raw + bytes(change))
    failing = job.failing(asset)
    assert set(failing) == {"file_size_outliers"}
    finding = failing["file_size_outliers"]
    assert finding.closes
    assert finding.rows[0]["path"] == str(path)
    assert finding.rows[0]["bytes"] == len(raw) + change
    assert finding.rows[0]["expected_bytes"] == len(raw)
    assert finding.numbers == {"num_rows": 1, "entries": NUM_ENTRIES[asset], "problems": 1}


@pytest.mark.parametrize("asset", ASSETS)
def test_T06_checks_allow_cannot_open_the_gates_on_cache_entries(job: Job, asset: str) -> None:
    path = job.entry(asset)
    path.write_bytes(path.read_bytes()[:-1])
    lenient = job.changed(checks={"allow": ["file_size_outliers", "shape_uniformity"]})
    finding = job.failing(asset, lenient)["file_size_outliers"]
    assert finding.closes
    assert "checks.allow" not in finding.summary + finding.fix


@pytest.mark.parametrize("asset", ASSETS)
def test_L08_T06_completeness_reports_a_missing_entry_and_a_folder_at_its_path(job: Job, asset: str) -> None:
    path = job.entry(asset)
    path.unlink()
    assert set(job.failing(asset)) == {"completeness"}
    path.mkdir()
    failing = job.failing(asset)
    assert set(failing) == {"completeness"}
    assert failing["completeness"].rows[0]["path"] == str(path)


@pytest.mark.parametrize("asset", ASSETS)
def test_L07_finite_values_reports_a_flipped_bit(job: Job, asset: str) -> None:
    path = job.entry(asset)
    raw = bytearray(path.read_bytes())
    raw[DATA_START + 3] ^= 8
    path.write_bytes(raw)
    failing = job.failing(asset)
    assert set(failing) == {"finite_values"}
    assert "checksum" in failing["finite_values"].rows[0]["problem"]


@pytest.mark.parametrize("asset", ASSETS)
def test_L03_shape_uniformity_reports_a_header_with_another_shape_of_the_same_size(
    job: Job, asset: str
) -> None:
    path = job.entry(asset)
    entries = RecipeEntries(job.recipe)
    row = job.tables.read(asset).row(by_predicate=pl.col("sample_id") == "photos/cat.png", named=True)
    spec = entries.latent_spec(row) if asset == "vae_latents" else entries.text_spec(row["caption"])
    ((name, tensor),) = spec.tensors.items()
    transposed = EntrySpec(
        spec.kind, spec.key, {name: TensorSpec(tensor.dtype, (tensor.shape[-1], *tensor.shape[:-1]))}
    )
    values = entries.store.read(spec)[name].reshape(transposed.tensors[name].shape)
    path.write_bytes(serialise(transposed, {name: values}, {}))
    assert set(job.failing(asset)) == {"shape_uniformity"}


def test_finite_values_reports_an_entry_that_was_replaced_with_another(job: Job) -> None:
    path, other = (job.entry("text_embeddings", f"photos/{name}.png") for name in ("cat", "rocket"))
    path.write_bytes(other.read_bytes())
    failing = job.failing("text_embeddings")
    assert set(failing) == {"finite_values"}
    assert other.stem in failing["finite_values"].rows[0]["problem"]


@pytest.mark.parametrize(
    ("section", "asset"),
    [
        ({"latents": {"posterior": "mean"}}, "vae_latents"),
        ({"latents": {"dtype": "float32"}}, "vae_latents"),
        ({"buckets": {"resolution": 128, "step": 16}}, "vae_latents"),
        ({"text": {"dtype": "float32"}}, "text_embeddings"),
    ],
    ids=str,
)
def test_L04_T01_a_recipe_changed_after_the_tables_were_written_closes_the_gate(
    job: Job, section: dict[str, Any], asset: str
) -> None:
    failing = job.failing(asset, job.changed(**section))
    assert [name for name, finding in failing.items() if finding.closes], f"failing checks: {failing}"
    assert sum(len(finding.rows) for finding in failing.values()) >= 4, failing


def test_L03_shape_uniformity_recomputes_the_geometry_and_reports_changed_bucket_settings(job: Job) -> None:
    failing = job.failing("vae_latents", job.changed(buckets={"resolution": 128, "step": 16}))
    assert set(failing) == {"shape_uniformity"}
    assert "must have the shape" in failing["shape_uniformity"].summary


def test_L08_completeness_reports_a_row_that_is_missing_or_no_longer_needed(job: Job) -> None:
    for asset in ASSETS:
        table = job.tables.read(asset)
        job.tables.write(asset, table.filter(pl.col("sample_id") != "photos/cat.png"))
        failing = job.failing(asset)
        assert [row["sample_id"] for row in failing["completeness"].rows] == ["photos/cat.png"]
        job.tables.write(asset, table)
    buckets = job.tables.read("aspect_buckets")
    job.tables.write("aspect_buckets", buckets.filter(pl.col("sample_id") != "photos/cat.png"))
    assert "not in aspect_buckets" in job.failing("vae_latents")["completeness"].summary


def test_a_caption_edited_after_encoding_closes_the_gate(job: Job) -> None:
    table = job.tables.read("validated_dataset")
    edited = (
        pl.when(pl.col("sample_id") == "photos/cat.png").then(pl.lit("a dog")).otherwise(pl.col("caption"))
    )
    job.tables.write("validated_dataset", table.with_columns(caption=edited))
    assert "another caption" in job.failing("text_embeddings")["completeness"].summary


def test_T02_a_missing_entry_for_the_empty_caption_or_a_sample_prompt_closes_the_gate(job: Job) -> None:
    entries = RecipeEntries(job.recipe)
    path = entries.store.path(entries.text_spec(""))
    sound = path.read_bytes()
    path.unlink()
    assert "the empty caption" in job.failing("text_embeddings")["completeness"].summary
    path.write_bytes(sound)
    cached = job.tables.read("validated_dataset")["caption"][0]
    prompts = [cached, {"prompt": cached, "negative_prompt": "a moon"}]
    prompted = job.changed(training={"sample_prompts": prompts})
    assert "a moon" in job.failing("text_embeddings", prompted)["completeness"].summary


def test_C05_a_truncated_caption_causes_a_warning_that_shows_the_truncated_part(job: Job) -> None:
    folder = job.recipe.datasets[0].path
    (folder / "cat.txt").write_text("the cat " * 50 + "and nobody reads this", encoding="utf-8")
    for name in ("coffee", "camera"):
        (folder / f"{name}.txt").write_text("the cat " * 45, encoding="utf-8")
    job.run()
    failing = job.failing("text_embeddings")
    assert set(failing) == {"captions_fit"}
    finding = failing["captions_fit"]
    assert not finding.closes
    assert finding.rows[0]["cut_part"].endswith("and nobody reads this")
    assert finding.rows[0]["num_cut"] > finding.rows[1]["num_cut"] == finding.rows[2]["num_cut"] > 0
    longest_first = ["photos/cat.png", "photos/camera.png", "photos/coffee.png"]
    assert [row["sample_id"] for row in finding.rows] == longest_first


def test_L03_shape_uniformity_reports_a_bucket_whose_latents_have_several_shapes(job: Job) -> None:
    table = job.tables.read("vae_latents")
    same_bucket = table.with_columns(bucket=pl.lit("64x64"))
    shapes = same_bucket.select("latent_channels", "latent_height", "latent_width").unique()
    assert len(shapes) > 1
    job.tables.write("vae_latents", same_bucket)
    rows = job.failing("vae_latents")["shape_uniformity"].rows
    assert rows == [{"sample_id": "bucket 64x64", "problem": f"it has latents of {len(shapes)} shapes"}]


def test_an_image_rejected_while_encoding_counts_towards_rejected_fraction_but_not_completeness(
    job: Job,
) -> None:
    tables = job.tables
    latents = tables.read("vae_latents")
    row = latents.row(by_predicate=pl.col("sample_id") == "photos/cat.png", named=True)
    rejection = {"stage": "vae_latents", "reason": "latent_not_finite", "detail": "NaN", "fix": "look at it"}
    columns = ("sample_id", "dataset", "path", "content_hash")
    rejected = pl.DataFrame([{**{name: row[name] for name in columns}, **rejection}])
    encoding = tables.read_rejected().columns
    tables.write_rejected("vae_latents", rejected.select(encoding))
    tables.write("vae_latents", latents.filter(pl.col("sample_id") != "photos/cat.png"))
    failing = job.failing("vae_latents")
    assert set(failing) == {"rejected_fraction"}
    assert "20.0%" in failing["rejected_fraction"].summary
    lenient = job.changed(checks={"max_rejected_fraction": 0.2})
    assert job.failing("vae_latents", lenient) == {}


def test_I08_if_every_image_was_rejected_the_fix_is_that_of_the_rejections(job: Job) -> None:
    tables = job.tables
    samples = tables.read("validated_dataset", ("sample_id", "dataset", "path", "content_hash"))
    rejection = {
        "stage": "validated_dataset",
        "reason": "filter_min_width",
        "detail": "it is",
        "fix": "lower it",
    }
    columns = tables.read_rejected().columns
    rejected = samples.with_columns(pl.lit(text).alias(name) for name, text in rejection.items())
    tables.write_rejected("validated_dataset", rejected.select(columns))
    for asset in ("validated_dataset", "aspect_buckets", "vae_latents"):
        tables.write(asset, tables.read(asset).clear())
    finding = job.failing("vae_latents")["rejected_fraction"]
    assert finding.closes
    assert finding.summary == "no samples are left of 5 images: 5 filter_min_width"
    assert "lower it" in finding.fix


def test_the_checks_read_an_entry_only_if_its_stat_has_changed(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    read = LocalFolder.read_with_stat
    monkeypatch.setattr(
        LocalFolder, "read_with_stat", lambda self, name: names.append(name) or read(self, name)
    )
    assert job.failing("vae_latents") == {}
    assert names == []
    path = job.entry("vae_latents")
    path.touch()
    assert job.failing("vae_latents") == {}
    assert [Path(name).name for name in names] == [path.name]


@pytest.mark.parametrize("asset", ASSETS)
def test_the_checks_report_how_many_entries_they_read(
    job: Job, asset: str, progress_lines: list[str]
) -> None:
    for path in job.recipe.cache_dir.rglob("*.safetensors"):
        path.touch()
    check = {"vae_latents": vae_latents.run, "text_embeddings": text_embeddings.run}[asset]
    check(CheckContext(job.recipe, job.tables, log=progress_lines.append))
    count = len(list((job.recipe.cache_dir / ("latents" if asset == "vae_latents" else "text")).rglob("*.*")))
    assert f"cache entries checked: {count} of {count}, " in "\n".join(progress_lines)


def test_L08_a_missing_mirrored_latent_closes_the_gate(job: Job) -> None:
    flipped = job.changed(latents={"flip": True})
    finding = job.failing("vae_latents", flipped)["completeness"]
    assert sorted(row["sample_id"] for row in finding.rows) == sorted(
        job.tables.read("vae_latents")["sample_id"]
    )
    assert finding.rows[0]["problem"] == "its mirrored latent is in aspect_buckets but not in vae_latents"
    job.recipe = flipped
    job.cache()
    assert job.failing("vae_latents") == {}
    assert job.failing("vae_latents", job.changed())["completeness"].rows[0]["problem"] == (
        "the recipe does not need its mirrored latent"
    )


_rng = random.Random(4)
"""Generator of positions to damage."""


def emptied(path: Path, _: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path, _: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: _rng.randrange(1, len(raw))])


def flipped_in_header(path: Path, _: Path) -> None:
    _flip(path, 0, DATA_START)


def flipped_in_data(path: Path, _: Path) -> None:
    _flip(path, DATA_START, path.stat().st_size)


def replaced(path: Path, neighbour: Path) -> None:
    path.write_bytes(neighbour.read_bytes())


def grown(path: Path, _: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0" * _rng.randrange(1, 100))


def deleted(path: Path, _: Path) -> None:
    path.unlink()


def a_folder(path: Path, _: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("kept")


def _flip(path: Path, start: int, end: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[_rng.randrange(start, end)] ^= 1 << _rng.randrange(8)
    path.write_bytes(raw)


DAMAGES = (cut, replaced, emptied, flipped_in_header, flipped_in_data, grown, deleted, a_folder)
BOUNDED = {("vae_latents", cut), ("text_embeddings", replaced)}


@pytest.mark.parametrize(
    ("asset", "damage"),
    [
        pytest.param(*pair, marks=[] if pair in BOUNDED else pytest.mark.slow)
        for pair in product(ASSETS, DAMAGES)
    ],
)
def test_L02_L06_L07_damage_to_any_entry_is_reported_and_repaired(
    job: Job, asset: str, damage: Callable[[Path, Path], None]
) -> None:
    entries = RecipeEntries(job.recipe)
    sound = contents(job)
    for row in job.tables.read(asset).to_dicts():
        spec = entries.latent_spec(row) if asset == "vae_latents" else entries.text_spec(row["caption"])
        path = entries.store.path(spec)
        neighbour = next(other for other in sorted(path.parents[1].rglob("*.safetensors")) if other != path)
        damage(path, neighbour)

        bad_rows = [row for finding in job.failing(asset).values() for row in finding.rows]
        assert {row["path"] for row in bad_rows} == {str(path)}
        assert [row for row in bad_rows if not row["problem"]] == []
        others = {"vae_latents", "text_embeddings"} - {asset}
        assert all(job.failing(other) == {} for other in others), (
            "a check of the other stage reports the damage"
        )

        job.cache()
        assert job.failing(asset) == {}
        assert contents(job) == sound
        displaced = list(path.parent.glob("*.displaced"))
        assert bool(displaced) == (damage is a_folder)
        for folder in displaced:
            assert (folder / "inside").read_text() == "kept", (
                "the contents of the displaced folder were deleted"
            )
            shutil.rmtree(folder)


def contents(job: Any) -> dict[str, bytes]:
    root = job.recipe.cache_dir
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.safetensors")}


class StoreOfFourThreads(Store):
    """A store whose checks end when four of them run at the same time."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.threads = 4
        self.barrier = threading.Barrier(4, timeout=10)

    def check(self, spec: EntrySpec) -> EntryState:
        self.barrier.wait()
        return super().check(spec)


def test_entries_are_checked_at_the_same_time_and_yielded_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "ROWS_AT_A_TIME", 8)
    store = StoreOfFourThreads(tmp_path)
    write_entries(Store(tmp_path), 10)
    rows = pl.DataFrame({"number": range(12)})
    parts = list(check_entries(store, rows, lambda row: spec_of(row["number"]), log=discard))
    assert [len(part) for part in parts] == [8, 4]
    checked = [each for part in parts for each in part]
    assert [row["number"] for row, _, _ in checked] == list(range(12))
    assert [spec for _, spec, _ in checked] == [spec_of(number) for number in range(12)]
    assert [state.status for _, _, state in checked] == 10 * ["valid"] + 2 * ["missing"]


def test_the_progress_of_checks_is_reported(tmp_path: Path, progress_lines: list[str]) -> None:
    store = Store(tmp_path)
    write_entries(store, 3)
    rows = pl.DataFrame({"number": range(3)})
    list(check_entries(store, rows, lambda row: spec_of(row["number"]), log=progress_lines.append))
    assert progress_lines[-1].startswith("cache entries checked: 3 of 3, ")


def test_no_rows_need_no_checks(tmp_path: Path) -> None:
    rows = pl.DataFrame(schema={"number": pl.Int64})
    assert list(check_entries(Store(tmp_path), rows, lambda row: spec_of(row["number"]), log=discard)) == []
