"""`latentline gc` deletes orphaned entries and leftover temporary files, and nothing else."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cache.backends import cache_folder
from pipeline.cache.folder import CacheFile
from pipeline.cache.local_folder import LocalFolder
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.users import register_user, unregister_user
from pipeline.encoding.shared_order import ORDERS
from pipeline.errors import StoreError, TableError
from pipeline.maintenance.gc import Survey, delete, survey
from pipeline.maintenance.gc_packs import Packs
from pipeline.outputs.folder import OutputFolder
from pipeline.recipe import project_root
from pipeline.recipe.load import working_copy
from pipeline.storage.addresses import Url
from pipeline.storage.atomic import temp_name
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.samples import training_inputs
from tests.pipeline.cached_job import Job

OLD_S = 1_000_000_000


def make_all_files_old(job: Job) -> None:
    """Set the modification time of every file in the cache to 2001, beyond any grace period."""
    for path in job.recipe.cache_dir.rglob("*"):
        os.utime(path, (OLD_S, OLD_S))


def entries(job: Job) -> set[Path]:
    return set(job.recipe.cache_dir.rglob("*.safetensors"))


def names_in_cache(job: Job, *paths: Path) -> set[str]:
    """Return the paths relative to the cache, as in a survey."""
    return {path.relative_to(job.recipe.cache_dir).as_posix() for path in paths}


def add_order(job: Job) -> Path:
    """Write a file of an order for workers, and return it."""
    file = job.recipe.cache_dir / ORDERS / "some-order" / "order.json"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    return file


def drop_sample(job: Job, name: str = "cat") -> tuple[Path, Path]:
    """Delete an image and its caption, run the job again, and return the sample's two entries."""
    dropped_entries = (
        job.entry("vae_latents", f"photos/{name}.png"),
        job.entry("text_embeddings", f"photos/{name}.png"),
    )
    for suffix in (".png", ".txt"):
        (job.recipe.datasets[0].path / f"{name}{suffix}").unlink()
    job.run()
    return dropped_entries


def test_a_cache_in_use_has_no_orphans_whatever_its_age(job: Job) -> None:
    make_all_files_old(job)
    surveyed = survey(job.recipe.cache_dir)
    assert (surveyed.entries, surveyed.orphans, surveyed.young, surveyed.foreign) == (
        len(entries(job)),
        {},
        0,
        [],
    )
    assert surveyed.entry_bytes == sum(path.stat().st_size for path in entries(job))
    assert [user.output_dir for user in surveyed.users] == [job.recipe.output_dir]
    assert delete(job.recipe.cache_dir, surveyed) == (0, 0)


def test_L13_entries_of_a_removed_sample_are_orphans_after_the_grace_period(job: Job) -> None:
    dropped_entries = drop_sample(job)
    assert survey(job.recipe.cache_dir).young == 2, "within the grace period they are kept"
    make_all_files_old(job)
    surveyed = survey(job.recipe.cache_dir)
    assert set(surveyed.orphans) == names_in_cache(job, *dropped_entries)
    before = entries(job)
    assert delete(job.recipe.cache_dir, surveyed) == (2, sum(surveyed.orphans.values()))
    assert entries(job) == before - set(dropped_entries)
    assert job.failing("vae_latents") == job.failing("text_embeddings") == {}


def test_L13_the_empty_caption_and_preview_prompts_are_needed_without_a_table_row(job: Job) -> None:
    named = {*job.tables.read("vae_latents")["key"], *job.tables.read("text_embeddings")["key"]}
    without_row = {path for path in entries(job) if path.stem not in named}
    assert without_row, "there is no entry without a row"
    make_all_files_old(job)
    assert survey(job.recipe.cache_dir).orphans == {}


def test_L13_an_entry_that_another_project_needs_is_not_an_orphan(job: Job, tmp_path: Path) -> None:
    latent, _ = drop_sample(job)
    register_user(
        job.recipe.cache_dir, tmp_path / "other", recipe="other", kind="latents", keys=[latent.stem]
    )
    make_all_files_old(job)
    assert not names_in_cache(job, latent) & set(survey(job.recipe.cache_dir).orphans)
    unregister_user(job.recipe.cache_dir, tmp_path / "other")
    assert names_in_cache(job, latent) <= set(survey(job.recipe.cache_dir).orphans)


