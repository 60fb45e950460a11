from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import FamilyError, ModelError
from pipeline.models.components import resolve_components
from pipeline.models.families.sd import STABLE_DIFFUSION
from pipeline.models.resolve import check_local_base, resolve_base, wanted_files
from pipeline.models.training_adapter import check_training_adapter
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


def test_a_local_folder_is_used_unchanged(tmp_path: Path, model: Path) -> None:
    assert resolve_base(recipe(tmp_path, model)) == model


@pytest.mark.parametrize("revision", ["/etc/passwd", "../../../secret", "main/../../../x", "refs//pr/1", "."])
def test_a_revision_that_is_a_path_out_of_the_hubs_cache_is_an_error(tmp_path: Path, revision: str) -> None:
    requested = recipe(tmp_path, "owner/name", revision=revision)
    with pytest.raises(ModelError, match="a revision must be the name of a branch") as excinfo:
        resolve_base(requested)
    assert excinfo.value.where.endswith("model.revision")

    requested = recipe(tmp_path, "owner/name", components={"vae": f"owner/vae@{revision}"})
    with pytest.raises(ModelError, match="a revision must be the name of a branch") as excinfo:
        resolve_components(requested)
    assert excinfo.value.where.endswith("model.components.vae")


def test_T01_a_revision_of_a_local_folder_is_an_error(tmp_path: Path, model: Path) -> None:
    requested = recipe(tmp_path, model, revision="v1")
    for look in (resolve_base, check_local_base):
        with pytest.raises(ModelError, match=r"model\.revision v1 requires a Hub repository") as excinfo:
            look(requested)
        assert excinfo.value.where.endswith("model.revision")
        assert "remove model.revision" in excinfo.value.fix


def test_a_relative_folder_starts_at_the_project_root(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.recipe.project.project_root", lambda: tmp_path)
    monkeypatch.chdir("/")
    assert resolve_base(recipe(tmp_path, "model")) == model


@pytest.mark.parametrize(
    "removed_file",
    [
        "model_index.json",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
        "text_encoder/model.safetensors",
        "unet/config.json",
        "scheduler/scheduler_config.json",
    ],
)
def test_a_folder_without_a_file_is_an_error_that_names_the_file(
    tmp_path: Path, model: Path, removed_file: str
) -> None:
    (model / removed_file).unlink()
    with pytest.raises(ModelError, match=str(model / removed_file).rsplit("/", 1)[0]):
        resolve_base(recipe(tmp_path, model))


def test_a_truncated_weight_file_is_an_error_before_anything_is_loaded(tmp_path: Path, model: Path) -> None:
    weights = model / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="truncated or damaged") as excinfo:
        check_local_base(recipe(tmp_path, model))
    assert excinfo.value.where == str(weights)


