from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline

from demo.tiny_models import make_tiny
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.worker.tensors import read_torch
from pipeline.encoding.jobs import Encoding, read_encoding, write_encoding
from pipeline.errors import ModelError
from pipeline.models.components import local_components, resolve_components
from pipeline.models.families.sd import STABLE_DIFFUSION
from pipeline.models.hub import component_files
from pipeline.models.resolve import resolve_base, wanted_files
from pipeline.models.worker.family import load_family
from pipeline.recipe import recipe_from_mapping
from pipeline.storage.tables import Tables
from pipeline.trained_lora.provenance import shareable
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.model_recipe import recipe
from tests.pipeline.models.families.complete_job import complete_job, settings


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Return a model with different weights in each component."""
    make_tiny(tmp_path / "other", seed=1)
    return tmp_path / "other"


def test_a_component_is_a_folder_or_a_component_of_another_model(
    tmp_path: Path, tiny_sd: Path, other: Path
) -> None:
    for named in (other, other / "vae"):
        requested = recipe(tmp_path, tiny_sd, components={"vae": str(named)})
        assert resolve_components(requested) == local_components(requested) == {"vae": other / "vae"}
        assert resolve_base(requested) == tiny_sd


def test_another_vae_changes_the_keys_of_latents_but_not_of_captions(
    tmp_path: Path, tiny_sd: Path, other: Path
) -> None:
    plain, changed = (
        RecipeEntries(recipe(tmp_path, tiny_sd, components=components))
        for components in ({}, {"vae": str(other)})
    )
    same = RecipeEntries(
        recipe(tmp_path, tiny_sd, components={"vae": str(shutil.copytree(tiny_sd, tmp_path / "copy"))})
    )
    assert changed.fingerprint("latents") != plain.fingerprint("latents")
    assert same.fingerprint("latents") == plain.fingerprint("latents")
    assert changed.text_spec("a cat") == plain.text_spec("a cat")
    assert changed.fingerprint("denoiser") == plain.fingerprint("denoiser")


@pytest.mark.slow
def test_the_complete_job_works_with_a_component_that_the_base_model_lacks(
    tmp_path: Path, photos: Path, tiny_sd: Path, other: Path
) -> None:
    base = shutil.copytree(tiny_sd, tmp_path / "base")
    shutil.rmtree(base / "vae")
    values = settings(tmp_path, photos, base)
    values["model"]["components"] = {"vae": str(other)}
    requested = recipe_from_mapping("demo", values)
    tables, launch = Tables(requested.output_dir), InProcessLaunch()
    entries, encoding = complete_job(requested, tables, launch)
    assert encoding.component_folders == {"vae": other / "vae"}
    row = tables.read("vae_latents").row(0, named=True)
    latent = read_torch(entries.store, entries.latent_spec(row))["latent"]
    vae = AutoencoderKL.from_pretrained(other / "vae")
    family = load_family(encoding.base, encoding.component_folders)
    with torch.no_grad():
        expected = vae.decode(latent[None] / vae.config.scaling_factor).sample
    torch.testing.assert_close(family.vae.decode(family.vae.load("float32", "cpu"), latent[None]), expected)
    pipe = StableDiffusionPipeline.from_pretrained(base, vae=vae, safety_checker=None)
    pipe.load_lora_weights(requested.output_dir / "lora")
    assert list((encoding.folder / "samples").glob("*.png"))


def test_the_encoding_job_names_the_folders_of_replaced_components(tmp_path: Path) -> None:
    encoding = Encoding("latents", Path("/m"), Path("/s"), {}, [], {"vae": Path("/elsewhere/vae")})
    assert read_encoding(write_encoding(encoding, tmp_path)).component_folders == encoding.component_folders


@pytest.mark.parametrize(
    ("components", "message"),
    [
        (
            {"vea": "x/y"},
            r"(?s)no replaceable component vea.*sample.*model\.components\.vea.*tokenizer, text_encoder",
        ),
        ({"scheduler": "x/y"}, "no replaceable component scheduler"),
        ({"vae": "./no/such"}, r"(?s)\./no/such does not exist.*model\.components\.vae.*owner/name"),
        (
            {"vae": "someone/absent"},
            r"(?s)someone/absent is not a local folder.*set .*components\.vae to the fol",
        ),
    ],
)
def test_an_invalid_component_is_an_error_that_names_the_key(
    tmp_path: Path, tiny_sd: Path, hub: Path, components: dict[str, str], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_base(recipe(tmp_path, tiny_sd, components=components))


@pytest.mark.parametrize("removed_file", ["config.json", "diffusion_pytorch_model.safetensors"])
def test_an_incomplete_component_is_an_error_that_names_its_folder(
    tmp_path: Path, tiny_sd: Path, other: Path, removed_file: str
) -> None:
    (other / "vae" / removed_file).unlink()
    with pytest.raises(ModelError, match=str(other / "vae")):
        resolve_base(recipe(tmp_path, tiny_sd, components={"vae": str(other)}))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty Hub cache, without a network."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cache


@pytest.mark.parametrize("inside", [True, False])
def test_a_snapshot_of_a_hub_id_is_used_without_the_network(
    tmp_path: Path, tiny_sd: Path, other: Path, hub: Path, inside: bool
) -> None:
    root = hub / "models--someone--parts"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "v2").write_text("0123abc")
    snapshot = shutil.copytree(other if inside else other / "vae", root / "snapshots" / "0123abc")
    components = resolve_components(recipe(tmp_path, tiny_sd, components={"vae": "someone/parts@v2"}))
    assert components == {"vae": snapshot / "vae" if inside else snapshot}


def test_only_the_files_of_the_component_are_downloaded() -> None:
    files = [
        *(".gitattributes", "config.json", "README.md", "original/model.safetensors", "sub/config.json"),
        *("model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json", "model.bin"),
        *("model.fp16.safetensors", "tokenizer.json"),
    ]
    weights = ["model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"]
    assert component_files(files, "") == [*weights, "config.json", "tokenizer.json"]
    assert component_files(files, "sub") == ["sub/config.json"]
    needed_files = wanted_files(
        STABLE_DIFFUSION, ["model_index.json", "vae/config.json", "unet/config.json"], without={"vae"}
    )
    assert needed_files == ["model_index.json", "unet/config.json"]


def test_the_published_recipe_contains_no_local_folder(tmp_path: Path, tiny_sd: Path) -> None:
    shared = shareable(
        recipe(tmp_path, tiny_sd, components={"vae": str(tmp_path / "secret" / "vae"), "unet": "a/b"})
    )
    assert shared["model"]["components"] == {"vae": "vae", "unet": "a/b"}


def test_an_incomplete_tokenizer_is_an_error_that_names_its_folder(
    tmp_path: Path, tiny_sd: Path, other: Path
) -> None:
    for file in (other / "tokenizer").iterdir():
        file.unlink()
    with pytest.raises(ModelError, match=str(other / "tokenizer")):
        resolve_components(recipe(tmp_path, tiny_sd, components={"tokenizer": str(other)}))


def test_a_misspelled_folder_is_an_error_that_suggests_the_similar_one(
    tmp_path: Path, tiny_sd: Path, other: Path
) -> None:
    with pytest.raises(ModelError, match="does not exist") as excinfo:
        resolve_components(recipe(tmp_path, tiny_sd, components={"vae": str(other.with_name("othre"))}))
    assert excinfo.value.fix.startswith("did you mean")
    assert "other" in excinfo.value.fix


def test_an_incomplete_snapshot_of_a_hub_id_is_not_used(
    tmp_path: Path, tiny_sd: Path, other: Path, hub: Path
) -> None:
    root = hub / "models--someone--parts"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("0123abc")
    snapshot = shutil.copytree(other / "vae", root / "snapshots" / "0123abc")
    requested = recipe(tmp_path, tiny_sd, components={"vae": "someone/parts"})
    assert resolve_components(requested) == {"vae": snapshot}
    (snapshot / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ModelError, match="someone/parts"):
        resolve_components(requested)
