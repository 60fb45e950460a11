"""Tables of requested entries: all columns and types, references, and stats that an earlier run recorded."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from demo.tiny_models import make_tiny_z_image
from pipeline.cache.entry_format import DATA_START
from pipeline.cache.recipe_entries import (
    SEEN,
    STAT_COLUMNS,
    STATS,
    RecipeEntries,
    is_unchanged,
    with_recorded,
)
from pipeline.cache.store import EntrySpec, Store, TensorSpec
from pipeline.recipe import recipe_from_mapping
from pipeline.versions import PREPROCESSING_VERSION

BUCKETS = pl.DataFrame(
    {
        "content_hash": ["ab" * 32, "cd" * 32],
        "height": [64, 100],
        "width": [96, 64],
        "resized_height": [64, 100],
        "resized_width": [96, 64],
        "crop_top": [0, 2],
        "crop_left": [0, 0],
        "target_height": [64, 96],
        "target_width": [96, 64],
    },
    schema_overrides={"target_height": pl.Int32, "target_width": pl.Int32},
)
IMAGE = json.dumps([["ef" * 32, 384, 512]], separators=(",", ":"))


def entries(
    base: Path, root: Path, *, dataset: dict[str, Any] | None = None, **sections: Any
) -> RecipeEntries:
    fields = {
        "datasets": [{"name": "photos", "path": str(root / "photos"), **(dataset or {})}],
        "cache_dir": str(root / "cache"),
        "output_dir": str(root / "out"),
        "model": {"base": str(base)},
    }
    return RecipeEntries(recipe_from_mapping("sample", fields | sections))


@pytest.fixture(scope="session")
def tiny_ragged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny Z-Image, which stores captions at their own length."""
    folder = tmp_path_factory.mktemp("models") / "z_image"
    make_tiny_z_image(folder)
    return folder


@pytest.fixture
def edit(tiny_edit: Path, tmp_path: Path) -> RecipeEntries:
    return entries(tiny_edit, tmp_path, dataset={"references": [{"path": str(tmp_path / "before")}]})


def test_machine_local_state_is_in_a_local_cache_and_otherwise_in_the_output_folder(tmp_path: Path) -> None:
    assert entries(tmp_path / "model", tmp_path).machine_state_dir == tmp_path / "cache"
    remote = entries(tmp_path / "model", tmp_path, cache_dir="memory://bucket/cache")
    assert remote.machine_state_dir == tmp_path / "out"


@pytest.mark.parametrize("num_images", [0, 2])
def test_latent_requests_add_the_documented_columns(tiny_sd: Path, tmp_path: Path, num_images: int) -> None:
    buckets = BUCKETS.head(num_images)
    added = {
        "flipped": pl.Boolean,
        "key": pl.String,
        "latent_channels": pl.Int32,
        "latent_height": pl.Int32,
        "latent_width": pl.Int32,
        "dtype": pl.String,
        "num_bytes": pl.Int64,
    }
    requests = entries(tiny_sd, tmp_path).latent_requests(buckets)
    assert dict(requests.schema) == {**buckets.schema, **added}
    assert (
        requests.select("latent_channels", "latent_height", "latent_width", "dtype", "num_bytes").rows()
        == [
            (4, 8, 12, "float16", DATA_START + 4 * 8 * 12 * 2),
            (4, 12, 8, "float16", DATA_START + 4 * 12 * 8 * 2),
        ][:num_images]
    )


@pytest.mark.parametrize("captions", [[], ["a cat"]], ids=["none", "one"])
def test_caption_requests_have_the_documented_columns(
    tiny_sd: Path, tiny_ragged: Path, tmp_path: Path, captions: list[str]
) -> None:
    columns = {
        "caption": pl.String,
        "key": pl.String,
        "text_length": pl.Int32,
        "num_bytes": pl.Int64,
        "about_bytes": pl.Int64,
    }
    for base in (tiny_sd, tiny_ragged):
        assert dict(entries(base, tmp_path).text_requests(captions).schema) == columns, base.name


@pytest.mark.parametrize(
    ("num_bytes", "num_tokens"), [(0, 32), (1, 33), (30, 42), (31, 43), (33, 43), (34, 44)]
)
def test_an_estimate_counts_a_token_per_started_three_bytes_and_32_for_the_template(
    tiny_ragged: Path, tmp_path: Path, num_bytes: int, num_tokens: int
) -> None:
    base = entries(tiny_ragged, tmp_path)
    assert base.text_requests(["x" * num_bytes])["about_bytes"].to_list() == [
        base.text_spec("", num_tokens).file_bytes
    ]


def test_a_caption_without_tokens_has_an_entry_without_values(tiny_ragged: Path, tmp_path: Path) -> None:
    assert entries(tiny_ragged, tmp_path).text_spec("", 0).file_bytes == DATA_START


def test_a_key_with_images_states_the_images_and_how_the_encoder_sees_them(
    edit: RecipeEntries, tiny_edit: Path
) -> None:
    settings = json.loads((tiny_edit / "processor" / "preprocessor_config.json").read_text(encoding="utf-8"))
    inputs = edit.text_inputs("a cat", IMAGE)
    assert inputs.references == {
        "images": [["ef" * 32, 384, 512]],
        "background": [255, 255, 255],
        "preprocessing_version": PREPROCESSING_VERSION,
        "processor": "Qwen2VLImageProcessorPil, 1",
        "processor_settings": {
            name: settings[name] for name in ("patch_size", "temporal_patch_size", "merge_size")
        },
    }
    assert edit.text_inputs("a cat").references is None
    assert "references" not in edit.text_inputs("a cat").values()