@pytest.mark.parametrize(
    ("base", "message"),
    [("./no/such", "does not exist"), ("no_such_folder", "does not exist"), ("a/b/c", "does not exist")],
)
def test_a_base_that_is_neither_a_folder_nor_a_hub_id_is_an_error_without_the_network(
    tmp_path: Path, base: str, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_base(recipe(tmp_path, base))


def test_a_single_checkpoint_file_is_an_error_that_explains_the_conversion(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x")
    with pytest.raises(ModelError, match=r"convert-checkpoint .*/model\.safetensors models/model"):
        resolve_base(recipe(tmp_path, file))


def test_an_unsupported_family_is_an_error_that_lists_the_supported_ones(tmp_path: Path, model: Path) -> None:
    (model / "model_index.json").write_text('{"_class_name": "UnheardOfPipeline"}')
    with pytest.raises(FamilyError, match=r"(?s)UnheardOf.*Stable Diffusion 1\.x and 2\.x"):
        resolve_base(recipe(tmp_path, model))


def hub_snapshot(model: Path, cache: Path) -> Path:
    """Write a Hub cache in the layout of huggingface_hub, without a network."""
    root = cache / "models--someone--tiny"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("0123abc")
    return shutil.copytree(model, root / "snapshots" / "0123abc")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty Hub cache, without a network."""
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
def test_a_hub_id_that_cannot_be_downloaded_is_a_clear_error(
    tmp_path, model: Path, hub: Path, state: str
) -> None:
    if state == "incomplete":
        (hub_snapshot(model, hub) / "vae" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"(?s)someone/tiny is not a local folder.*HF_HUB_OFFLINE"):
        resolve_base(recipe(tmp_path, "someone/tiny"))


def test_only_files_that_the_family_needs_are_downloaded() -> None:
    needed_files = wanted_files(STABLE_DIFFUSION, HUB_FILES)
    assert set(needed_files) == {
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


def test_the_weights_of_a_variant_are_downloaded_if_there_are_no_others() -> None:
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


def test_a_snapshot_with_weights_of_one_variant_is_used_without_the_network(
    tmp_path: Path, model: Path, hub: Path
) -> None:
    for path in model.glob("*/*.safetensors"):
        path.rename(path.with_suffix(".fp16.safetensors"))
    snapshot = hub_snapshot(model, hub)
    assert resolve_base(recipe(tmp_path, "someone/tiny")) == snapshot
    cut = snapshot / "unet" / "diffusion_pytorch_model.fp16.safetensors"
    cut.write_bytes(cut.read_bytes()[:-10])
    with pytest.raises(ModelError, match="someone/tiny is not a local folder"):
        resolve_base(recipe(tmp_path, "someone/tiny"))


@pytest.mark.parametrize("place", ["folder", "component", "snapshot"])
@pytest.mark.parametrize("name", ["diffusion_pytorch_model.bin", "diffusion_pytorch_model.fp16.bin"])
def test_pickled_weights_are_refused_unless_the_recipe_allows_them(
    tmp_path: Path, model: Path, hub: Path, place: str, name: str
) -> None:
    pickled = shutil.copytree(model, tmp_path / "pickled")
    (pickled / "vae" / "diffusion_pytorch_model.safetensors").rename(pickled / "vae" / name)
    base: dict[str, object] = {"base": pickled}
    if place == "component":
        base = {"base": model, "components": {"vae": str(pickled / "vae")}}
    elif place == "snapshot":
        hub_snapshot(pickled, hub)
        base = {"base": "someone/tiny"}

    looks = [resolve_base] if place == "snapshot" else [resolve_base, check_local_base]
    for look in looks:
        with pytest.raises(ModelError, match=r"must be \*\.safetensors, got a pickle") as excinfo:
            look(recipe(tmp_path, **base))
        assert excinfo.value.where.endswith(name)
        assert "model.allow_pickle: true" in excinfo.value.fix
        look(recipe(tmp_path, **base, allow_pickle=True))


@pytest.mark.parametrize("component", [False, True], ids=["base", "component"])
def test_a_typo_in_a_local_folder_suggests_the_closest_one_without_the_network(
    tmp_path: Path, model: Path, hub: Path, monkeypatch: pytest.MonkeyPatch, *, component: bool
) -> None:
    monkeypatch.setattr("pipeline.recipe.project.project_root", lambda: tmp_path)
    shutil.copytree(model, tmp_path / "models" / "tiny-sd")
    typo = "models/tiny-sdd"
    requested = recipe(tmp_path, model, components={"vae": typo}) if component else recipe(tmp_path, typo)
    with pytest.raises(ModelError, match=f"{typo} does not exist") as excinfo:
        resolve_base(requested)
    assert excinfo.value.fix == "did you mean models/tiny-sd?"
    assert str(tmp_path / "models" / "tiny-sdd") in excinfo.value.where


def test_validation_finds_a_typo_in_a_folder_of_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="models/no_such_model_at_all does not exist"):
        check_local_base(recipe(tmp_path, "models/no_such_model_at_all"))


@pytest.mark.parametrize("key", ["base", "components", "training_adapter"])
@pytest.mark.parametrize(("name", "suggested"), [("bases/tiny-sdd", True), ("bases/other", False)])
def test_validation_finds_a_missing_local_path_that_has_the_form_of_a_hub_id(
    tmp_path: Path,
    model: Path,
    hub: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    key: str,
    name: str,
    suggested: bool,
) -> None:
    monkeypatch.setattr("pipeline.recipe.project.project_root", lambda: tmp_path)
    shutil.copytree(model, tmp_path / "bases" / "tiny-sd")
    section: dict[str, Any] = {"base": name} if key == "base" else {"base": model, key: name}
    if key == "components":
        section[key] = {"vae": name}
    check = check_training_adapter if key == "training_adapter" else check_local_base
    with pytest.raises(ModelError, match=f"{name} is not a local folder and ") as excinfo:
        check(recipe(tmp_path, **section))
    assert f"model.{key}" in excinfo.value.where
    assert excinfo.value.fix.startswith("did you mean the local folder bases/tiny-sd?") == suggested


def test_validation_requests_no_hub_id_that_is_on_this_machine_or_resembles_no_folder(
    tmp_path: Path, model: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a network, a request would be an error.
    monkeypatch.setattr("pipeline.recipe.project.project_root", lambda: tmp_path)
    (tmp_path / "someone").mkdir()
    hub_snapshot(model, hub)
    check_local_base(recipe(tmp_path, "someone/tiny"))
    requested = recipe(tmp_path, "else/tiny", components={"vae": "else/vae"}, training_adapter="else/lora")
    check_local_base(requested)
    check_training_adapter(requested)


def test_validation_finds_a_missing_component(tmp_path: Path, model: Path) -> None:
    for name in ("models/no_vae", "./vae", "/gone/vae"):
        with pytest.raises(ModelError, match=f"{name} does not exist"):
            check_local_base(recipe(tmp_path, model, components={"vae": name}))


def test_a_hub_id_like_a_folder_is_downloaded_and_its_error_suggests_the_folder(
    tmp_path: Path, model: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.recipe.project.project_root", lambda: tmp_path)
    shutil.copytree(model, tmp_path / "someone" / "tiny-sd")
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE") as excinfo:
        resolve_base(recipe(tmp_path, "someone/tiny-sdd"))
    assert excinfo.value.fix.startswith("did you mean the local folder someone/tiny-sd? Otherwise ")
