from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.errors import FamilyError, ModelError
from pipeline.models.families.sd import STABLE_DIFFUSION
from pipeline.models.resolve import check_local_base, resolve_base, wanted_files
from tests.pipeline.model_recipe import recipe

HUB_FILES = [
    ".gitattributes",
    "README.md",
    "model_index.json",
    "v1-5-pruned.safetensors",
    "feature_extractor/preprocessor_config.json",
    "safety_checker/config.json",
    "safety_checker/model.safetensors",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/model.fp16.safetensors",
    "text_encoder/model.safetensors",
    "text_encoder/pytorch_model.bin",
    "tokenizer/merges.txt",
    "tokenizer/special_tokens_map.json",
    "tokenizer/tokenizer_config.json",
    "tokenizer/vocab.json",
    "unet/config.json",
    "unet/diffusion_pytorch_model.bin",
    "unet/diffusion_pytorch_model.fp16.safetensors",
    "unet/diffusion_pytorch_model.non_ema.safetensors",
    "unet/diffusion_pytorch_model.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.bin",
]


@pytest.fixture
def model(tmp_path: Path, tiny_sd: Path) -> Path:
    return shutil.copytree(tiny_sd, tmp_path / "model")


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path, model: Path) -> None:
    assert resolve_base(recipe(tmp_path, model)) == model


def test_T01_a_revision_of_a_local_folder_is_refused_and_not_printed_as_used(
    tmp_path: Path, model: Path
) -> None:
    asked = recipe(tmp_path, model, revision="v1")
    for look in (resolve_base, check_local_base):
        with pytest.raises(ModelError, match=r"model\.revision v1 has no effect") as caught:
            look(asked)
        assert caught.value.where.endswith("model.revision")
        assert "remove it" in caught.value.fix


def test_a_relative_folder_starts_at_the_project_root(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.recipe.load.project_root", lambda: tmp_path)
    monkeypatch.chdir("/")
    assert resolve_base(recipe(tmp_path, "model")) == model


@pytest.mark.parametrize(
    "lost",
    [
        "model_index.json",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
        "text_encoder/model.safetensors",
        "unet/config.json",
        "scheduler/scheduler_config.json",
    ],
)
def test_a_folder_that_lacks_a_file_is_an_error_that_names_it(tmp_path: Path, model: Path, lost: str) -> None:
    (model / lost).unlink()
    with pytest.raises(ModelError, match=str(model / lost).rsplit("/", 1)[0]):
        resolve_base(recipe(tmp_path, model))


def test_a_weight_file_that_was_cut_short_is_refused_before_anything_is_loaded(
    tmp_path: Path, model: Path
) -> None:
    weights = model / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cut short or damaged") as caught:
        check_local_base(recipe(tmp_path, model))
    assert caught.value.where == str(weights)


@pytest.mark.parametrize(
    ("base", "message"),
    [("./no/such", "does not exist"), ("no_such_folder", "does not exist"), ("a/b/c", "does not exist")],
)
def test_what_is_neither_folder_nor_hub_id_is_an_error_without_the_network(
    tmp_path: Path, base: str, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_base(recipe(tmp_path, base))


def test_a_single_checkpoint_file_is_refused_with_the_way_to_convert_it(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x")
    with pytest.raises(ModelError, match=r"convert-checkpoint .*/model\.safetensors models/model"):
        resolve_base(recipe(tmp_path, file))


def test_an_unknown_family_is_an_error_that_lists_the_known_ones(tmp_path: Path, model: Path) -> None:
    (model / "model_index.json").write_text('{"_class_name": "UnheardOfPipeline"}')
    with pytest.raises(FamilyError, match=r"(?s)UnheardOf.*Stable Diffusion 1\.x and 2\.x"):
        resolve_base(recipe(tmp_path, model))


def hub_snapshot(model: Path, cache: Path) -> Path:
    """The Hub's cache as huggingface_hub lays it out, without a network."""
    root = cache / "models--someone--tiny"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("0123abc")
    return shutil.copytree(model, root / "snapshots" / "0123abc")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hub cache, and no network."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cache


def test_a_complete_snapshot_of_a_hub_id_is_used_without_the_network(
    tmp_path, model: Path, hub: Path
) -> None:
    snapshot = hub_snapshot(model, hub)
    shutil.rmtree(model)
    assert resolve_base(recipe(tmp_path, "someone/tiny")) == snapshot


@pytest.mark.parametrize("state", ["absent", "incomplete"])
def test_a_hub_id_that_is_not_here_and_cannot_be_downloaded_is_a_clear_error(
    tmp_path, model: Path, hub: Path, state: str
) -> None:
    if state == "incomplete":
        (hub_snapshot(model, hub) / "vae" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"(?s)someone/tiny is neither.*check the spelling"):
        resolve_base(recipe(tmp_path, "someone/tiny"))


def test_only_what_the_family_needs_is_downloaded() -> None:
    wanted = wanted_files(STABLE_DIFFUSION, HUB_FILES)
    assert set(wanted) == {
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "tokenizer/merges.txt",
        "tokenizer/special_tokens_map.json",
        "tokenizer/tokenizer_config.json",
        "tokenizer/vocab.json",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
        "vae/config.json",
        "vae/diffusion_pytorch_model.bin",
    }


def test_of_a_repository_whose_weights_are_all_of_a_variant_these_are_downloaded() -> None:
    names = (
        *("unet/diffusion_pytorch_model.fp16.safetensors", "unet/diffusion_pytorch_model.bf16.safetensors"),
        *("text_encoder/model.safetensors.index.fp16.json", "text_encoder/model.fp16.bin"),
        *(f"text_encoder/model.fp16-0000{number}-of-00002.safetensors" for number in (1, 2)),
        *("vae/diffusion_pytorch_model.fp16.bin", "vae/diffusion_pytorch_model.non_ema.safetensors"),
        *("vae/config.json", "unet/config.json", "tokenizer/vocab.json", "model_index.json"),
    )
    assert set(names) - set(wanted_files(STABLE_DIFFUSION, names)) == {
        "unet/diffusion_pytorch_model.bf16.safetensors",
        "text_encoder/model.fp16.bin",
        "vae/diffusion_pytorch_model.non_ema.safetensors",
    }


def test_a_snapshot_whose_weights_are_all_of_a_variant_is_used_without_the_network(
    tmp_path: Path, model: Path, hub: Path
) -> None:
    for path in model.glob("*/*.safetensors"):
        path.rename(path.with_suffix(".fp16.safetensors"))
    snapshot = hub_snapshot(model, hub)
    assert resolve_base(recipe(tmp_path, "someone/tiny")) == snapshot
    cut = snapshot / "unet" / "diffusion_pytorch_model.fp16.safetensors"
    cut.write_bytes(cut.read_bytes()[:-10])
    with pytest.raises(ModelError, match="someone/tiny is neither"):
        resolve_base(recipe(tmp_path, "someone/tiny"))
