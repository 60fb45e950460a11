"""`latentline gc` deletes unused old entries and leftover temporary files, and nothing else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cache.backends import cache_folder
from pipeline.cache.folder import CacheFile
from pipeline.cache.local_folder import LocalFolder
from pipeline.cache.used_keys import FOLDER, UsedKeys
from pipeline.encoding.shared_encoding import ENCODINGS
from pipeline.errors import StoreError
from pipeline.maintenance.gc import KEEP_S, Survey, delete, needed_keys, survey
from pipeline.maintenance.gc_packs import Packs
from pipeline.storage.atomic import temp_name
from tests.pipeline.cached_job import Job
from tests.pipeline.used_case import OLD_S, forget_use, lists, make_old, use, used

DAY_S = 24 * 3600


def entries(job: Job) -> set[Path]:
    return set(job.recipe.cache_dir.rglob("*.safetensors"))


def names_in_cache(job: Job, *paths: Path) -> set[str]:
    """Return the paths relative to the cache, as in a survey."""
    return {path.relative_to(job.recipe.cache_dir).as_posix() for path in paths}


def add_order(job: Job) -> Path:
    """Write a file of an encoding for workers, and return it."""
    file = job.recipe.cache_dir / ENCODINGS / "some-encoding" / "encoding.json"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    return file


def drop_sample(job: Job, name: str = "cat") -> tuple[Path, Path]:
    """Delete an image and its caption, and run the job again a month later; return the sample's entries."""
    dropped_entries = (
        job.entry("vae_latents", f"photos/{name}.png"),
        job.entry("text_embeddings", f"photos/{name}.png"),
    )
    for suffix in (".png", ".txt"):
        (job.recipe.datasets[0].path / f"{name}{suffix}").unlink()
    forget_use(job.recipe.cache_dir)
    job.run()
    return dropped_entries


def test_a_cache_in_use_has_no_orphans_whatever_its_age(job: Job) -> None:
    make_old(job.recipe.cache_dir)
    surveyed = survey(job.recipe.cache_dir)
    assert (surveyed.entries, surveyed.num_used) == (len(entries(job)), len(entries(job)))
    assert (surveyed.orphans, surveyed.young, surveyed.foreign, surveyed.expired_lists) == ({}, 0, [], {})
    assert surveyed.entry_bytes == sum(path.stat().st_size for path in entries(job))
    assert delete(job.recipe.cache_dir, surveyed) == (0, 0)


def test_L13_entries_of_a_removed_sample_are_orphans_when_no_job_has_used_them_for_a_while(job: Job) -> None:
    dropped_entries = drop_sample(job)
    assert survey(job.recipe.cache_dir).young == 2, "they were written recently"
    make_old(job.recipe.cache_dir)
    surveyed = survey(job.recipe.cache_dir)
    assert set(surveyed.orphans) == names_in_cache(job, *dropped_entries)
    assert len(surveyed.expired_lists) == 2
    num_bytes = sum(surveyed.orphans.values()) + sum(surveyed.expired_lists.values())
    before = entries(job)
    assert delete(job.recipe.cache_dir, surveyed) == (4, num_bytes)
    assert entries(job) == before - set(dropped_entries)
    assert job.failing("vae_latents") == job.failing("text_embeddings") == {}


def test_L13_the_empty_caption_and_preview_prompts_are_used_without_a_table_row(job: Job) -> None:
    named = {*job.tables.read("vae_latents")["key"], *job.tables.read("text_embeddings")["key"]}
    without_row = {path for path in entries(job) if path.stem not in named}
    assert without_row, "there is no entry without a row"
    make_old(job.recipe.cache_dir)
    assert survey(job.recipe.cache_dir).orphans == {}


def test_L13_an_entry_that_another_project_uses_is_not_an_orphan(job: Job) -> None:
    latent, text = drop_sample(job)
    use(job.recipe.cache_dir, [latent.stem])
    make_old(job.recipe.cache_dir)
    assert set(survey(job.recipe.cache_dir).orphans) == names_in_cache(job, text)


