from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

from pipeline.models.families import FAMILIES, detect
from pipeline.trained_lora.export import metadata as module
from pipeline.trained_lora.export.metadata import header_metadata
from pipeline.trained_lora.inputs import TrainingInputs
from pipeline.trained_lora.job import TrainingJob

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

ProjectFactory = Callable[..., "Project"]


def listed_by_a1111(header: Mapping[str, str]) -> str:
    """Return the base model that AUTOMATIC1111's web UI 1.10 lists a file for."""
    if header.get("ss_base_model_version", "").startswith("sdxl_"):
        return "SDXL"
    return "SD2" if header.get("ss_v2") == "True" else "SD1"


def listed_by_forge(header: Mapping[str, str]) -> str:
    """Return the base model that Forge (dfdcbab6) lists a file for."""
    named = {
        "flux-1-dev/lora": "Flux",
        "stable-diffusion-xl-v1-base/lora": "SDXL",
        "stable-diffusion-v1/lora": "SD1",
    }
    by_name = named.get(header["modelspec.architecture"], "Unknown")
    if by_name in ("Flux", "SDXL"):
        return by_name
    return "SD2" if header.get("ss_v2") == "True" else by_name


def edited_base(base: Path, folder: Path, **unet: Any) -> Path:
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    file = folder / "unet" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | unet), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("prediction", "unet", "version", "listed_as"),
    [
        ("epsilon", {}, "sd_v1", "SD1"),
        ("v_prediction", {}, "sd_v1_v", "SD1"),
        ("epsilon", {"cross_attention_dim": 1024}, "sd_v2", "SD2"),
        ("v_prediction", {"cross_attention_dim": 1024}, "sd_v2_v", "SD2"),
        ("sdxl", {}, "sdxl_base_v1-0", "SDXL"),
    ],
)
def test_R15_web_uis_list_a_file_for_its_base_model(
    make_project: ProjectFactory,
    tmp_path: Path,
    prediction: str,
    unet: dict[str, Any],
    version: str,
    listed_as: str,
) -> None:
    job = make_project(prediction=prediction).job()
    header = header_metadata(job, detect(edited_base(job.base, tmp_path / "base", **unet)))
    assert header["ss_base_model_version"] == version
    assert listed_by_a1111(header) == listed_by_forge(header) == listed_as


@pytest.mark.parametrize(("heads", "version"), [(24, "flux_2_klein_4b"), (32, "flux_2_klein_9b")])
def test_R15_both_sizes_of_klein_have_a_version(
    make_project: ProjectFactory, tmp_path: Path, heads: int, version: str
) -> None:
    job = make_project(prediction="klein").job()
    shutil.copytree(job.base, tmp_path / "base")
    file = tmp_path / "base" / "transformer" / "config.json"
    config = json.loads(file.read_text("utf-8")) | {"num_attention_heads": heads}
    file.write_text(json.dumps(config), encoding="utf-8")
    header = header_metadata(job, detect(tmp_path / "base"))
    assert header["ss_base_model_version"] == version
    assert header["ss_v2"] == "False"


def test_R15_models_that_kohyas_tools_train_have_their_versions() -> None:
    versions = {spec.name: spec.kohya_version for spec in FAMILIES if isinstance(spec.kohya_version, str)}
    assert {name: version for name, version in versions.items() if version} == {
        "Stable Diffusion XL": "sdxl_base_v1-0",
        "FLUX.1": "flux1",
        "FLUX.1 Kontext": "flux_kontext",
        "FLUX.2 dev": "flux_2_dev",
        "Chroma": "chroma",
        "Lumina Image 2": "lumina2",
        "Qwen-Image": "qwen_image",
        "Qwen-Image-Edit": "qwen_image_edit",
        "Qwen-Image-Edit (first)": "qwen_image_edit",
        "Z-Image": "z_image",
        "Ideogram 4": "ideogram4",
        "Krea 2": "krea2",
        "Kandinsky 5 (image)": "kandinsky5",
        "Wan 2.1 (image)": "wan",
    }


def with_captions(project: Project, **captions: list[list[str]]) -> TrainingJob:
    """Return the project's job with captions per dataset, one list of variants per image."""
    job = project.job()
    rows = {name: iter(each) for name, each in captions.items()}
    changed = [next(rows[name]) for name in job.inputs.table["dataset"]]
    table = job.inputs.table.with_columns(captions=pl.Series(changed, dtype=pl.List(pl.String)))
    return replace(job, inputs=TrainingInputs(table))


def test_an_image_counts_each_of_its_tags_once(
    make_project: ProjectFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_project(datasets={"cats": {}, "dogs": {}, "people": {"role": "prior"}}, sizes={"64x64": 9})
    cats = [["Cat,  red fur", "red fur, cat"], ["cat,,\u00c4hre, old"], ["\u00e4hre, red fur,cat"]]
    dogs = [["a dog runs"], ["a dog sits"], ["a dog sleeps"]]
    job = with_captions(project, cats=cats, dogs=dogs, people=[["man"], ["man"], ["man"]])
    frequencies = json.loads(header_metadata(job, detect(job.base))["ss_tag_frequency"])
    assert frequencies == {"cats": {"cat": 3, "red fur": 2, "\u00e4hre": 2}, "dogs": {}}
    assert list(frequencies["cats"]) == ["cat", "red fur", "\u00e4hre"]

    monkeypatch.setattr(module, "MAX_TAGS", 2)
    frequencies = json.loads(header_metadata(job, detect(job.base))["ss_tag_frequency"])
    assert frequencies["cats"] == {"cat": 3, "red fur": 2}


def test_the_trigger_words_of_trained_datasets_are_named(make_project: ProjectFactory) -> None:
    datasets = {
        "faces": {"captions": {"trigger": "sks"}},
        "hands": {"captions": {"trigger": "hnd, big"}},
        "more": {"captions": {"trigger": "sks"}},
        "people": {"role": "prior", "captions": {"trigger": "sks", "class_words": "person"}},
        "plain": {},
    }
    job = make_project(datasets=datasets).job()
    assert header_metadata(job, detect(job.base))["modelspec.trigger_phrase"] == "sks, hnd, big"

    job = make_project().job()
    assert "modelspec.trigger_phrase" not in header_metadata(job, detect(job.base))
