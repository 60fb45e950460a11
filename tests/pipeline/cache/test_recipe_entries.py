from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo.tiny_models import make_tiny_flux, make_tiny_z_image
from pipeline.cache.entry_format import DATA_START
from pipeline.cache.keys import KeyTemplate
from pipeline.cache.recipe_entries import CAPTION_BYTES_PER_TOKEN, TEMPLATE_TOKENS, RecipeEntries
from pipeline.models.fingerprints import canonical_hash
from pipeline.recipe import recipe_from_mapping
from pipeline.versions import PREPROCESSING_VERSION

ROW: dict[str, Any] = {
    "sample_id": "photos/a.png",
    "content_hash": "ab" * 32,
    "height": 100,
    "width": 150,
    "resized_height": 64,
    "resized_width": 96,
    "crop_top": 0,
    "crop_left": 8,
    "target_height": 64,
    "target_width": 80,
}


def entries(base: Path, root: Path, **sections: dict[str, Any]) -> RecipeEntries:
    fields = {
        "datasets": [{"name": "photos", "path": str(root / "photos")}],
        "cache_dir": str(root / "cache"),
        "output_dir": str(root / "out"),
        "model": {"base": str(base)},
    }
    return RecipeEntries(recipe_from_mapping("sample", fields | sections))


def with_the_same_value(keys: Mapping[Any, str]) -> list[list[Any]]:
    """Return the groups of names that share a key."""
    names_by_key: dict[str, list[Any]] = {}
    for name, key in keys.items():
        names_by_key.setdefault(key, []).append(name)
    return [names for names in names_by_key.values() if len(names) > 1]


def test_a_latent_has_the_shape_of_its_target_size(tiny_sd: Path, tmp_path: Path) -> None:
    spec = entries(tiny_sd, tmp_path).latent_spec(ROW)
    assert (spec.kind, len(spec.key)) == ("latents", 64)
    assert {name: (t.dtype, t.shape) for name, t in spec.tensors.items()} == {
        "latent": ("float16", (4, 8, 10))
    }


def test_L04_every_input_that_affects_a_latent_changes_its_key(tiny_sd: Path, tmp_path: Path) -> None:
    base = entries(tiny_sd, tmp_path)
    keys = {"nothing": base.latent_spec(ROW).key}
    changed_rows = {
        name: ROW[name] + 1 for name in ("resized_height", "resized_width", "crop_top", "crop_left")
    }
    changed_rows |= {"target_height": 72, "target_width": 72, "content_hash": "cd" * 32}
    for name, value in changed_rows.items():
        keys[name] = base.latent_spec({**ROW, name: value}).key
    changed_settings = {
        "dtype": "float32",
        "compute_dtype": "bfloat16",
        "posterior": "mean",
        "background": [0, 0, 0],
    }
    for name, value in changed_settings.items():
        keys[f"latents.{name}"] = entries(tiny_sd, tmp_path, latents={name: value}).latent_spec(ROW).key
    other = shutil.copytree(tiny_sd, tmp_path / "other")
    config = json.loads((other / "vae" / "config.json").read_text())
    (other / "vae" / "config.json").write_text(json.dumps({**config, "scaling_factor": 0.2}))
    keys["scaling_factor of the VAE"] = entries(other, tmp_path).latent_spec(ROW).key
    assert with_the_same_value(keys) == [], "changes of an ingredient that lead to the same key"


def test_L04_T01_inputs_of_keys_state_the_versions_of_the_code_that_makes_the_entries(
    tiny_sd: Path, tmp_path: Path
) -> None:
    base = entries(tiny_sd, tmp_path)
    latents, text = base.latent_inputs(ROW), base.text_inputs("a cat")
    assert latents.preprocessing_version == PREPROCESSING_VERSION
    assert latents.method == "autoencoder-kl scaled, 1"
    assert text.method == "clip last hidden state padded, 1"


@pytest.mark.parametrize(
    "sections",
    [
        {"training": {"batch_size": 7, "steps": 3, "seed": 1}},
        {"accelerate": {"num_processes": 3}},
        {"text": {"dtype": "float32"}},
        {"buckets": {"resolution": 512}},
        {"checks": {"max_rejected_fraction": 0.5}},
    ],
    ids=lambda sections: next(iter(sections)),
)
def test_L04_settings_that_do_not_affect_a_latent_keep_its_key(
    tiny_sd: Path, tmp_path: Path, sections: dict[str, Any]
) -> None:
    renamed = {**ROW, "sample_id": "other/b.png", "path": "b.png", "height": 101}
    base = entries(tiny_sd, tmp_path)
    assert (
        entries(tiny_sd, tmp_path / "moved", **sections).latent_spec(renamed).key == base.latent_spec(ROW).key
    )