def test_L13_output_folders_do_not_matter(job: Job) -> None:
    shutil.rmtree(job.recipe.output_dir)
    make_old(job.recipe.cache_dir)
    assert survey(job.recipe.cache_dir).orphans == {}


def test_L13_an_entry_used_between_survey_and_deletion_is_kept(job: Job) -> None:
    latent, text = drop_sample(job)
    make_old(job.recipe.cache_dir)
    surveyed = survey(job.recipe.cache_dir)
    use(job.recipe.cache_dir, [latent.stem])
    delete(job.recipe.cache_dir, surveyed)
    assert latent.exists()
    assert not text.exists()


def test_L13_a_list_marked_between_survey_and_deletion_is_kept(job: Job) -> None:
    cache = job.recipe.cache_dir
    drop_sample(job)
    old = [path for path in lists(cache) if path.stat().st_mtime == OLD_S]
    make_old(cache)
    surveyed = survey(cache)
    assert len(surveyed.expired_lists) == len(old) == 2
    os.utime(old[0])
    delete(cache, surveyed)
    assert [path.exists() for path in old] == [True, False]


def test_a_cache_of_an_earlier_version_is_kept_until_its_use_was_recorded_long_enough(job: Job) -> None:
    """Version 0.2 recorded no use. So nothing is known about entries that no job of this version used."""
    cache = job.recipe.cache_dir
    latent, _ = drop_sample(job)
    make_old(cache, lists_too=True)
    shutil.rmtree(cache / FOLDER)
    (cache / "outputs").mkdir()
    for name in ("0123456789abcdef.json", "0123456789abcdef-latents.keys"):
        (cache / "outputs" / name).write_bytes(b"123")
        os.utime(cache / "outputs" / name, (OLD_S, OLD_S))
    for _ in range(2):
        surveyed = survey(cache)
        assert (surveyed.orphans, surveyed.leftovers, surveyed.foreign) == ({}, {}, [])
        assert delete(cache, surveyed) == (0, 0)
        job.cache()
    assert survey(cache).young == 2

    os.utime(cache / FOLDER / "since", (OLD_S, OLD_S))
    surveyed = survey(cache)
    assert len(surveyed.orphans) == 2
    assert len(surveyed.leftovers) == 2
    delete(cache, surveyed)
    assert not latent.exists()
    assert not (cache / "outputs").exists()
    assert job.failing("vae_latents") == job.failing("text_embeddings") == {}


def test_keys_of_recipes_are_those_that_the_cache_jobs_recorded(job: Job) -> None:
    keys = needed_keys(job.recipe, log=print)
    assert {key for group in keys for key in group} == used(job.recipe.cache_dir)
    before = lists(job.recipe.cache_dir)
    for path in before:
        path.unlink()
    delete(job.recipe.cache_dir, survey(job.recipe.cache_dir, recipe_keys=keys))
    assert lists(job.recipe.cache_dir) == before, "they are divided in the same way"
    shutil.rmtree(job.recipe.output_dir)
    assert needed_keys(job.recipe, log=print) == []


def test_L13_only_what_recipes_need_is_kept_if_lists_do_not_count(job: Job) -> None:
    """The next gc must not take the entries that this one kept for unused."""
    cache = job.recipe.cache_dir
    dropped_entries = drop_sample(job)
    make_old(cache, lists_too=True)
    surveyed = survey(cache, keep_s=0, recipe_keys=needed_keys(job.recipe, log=print))
    assert set(surveyed.orphans) == names_in_cache(job, *dropped_entries)
    before = entries(job)
    delete(cache, surveyed)
    assert entries(job) == before - set(dropped_entries)
    make_old(cache)
    assert survey(cache).orphans == {}


