"""Finding the training adapter's file, and the warning for a distilled base model without one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from demo.tiny_models import (
    make_tiny_flux,
    make_tiny_flux2_klein,
    make_tiny_krea2,
    make_tiny_qwen_image21,
    make_tiny_z_image,
)
from pipeline.errors import ModelError
from pipeline.models.families import detect
from pipeline.models.training_adapter import missing_adapter_warning, resolve_training_adapter
from pipeline.recipe import Recipe, recipe_from_mapping


def recipe(tmp_path: Path, adapter: str | None) -> Recipe:
    return recipe_from_mapping(
        "demo",
        {
            "datasets": [{"name": "photos", "path": str(tmp_path / "photos")}],
            "cache_dir": str(tmp_path / "cache"),
            "output_dir": str(tmp_path / "output"),
            "model": {"base": "models/base", "training_adapter": adapter},
        },
    )


def snapshot(hub: Path, *files: str) -> Path:
    """Write a repository into the cache of the Hub, as a download leaves it."""
    folder = hub / "models--owner--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    for file in files:
        (folder / "snapshots" / ("0" * 40) / file).write_bytes(b"weights")
    return folder / "snapshots" / ("0" * 40)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_local_file_or_nothing_is_used_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "adapter.safetensors"
    file.write_bytes(b"weights")
    assert resolve_training_adapter(recipe(tmp_path, None)) is None
    assert resolve_training_adapter(recipe(tmp_path, str(file))) == file


def test_a_downloaded_file_of_the_hub_is_used_without_the_network(tmp_path: Path, hub: Path) -> None:
    folder = snapshot(hub, "one.safetensors", "README.md")
    for value in ("owner/name", "owner/name/one.safetensors"):
        assert resolve_training_adapter(recipe(tmp_path, value)) == folder / "one.safetensors"


def test_one_of_several_files_must_be_chosen(tmp_path: Path, hub: Path) -> None:
    folder = snapshot(hub, "v1.safetensors", "v2.safetensors")
    chosen = resolve_training_adapter(recipe(tmp_path, "owner/name/v2.safetensors"))
    assert chosen == folder / "v2.safetensors"
    with pytest.raises(ModelError, match=r"has 2 \.safetensors files") as excinfo:
        resolve_training_adapter(recipe(tmp_path, "owner/name"))
    assert "owner/name/v1.safetensors, owner/name/v2.safetensors" in excinfo.value.fix


@pytest.mark.parametrize("value", ["missing.safetensors", "owner/name/file.bin"])
def test_a_missing_file_is_an_error(tmp_path: Path, value: str) -> None:
    with pytest.raises(ModelError, match="does not exist") as excinfo:
        resolve_training_adapter(recipe(tmp_path, value))
    assert "model.training_adapter" in excinfo.value.where


def test_a_repository_that_is_not_on_this_machine_needs_the_network(tmp_path: Path, hub: Path) -> None:
    with pytest.raises(ModelError, match="owner/name is not a local folder"):
        resolve_training_adapter(recipe(tmp_path, "owner/name"))


@pytest.mark.parametrize(
    ("make", "adapter"),
    [
        pytest.param(
            partial(make_tiny_flux, schnell=True), "ostris/FLUX.1-schnell-training-adapter", id="flux schnell"
        ),
        pytest.param(
            partial(make_tiny_z_image, turbo=True),
            "zimage_turbo_training_adapter_v2.safetensors",
            id="z_image turbo",
        ),
        pytest.param(
            partial(make_tiny_qwen_image21, turbo=True), "train the model that", id="qwen_image21 turbo"
        ),
        (make_tiny_flux, None),
        (make_tiny_z_image, None),
        (make_tiny_krea2, None),
        (make_tiny_qwen_image21, None),
        (make_tiny_flux2_klein, None),
    ],
)
def test_E05_a_distilled_model_without_an_adapter_gets_a_warning_with_the_published_one(
    tmp_path: Path, make: Callable[..., Any], adapter: str | None
) -> None:
    """The folder's name says nothing about the model."""
    make(tmp_path / "base")
    family = detect(tmp_path / "base")
    warning = missing_adapter_warning(recipe(tmp_path, None), family)
    assert (warning is None) == (adapter is None)
    if warning and adapter:
        assert adapter in warning
    assert missing_adapter_warning(recipe(tmp_path, "owner/name"), family) is None


@pytest.mark.parametrize(
    ("make", "advice"),
    [(make_tiny_krea2, "krea2_turbo_training_adapter"), (make_tiny_flux2_klein, "train the model that")],
)
def test_E05_a_model_whose_index_says_that_it_is_distilled_gets_a_warning(
    tmp_path: Path, make: Callable[..., Any], advice: str
) -> None:
    make(tmp_path / "base")
    index = tmp_path / "base" / "model_index.json"
    index.write_text(index.read_text().replace('"is_distilled": false', '"is_distilled": true'))
    warning = missing_adapter_warning(recipe(tmp_path, None), detect(tmp_path / "base"))
    assert warning is not None
    assert advice in warning


def test_the_guide_lists_the_adapter_of_each_distilled_model(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "recipe_guide.md").read_text(encoding="utf-8")
    distilled = (partial(make_tiny_flux, schnell=True), partial(make_tiny_z_image, turbo=True))
    for number, make in enumerate(distilled):
        make(tmp_path / str(number))
        distillation = detect(tmp_path / str(number)).distillation
        assert distillation is not None
        assert f"| `{distillation.training_adapter}` |" in guide
    make_tiny_krea2(tmp_path / "krea2")
    index = tmp_path / "krea2" / "model_index.json"
    index.write_text(index.read_text().replace('"is_distilled": false', '"is_distilled": true'))
    krea2 = detect(tmp_path / "krea2").distillation
    assert krea2 is not None
    assert f"| `{krea2.training_adapter}` |" in guide