def test_L13_a_missing_or_unmounted_output_folder_still_counts(job: Job) -> None:
    shutil.rmtree(job.recipe.output_dir)
    make_all_files_old(job)
    assert survey(job.recipe.cache_dir).orphans == {}


def test_L13_entries_named_only_in_a_table_are_needed(job: Job) -> None:
    """A running job has registered other keys, but the tables of the last job still list these."""
    register_user(job.recipe.cache_dir, job.recipe.output_dir, recipe="sample", kind="latents", keys=[])
    make_all_files_old(job)
    assert survey(job.recipe.cache_dir).orphans == {}


def test_L13_an_unfinished_run_keeps_its_entries_and_a_finished_one_does_not(job: Job) -> None:
    tables = job.tables.read("vae_latents"), job.tables.read("text_embeddings")
    entries = RecipeEntries(job.recipe)
    inputs = training_inputs(job.recipe, entries, *tables)
    training_job = TrainingJob(
        job.recipe, entries.model_folder, "0123456789abcdef", inputs, entries.text_spec(""), ()
    )
    training_job.write()
    run = training_job.folder
    latent, text = drop_sample(job)
    make_all_files_old(job)
    assert survey(job.recipe.cache_dir).orphans == {}
    (run / "finished.json").write_text("{}")
    assert set(survey(job.recipe.cache_dir).orphans) == names_in_cache(job, latent, text)


def test_L13_a_run_that_another_machine_extends_keeps_its_entries(job: Job, tmp_path: Path) -> None:
    """Machine b makes a finished run unfinished again, after this one has pulled its marker."""
    cache, address = job.recipe.cache_dir, Url(f"memory://{uuid.uuid4().hex}/out")
    entries = RecipeEntries(job.recipe)
    inputs = training_inputs(
        job.recipe, entries, job.tables.read("vae_latents"), job.tables.read("text_embeddings")
    )
    b = job.recipe.model_copy(update={"output_dir": tmp_path / "b"})
    training_job = TrainingJob(b, entries.model_folder, "0123456789abcdef", inputs, entries.text_spec(""), ())
    training_job.write()
    (training_job.folder / "finished.json").write_text("{}")
    outputs = OutputFolder(address, b.output_dir)
    outputs.upload("runs/")

    register_user(cache, address, recipe="sample", kind="latents", keys=[])
    unregister_user(cache, job.recipe.output_dir)
    make_all_files_old(job)
    try:
        latents = names_in_cache(job, *cache.glob("latents/*/*"))
        assert latents <= survey(cache).orphans.keys()
        outputs.remove("runs/0123456789abcdef/finished.json")
        assert latents.isdisjoint(survey(cache).orphans)
    finally:
        shutil.rmtree(working_copy("sample", address, project_root()))


def test_L13_an_entry_requested_between_survey_and_deletion_is_kept(job: Job) -> None:
    latent, text = drop_sample(job)
    make_all_files_old(job)
    surveyed = survey(job.recipe.cache_dir)
    register_user(
        job.recipe.cache_dir, job.recipe.output_dir, recipe="sample", kind="latents", keys=[latent.stem]
    )
    assert delete(job.recipe.cache_dir, surveyed)[0] == 1
    assert latent.exists()
    assert not text.exists()


def test_I27_leftovers_of_writers_are_deleted_and_foreign_files_are_kept(job: Job) -> None:
    root = job.recipe.cache_dir
    leftovers = {folder / temp_name() for folder in (root, root / "outputs", root / "latents" / "ab")}
    foreign = {
        root / "render.tmp",
        root / "latents" / "mine.tmp",
        root / "latents" / "ab" / ".12-cd.tmp",
        root / "text" / temp_name(),
        root / "outputs" / "mine.tmp",
        root / "photos" / temp_name(),
        root / "photos" / "of mine.tmp",
        root / "latents" / "mine.npz",
        root / "notes.txt",
        root / "photos" / "a.safetensors",
    }
    misplaced = root / "latents" / "zz" / ("0" * 64 + ".safetensors")
    for path in leftovers | foreign | {misplaced}:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"123")
    young = survey(root)
    assert young.leftovers == {}, "a writer may be at work on them"
    make_all_files_old(job)
    surveyed = survey(root)
    assert set(surveyed.leftovers) == names_in_cache(job, *leftovers)
    assert set(surveyed.foreign) == names_in_cache(job, *foreign, misplaced)
    assert delete(root, surveyed) == (len(leftovers), 3 * len(leftovers))
    assert [path for path in foreign | {misplaced} if not path.exists()] == [], "files that gc has deleted"