def test_I27_leftovers_of_writers_are_deleted_and_foreign_files_are_kept(job: Job) -> None:
    root = job.recipe.cache_dir
    leftovers = {folder / temp_name() for folder in (root, root / FOLDER, root / "latents" / "ab")}
    foreign = {
        root / "render.tmp",
        root / "latents" / "mine.tmp",
        root / "latents" / "ab" / ".12-cd.tmp",
        root / "text" / temp_name(),
        root / FOLDER / "mine.tmp",
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
    assert survey(root).leftovers == {}, "a writer may be at work on them"
    make_old(root)
    surveyed = survey(root)
    assert set(surveyed.leftovers) == names_in_cache(job, *leftovers)
    assert set(surveyed.foreign) == names_in_cache(job, *foreign, misplaced)
    assert delete(root, surveyed) == (len(leftovers), 3 * len(leftovers))
    assert [path for path in foreign | {misplaced} if not path.exists()] == [], "files that gc has deleted"


def test_L13_nothing_is_an_orphan_while_a_list_cannot_be_read(job: Job) -> None:
    make_old(job.recipe.cache_dir)
    lists(job.recipe.cache_dir)[0].write_bytes(b"torn")
    with pytest.raises(StoreError, match="a list of used entries is damaged"):
        survey(job.recipe.cache_dir)


def test_a_missing_cache_has_no_entries(tmp_path: Path) -> None:
    assert survey(tmp_path / "none").entries == 0
    assert not (tmp_path / "none").exists()


def test_L13_files_of_unknown_age_are_never_deleted(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some object stores do not state when a file was written."""

    class AgelessFolder(LocalFolder):
        def files(self) -> Iterator[CacheFile]:
            yield from (replace(file, modified_s=None) for file in super().files())

    latent, text = drop_sample(job)
    leftover = job.recipe.cache_dir / temp_name()
    leftover.write_bytes(b"partial")
    encoding = add_order(job)
    make_old(job.recipe.cache_dir)
    monkeypatch.setattr("pipeline.maintenance.gc.cache_folder", AgelessFolder)
    surveyed = survey(job.recipe.cache_dir)
    to_delete = {name: getattr(surveyed, name) for name in ("orphans", "leftovers", "old_encodings")}
    assert to_delete == {"orphans": {}, "leftovers": {}, "old_encodings": {}}
    kept = {name: getattr(surveyed, name) for name in ("young", "num_young_encodings", "num_old_encodings")}
    assert kept == {"young": 2, "num_young_encodings": 1, "num_old_encodings": 0}
    delete(job.recipe.cache_dir, surveyed)
    files = (latent, text, leftover, encoding)
    assert [path.name for path in files if not path.exists()] == [], "files that gc has deleted"


@pytest.mark.parametrize(("older_s", "is_old"), [(-60, False), (60, True)], ids=["younger", "older"])
def test_L13_an_entry_is_old_after_30_days_and_an_order_and_a_leftover_after_one(
    job: Job, older_s: int, is_old: bool
) -> None:
    latent, _ = drop_sample(job)
    make_old(job.recipe.cache_dir)
    encoding, leftover = add_order(job), job.recipe.cache_dir / temp_name()
    leftover.write_bytes(b"partial")
    now_s = leftover.stat().st_mtime
    for path, age_s in ((latent, KEEP_S), (encoding, DAY_S), (leftover, DAY_S)):
        os.utime(path, (now_s - age_s - older_s, now_s - age_s - older_s))
    surveyed = survey(job.recipe.cache_dir)
    found = {
        "orphans": surveyed.orphans,
        "encodings": surveyed.old_encodings,
        "leftovers": surveyed.leftovers,
    }
    files = {"orphans": latent, "encodings": encoding, "leftovers": leftover}
    actual = {kind: names_in_cache(job, file) <= set(found[kind]) for kind, file in files.items()}
    assert actual == dict.fromkeys(files, is_old)
    numbers = {"old": surveyed.num_old_encodings, "young": surveyed.num_young_encodings}
    assert numbers == {"old": int(is_old), "young": int(not is_old)}


def test_L13_an_order_with_one_young_file_is_young(tmp_path: Path) -> None:
    files = [CacheFile(f"encodings/1/{name}", 5, modified_s) for name, modified_s in (("a", 10), ("b", 90))]
    surveyed = Survey(UsedKeys(tmp_path, 0), Packs(cache_folder(tmp_path)))
    surveyed.add_encodings({"1": files}, oldest_kept_s=50)
    assert (surveyed.old_encodings, surveyed.num_young_encodings) == ({}, 1)