@pytest.mark.parametrize(("tiny", "dtype"), [("tiny_sd", "float32"), ("tiny_sdxl", "float32")])
def test_L04_auto_has_the_keys_of_the_stated_dtype_that_it_resolves_to(
    request: pytest.FixtureRequest, tmp_path: Path, tiny: str, dtype: str
) -> None:
    base = request.getfixturevalue(tiny)
    automatic = entries(base, tmp_path, latents={"compute_dtype": "auto"}, text={"compute_dtype": "auto"})
    stated = entries(base, tmp_path, latents={"compute_dtype": dtype}, text={"compute_dtype": dtype})
    assert automatic.latent_spec(ROW).key == entries(base, tmp_path).latent_spec(ROW).key
    assert automatic.latent_spec(ROW).key == stated.latent_spec(ROW).key
    assert automatic.text_spec("a cat").key == stated.text_spec("a cat").key


def test_T01_the_key_of_a_language_models_embedding_states_bfloat16_by_default(tmp_path: Path) -> None:
    make_tiny_z_image(tmp_path / "z_image")
    stated = entries(tmp_path / "z_image", tmp_path, text={"compute_dtype": "bfloat16"})
    assert entries(tmp_path / "z_image", tmp_path).text_spec("a cat").key == stated.text_spec("a cat").key

    make_tiny_flux(tmp_path / "flux")
    inputs = entries(tmp_path / "flux", tmp_path).text_inputs("a cat")
    assert inputs.compute_dtype == "text_encoder float32, text_encoder_2 bfloat16"


def test_the_keys_of_auto_are_equal_with_and_without_a_visible_gpu(tmp_path: Path) -> None:
    """The parent computes them without torch, so that no device can have an influence."""
    make_tiny_flux(tmp_path / "flux")
    recipe = tmp_path / "recipe.json"
    recipe.write_text(entries(tmp_path / "flux", tmp_path).recipe.model_dump_json())
    code = (
        "import pathlib, sys\n"
        "from pipeline.cache.recipe_entries import RecipeEntries\n"
        "from pipeline.recipe import Recipe\n"
        "entries = RecipeEntries(Recipe.model_validate_json(pathlib.Path(sys.argv[1]).read_text()))\n"
        "assert 'torch' not in sys.modules\n"
        "print(entries.vae_compute_dtype, entries.text_compute_dtypes, entries.text_spec('a cat').key)\n"
    )
    printed = {
        subprocess.check_output(
            [sys.executable, "-c", code, str(recipe)], env={**os.environ, "CUDA_VISIBLE_DEVICES": visible}
        )
        for visible in ("", "0")
    }
    assert len(printed) == 1
    assert b"{'text_encoder': 'float32', 'text_encoder_2': 'bfloat16'}" in printed.pop()


def test_L15_T01_moving_the_base_model_keeps_all_keys_and_editing_its_text_encoder_changes_only_text_keys(
    tiny_sd: Path, tmp_path: Path
) -> None:
    base = entries(tiny_sd, tmp_path)
    other = shutil.copytree(tiny_sd, tmp_path / "other")
    moved = entries(other, tmp_path)
    assert moved.latent_spec(ROW).key == base.latent_spec(ROW).key
    assert moved.text_spec("a cat").key == base.text_spec("a cat").key
    assert moved.fingerprint("denoiser") == base.fingerprint("denoiser")
    for file in ("tokenizer/merges.txt", "text_encoder/config.json"):
        path = other / file
        text = path.read_text(encoding="utf-8")
        path.write_text(
            text.replace("#version: 0.2", "#version: 0.3").replace("quick_gelu", "gelu"), encoding="utf-8"
        )
        changed = entries(other, tmp_path)
        assert changed.text_spec("a cat").key != base.text_spec("a cat").key, file
        assert changed.latent_spec(ROW).key == base.latent_spec(ROW).key
        path.write_text(text, encoding="utf-8")