@pytest.mark.parametrize(
    "images", [[IMAGE, None, IMAGE], [None, IMAGE, None], [IMAGE] * 3, [None] * 3, None], ids=str
)
def test_keys_of_captions_with_and_without_images_equal_those_of_their_entries(
    edit: RecipeEntries, images: list[str | None] | None
) -> None:
    captions = ["a cat", 'a "dog"', ""]
    series = None if images is None else pl.Series(images, dtype=pl.String)
    expected = [
        edit.text_spec(caption, images=seen).key
        for caption, seen in zip(captions, images or [None] * 3, strict=True)
    ]
    assert edit.text_keys(captions, series).to_list() == expected
    assert edit.text_requests(captions, images=series)["key"].to_list() == expected


def test_an_estimate_adds_the_tokens_of_each_image(edit: RecipeEntries) -> None:
    two = json.dumps([["ef" * 32, 384, 512], ["12" * 32, 512, 384]], separators=(",", ":"))
    images = pl.Series([None, IMAGE, two], dtype=pl.String)
    requests = edit.text_requests(["a cat"] * 3, images=images)
    assert requests[SEEN].to_list() == images.to_list()
    assert requests["about_bytes"].to_list() == [
        edit.text_spec("a cat", num_tokens).file_bytes for num_tokens in (34, 34 + 200, 34 + 400)
    ]


def test_a_text_encoder_sees_references_only_if_the_recipe_has_some(tiny_edit: Path, tmp_path: Path) -> None:
    prompt = {"prompt": "a cat", "references": [str(tmp_path / "cat.png")]}
    cases: list[tuple[bool, dict[str, Any]]] = [
        (False, {}),
        (True, {"dataset": {"references": [{"path": str(tmp_path / "before")}]}}),
        (True, {"training": {"sample_prompts": [prompt], "sample_every": 10}}),
    ]
    for sees, sections in cases:
        base = entries(tiny_edit, tmp_path, **sections)
        assert (base.text_images is not None) == sees, sections
        assert base.sees_images_in_negative == sees, sections


def test_a_text_encoder_that_sees_only_captions_sees_no_references(tiny_sd: Path, tmp_path: Path) -> None:
    base = entries(tiny_sd, tmp_path, dataset={"references": [{"path": str(tmp_path / "before")}]})
    assert base.text_images is None
    assert not base.sees_images_in_negative


def test_recorded_columns_are_added_by_key_and_null_for_other_keys() -> None:
    rows = pl.DataFrame({"key": ["b", "a", "c", "a"]})
    previous = pl.DataFrame({"key": ["a", "a", "b"], "entry_bytes": [1, 1, 2]})
    columns = {"entry_bytes": pl.Int64}
    expected = rows.with_columns(entry_bytes=pl.Series([2, 1, None, 1], dtype=pl.Int64))
    assert with_recorded(rows, previous, columns).equals(expected)
    nothing = with_recorded(rows, None, columns)
    assert nothing.schema == expected.schema
    assert nothing["entry_bytes"].null_count() == 4


def test_an_entry_is_unchanged_only_if_its_size_and_complete_stat_are_those_recorded(tmp_path: Path) -> None:
    store = Store(tmp_path)
    specs = [
        EntrySpec("latents", digits * 32, {"latent": TensorSpec("float16", (4, 8, 6))})
        for digits in ("ab", "cd", "ef", "01")
    ]
    for spec in specs:
        store.write(spec, {"latent": np.zeros((4, 8, 6), "<f2")}, {})
    stats = [stat for spec in specs if (stat := store.check(spec).stat)]
    recorded = pl.DataFrame([astuple(stat) for stat in stats], schema=STATS, orient="row").with_columns(
        key=pl.Series([spec.key for spec in specs]), num_bytes=pl.lit(specs[0].file_bytes)
    )
    assert is_unchanged(store, "latents", recorded).to_list() == [True] * 4

    for name in ("num_bytes", *STAT_COLUMNS):
        other = pl.when(key=specs[1].key).then(pl.col(name) + 1).otherwise(name).alias(name)
        unchanged = is_unchanged(store, "latents", recorded.with_columns(other))
        assert unchanged.to_list() == [True, False, True, True], name

    unknown = pl.lit(None, pl.Int64)
    for columns in (("num_bytes",), STAT_COLUMNS):
        rows = recorded.with_columns(unknown.alias(name) for name in columns)
        assert is_unchanged(store, "latents", rows).to_list() == [False] * 4, columns


def test_a_missing_entry_is_not_unchanged_whatever_was_recorded(tmp_path: Path) -> None:
    row = {"key": "ab" * 32, "num_bytes": 4096} | dict.fromkeys(STAT_COLUMNS, 4096)
    rows = pl.DataFrame([row])
    assert is_unchanged(Store(tmp_path), "latents", rows).to_list() == [False]
