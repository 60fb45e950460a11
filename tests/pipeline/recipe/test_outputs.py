"""Recipes with an output folder at an address: loading, path isolation, rejected rows of two machines."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import polars as pl
import pytest

from pipeline.cache.users import read_users, register_user
from pipeline.errors import PathIsolationError
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.recipe.isolation import check_isolation
from pipeline.recipe.outputs import MERGED_REJECTIONS, mirror_of, push_stage, stage_files
from pipeline.storage.addresses import Url
from pipeline.storage.mirror import Mirror
from pipeline.storage.tables import Tables, empty


def recipe_with(output: str, name: str = "flowers", **values: Any) -> Recipe:
    defaults = {"datasets": [{"name": "photos", "path": "/data/photos"}], "model": {"base": "a/b"}}
    return recipe_from_mapping(name, {**defaults, "output_dir": output, **values})


def test_an_address_becomes_a_working_copy_of_its_own() -> None:
    recipe = recipe_with("s3://bucket/flowers")
    assert recipe.output_address == Url("s3://bucket/flowers")
    assert recipe.output_dir.parts[-3:-1] == (".cache", "scratch")
    assert recipe.output_dir == recipe_with("s3://bucket/flowers/").output_dir
    others = [recipe_with("s3://bucket/other"), recipe_with("s3://bucket/flowers", name="roses")]
    assert len({recipe.output_dir, *(other.output_dir for other in others)}) == 3
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_a_recipe_stored_by_an_older_version_has_its_folder_as_address() -> None:
    recipe = recipe_with("/outputs/flowers")
    stored = recipe.model_dump_json(exclude={"output_address"})
    assert Recipe.model_validate_json(stored) == recipe
    assert recipe.output_address == recipe.output_dir == Path("/outputs/flowers")


@pytest.mark.parametrize(
    ("output", "changes"),
    [
        ("s3://bucket/photos/out", {"datasets": [{"name": "photos", "path": "s3://bucket/photos"}]}),
        ("s3://bucket", {"datasets": [{"name": "photos", "path": "s3a://Bucket/photos"}]}),
        ("s3://bucket/cache/out", {"cache_dir": "s3://bucket/cache"}),
        ("s3://bucket", {"cache_dir": "s3://bucket/cache"}),
        ("s3://bucket/both", {"cache_dir": "s3://bucket/both"}),
    ],
    ids=["in a dataset", "around a dataset", "in the cache", "around the cache", "the cache"],
)
def test_an_address_that_overlaps_another_is_refused(output: str, changes: dict[str, Any]) -> None:
    (conflict,) = check_isolation(recipe_with(output, **changes))
    assert "output_dir" in conflict.what()


def test_a_working_copy_inside_a_dataset_is_refused_before_anything_is_written() -> None:
    separate = recipe_with("memory://isolated/flowers")
    scratch = separate.output_dir.parent
    recipe = recipe_with("memory://isolated/flowers", datasets=[{"name": "photos", "path": str(scratch)}])
    existed = recipe.output_dir.exists()
    with pytest.raises(PathIsolationError, match="the working copy of output_dir is inside dataset photos"):
        mirror_of(recipe).pull(*stage_files("raw_images"))
    assert recipe.output_dir.exists() == existed


def test_all_machines_with_the_same_address_are_one_user_of_the_cache(tmp_path: Path) -> None:
    keys = ["0" * 64]
    for _machine in ("anna", "ben"):
        register_user(tmp_path, Url("s3://bucket/out"), recipe="flowers", kind="latents", keys=keys)
    (user,) = read_users(tmp_path)
    assert (user.output_dir, user.is_here) == (Url("s3://bucket/out"), True)


def rejected(stage: str, number: int) -> pl.DataFrame:
    columns = {"dataset": "photos", "stage": stage, "reason": "r", "detail": "d", "fix": "f"}
    rows = [{"sample_id": f"photos/{stage}{n}", "path": f"{stage}{n}", **columns} for n in range(number)]
    return pl.DataFrame(rows, schema=empty("rejected").schema)


def test_two_machines_that_reject_samples_at_the_same_time_lose_no_row(s3: str, tmp_path: Path) -> None:
    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
    address = Url(f"s3://{bucket}/out")
    stages = ("vae_latents", "text_embeddings")
    together = threading.Barrier(len(stages))
    errors: list[BaseException] = []

    def reject(stage: str) -> None:
        try:
            mirror = Mirror(address, tmp_path / stage)
            for number in range(1, 6):
                together.wait()
                Tables(mirror.folder).write_rejected(stage, rejected(stage, number))
                push_stage(mirror, stage)
        except BaseException as err:  # raised in the main thread, which pytest sees
            errors.append(err)
            together.abort()

    threads = [threading.Thread(target=reject, args=(stage,)) for stage in stages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, s3
    Mirror(address, tmp_path / "third").pull("tables/*")
    merged = pl.read_parquet(tmp_path / "third/tables/rejected.parquet")
    assert sorted(merged["sample_id"]) == sorted(
        f"photos/{stage}{number}" for stage in stages for number in range(5)
    )


class InterruptedMirror(Mirror):
    """A mirror that lets another machine work between merging the rejected rows and uploading the result."""

    def __init__(self, address: Url, folder: Path, other: Callable[[], object]) -> None:
        super().__init__(address, folder)
        self._others = [other]

    def push(self, *patterns: str) -> list[str]:
        if patterns == (MERGED_REJECTIONS,) and self._others:
            self._others.pop()()
        return super().push(*patterns)


def test_rows_that_arrive_between_merge_and_upload_are_merged_too(tmp_path: Path) -> None:
    address = Url(f"memory://{uuid.uuid4().hex}/out")
    text = Mirror(address, tmp_path / "text")
    Tables(text.folder).write_rejected("text_embeddings", rejected("text_embeddings", 2))
    latents = InterruptedMirror(address, tmp_path / "latents", lambda: push_stage(text, "text_embeddings"))
    Tables(latents.folder).write_rejected("vae_latents", rejected("vae_latents", 3))
    push_stage(latents, "vae_latents")
    Mirror(address, tmp_path / "third").pull("tables/*")
    assert pl.read_parquet(tmp_path / "third/tables/rejected.parquet").height == 5