def test_L13_nothing_is_an_orphan_while_a_table_or_registration_cannot_be_read(job: Job) -> None:
    make_all_files_old(job)
    table = job.tables.path("vae_latents")
    raw = table.read_bytes()
    table.write_bytes(b"torn")
    with pytest.raises(TableError, match="the entries that it needs are unknown"):
        survey(job.recipe.cache_dir)
    table.write_bytes(raw)
    (path,) = (job.recipe.cache_dir / "outputs").glob("*.json")
    path.write_text("torn")
    with pytest.raises(StoreError, match="registration"):
        survey(job.recipe.cache_dir)


def test_a_missing_cache_has_no_entries(tmp_path: Path) -> None:
    assert survey(tmp_path / "none").entries == 0


def test_L13_files_of_unknown_age_are_never_deleted(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some object stores do not state when a file was written."""

    class AgelessFolder(LocalFolder):
        def files(self) -> Iterator[CacheFile]:
            yield from (replace(file, modified_s=None) for file in super().files())

    latent, text = drop_sample(job)
    leftover = job.recipe.cache_dir / temp_name()
    leftover.write_bytes(b"partial")
    order = add_order(job)
    make_all_files_old(job)
    monkeypatch.setattr("pipeline.maintenance.gc.cache_folder", AgelessFolder)
    surveyed = survey(job.recipe.cache_dir)
    to_delete = {name: getattr(surveyed, name) for name in ("orphans", "leftovers", "old_orders")}
    assert to_delete == {"orphans": {}, "leftovers": {}, "old_orders": {}}
    kept = {name: getattr(surveyed, name) for name in ("young", "num_young_orders", "num_old_orders")}
    assert kept == {"young": 2, "num_young_orders": 1, "num_old_orders": 0}
    assert delete(job.recipe.cache_dir, surveyed) == (0, 0)
    files = (latent, text, leftover, order)
    assert [path.name for path in files if not path.exists()] == [], "files that gc has deleted"


@pytest.mark.parametrize(("older_s", "is_old"), [(0, False), (1, True)], ids=["at the limit", "older"])
def test_L13_an_entry_an_order_and_a_leftover_are_old_only_beyond_the_grace_period(
    job: Job, monkeypatch: pytest.MonkeyPatch, older_s: int, is_old: bool
) -> None:
    latent, _ = drop_sample(job)
    order, leftover = add_order(job), job.recipe.cache_dir / temp_name()
    leftover.write_bytes(b"partial")
    now_s = 1_900_000_000
    written_s = now_s - 24 * 3600 - older_s
    for path in (latent, order, leftover):
        os.utime(path, (written_s, written_s))
    monkeypatch.setattr("time.time", lambda: now_s)
    surveyed = survey(job.recipe.cache_dir)
    found = {"orphans": surveyed.orphans, "orders": surveyed.old_orders, "leftovers": surveyed.leftovers}
    files = {"orphans": latent, "orders": order, "leftovers": leftover}
    actual = {kind: names_in_cache(job, file) <= set(found[kind]) for kind, file in files.items()}
    assert actual == dict.fromkeys(files, is_old), f"{older_s} s beyond the grace period"
    numbers = {"old": surveyed.num_old_orders, "young": surveyed.num_young_orders}
    assert numbers == {"old": int(is_old), "young": int(not is_old)}


def test_L13_an_order_with_one_young_file_is_young(tmp_path: Path) -> None:
    files = [CacheFile(f"orders/1/{name}", 5, modified_s) for name, modified_s in (("a", 10), ("b", 90))]
    surveyed = Survey(Packs(cache_folder(tmp_path)))
    surveyed.add_orders({"1": files}, oldest_kept_s=50)
    assert (surveyed.old_orders, surveyed.num_young_orders) == ({}, 1)