def test_L04_keys_of_a_table_equal_the_keys_of_its_rows(tiny_sd: Path, tmp_path: Path) -> None:
    base = entries(tiny_sd, tmp_path)
    random = np.random.default_rng(0)
    rows = [
        {
            **ROW,
            "content_hash": random.bytes(32).hex(),
            "flipped": bool(random.integers(2)),
            **{name: int(random.integers(0, 5000)) for name in ("crop_top", "crop_left")},
            **{name: int(random.integers(1, 5000)) for name in ("resized_height", "resized_width")},
            **{name: 8 * int(random.integers(1, 500)) for name in ("target_height", "target_width")},
        }
        for _ in range(200)
    ]
    keys = base.latent_keys(pl.DataFrame(rows))
    assert keys.to_list() == [base.latent_spec(row).key for row in rows]
    assert with_the_same_value(dict(enumerate(keys))) == [], "rows with the same key"
    assert base.latent_keys(pl.DataFrame(rows).clear()).to_list() == []


@given(st.lists(st.text(max_size=30), max_size=5))
def test_T01_keys_of_many_captions_equal_the_keys_of_each_caption(captions: list[str]) -> None:
    template = KeyTemplate({"text": {"caption": "@caption@", "max_length": 77}})
    expected_keys = [canonical_hash({"text": {"caption": caption, "max_length": 77}}) for caption in captions]
    encoded_captions = pl.DataFrame(
        {"caption": [json.dumps(caption) for caption in captions]}, {"caption": pl.String}
    )
    assert template.hashes(encoded_captions).to_list() == expected_keys


def test_T01_caption_requests_have_the_keys_and_sizes_of_their_entries(tiny_sd: Path, tmp_path: Path) -> None:
    base, captions = entries(tiny_sd, tmp_path), ["", "a cat", 'a "quoted" é\n', "@caption@"]
    for row, caption in zip(base.text_requests(captions).to_dicts(), captions, strict=True):
        spec = base.text_spec(caption)
        sizes = {"num_bytes": spec.file_bytes, "about_bytes": spec.file_bytes, "text_length": 77}
        assert row == {"caption": caption, "key": spec.key, **sizes}


def test_T03_the_size_of_a_ragged_entry_is_an_estimate_until_its_length_is_recorded(tmp_path: Path) -> None:
    make_tiny_z_image(tmp_path / "base")
    base, long = entries(tmp_path / "base", tmp_path), "a cat " * 1000
    captions = ["", "a cat", long]
    estimated = base.text_requests(captions)
    assert estimated["num_bytes"].null_count() == estimated["text_length"].null_count() == 3
    spec = base.text_spec("a cat")
    assert spec.ragged
    tensor = spec.tensors["text_embedding"]
    one_token = tensor.num_bytes // tensor.shape[0]
    short = DATA_START + one_token * (TEMPLATE_TOKENS + ceil(5 / CAPTION_BYTES_PER_TOKEN))
    assert estimated["about_bytes"].to_list()[1:] == [short, spec.file_bytes]
    recorded_lengths = pl.DataFrame(
        {"key": [spec.key], "text_length": [21]}, schema={"key": pl.String, "text_length": pl.Int32}
    )
    row = base.text_requests(captions, recorded_lengths).row(1, named=True)
    exact = base.text_spec("a cat", 21)
    assert not exact.ragged
    assert exact.key == spec.key
    assert row["num_bytes"] == row["about_bytes"] == exact.file_bytes == DATA_START + 21 * one_token


def test_L11_mirrored_latents_and_moments_have_separate_entries(tiny_sd: Path, tmp_path: Path) -> None:
    base = entries(tiny_sd, tmp_path)
    both = entries(tiny_sd, tmp_path, latents={"posterior": "moments", "flip": True})
    mirrored, moments = base.latent_spec({**ROW, "flipped": True}), both.latent_spec(ROW)
    keys = {"plain": base.latent_spec(ROW).key, "mirrored": mirrored.key, "moments": moments.key}
    assert with_the_same_value(keys) == [], "latents with the same key"
    assert set(moments.tensors) == {"mean", "std"}
    rows = both.latent_requests(pl.DataFrame([ROW]))
    assert rows["flipped"].to_list() == [False, True]
    assert rows["key"].to_list() == [both.latent_spec({**ROW, "flipped": flip}).key for flip in (False, True)]
    assert rows["num_bytes"].to_list() == [moments.file_bytes] * 2
    assert base.latent_requests(pl.DataFrame([ROW]))["flipped"].to_list() == [False]
