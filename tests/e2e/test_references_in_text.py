"""A complete job with models whose text encoder sees the reference images."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from diffusers import QwenImage21Pipeline, QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as edit_plus
from PIL import Image

from demo.tiny_models import make_tiny_qwen_image21, make_tiny_qwen_image_edit
from pipeline.models.worker.family import load_family
from tests.e2e.pairs import NUM_PAIRS, closed_gates, write_pairs
from tests.e2e.workspace import Workspace
from tests.pipeline.models.families.qwen_image21_case import small_references


@contextmanager
def small_edit_references() -> Generator[None]:
    """Shrink references of Qwen-Image-Edit's pipeline, where a megapixel takes long on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edit_plus, "VAE_IMAGE_SIZE", 96 * 96)
        yield


def edit_pipeline(model: Path) -> Any:
    pipe = QwenImageEditPlusPipeline.from_pretrained(model, processor=None)
    pipe.register_modules(processor=load_family(model).text.load_tokenizer("processor"))
    return pipe


def image21_pipeline(model: Path) -> Any:
    processor = load_family(model).text.load_tokenizer("processor")
    return QwenImage21Pipeline.from_pretrained(model, processor=processor)


EDIT = (make_tiny_qwen_image_edit, edit_pipeline, small_edit_references)
IMAGE21 = (make_tiny_qwen_image21, image21_pipeline, small_references)


def prepared(root: Path, make: Callable[[Path], None]) -> Workspace:
    """Return a workspace with 12 pairs, a tiny model and a recipe."""
    make(root / "model")
    workspace = write_pairs(root)
    references = [{"path": str(root / "before"), "resolution": 64}]
    dataset = {"name": "photos", "path": str(workspace.data), "references": references}
    training = {"steps": 4, "batch_size": 2, "learning_rate": 1e-1, "sample_every": 0, "lora": {"rank": 4}}
    buckets, text = {"resolution": 64, "step": 32}, {"caption_dropout": 0.5}
    workspace.recipe(datasets=[dataset], buckets=buckets, text=text, training=training)
    return workspace


def edited(pipe: Any, reference: Path) -> np.ndarray:
    with Image.open(reference) as image:
        generator = torch.Generator().manual_seed(0)
        arguments = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "np"}
        images = [image.convert("RGB")]
        return pipe(prompt="make it dark", image=images, generator=generator, **arguments).images[0]


def text_keys(workspace: Workspace) -> dict[tuple[str, int], str]:
    table = pl.read_parquet(workspace.out / "tables" / "text_embeddings.parquet")
    rows = table.select("sample_id", "variant", "key").iter_rows()
    return {(sample_id, variant): key for sample_id, variant, key in rows}


def test_E01_E03_a_missing_reference_stops_the_job_before_a_caption_is_encoded(tmp_path: Path) -> None:
    workspace = prepared(tmp_path, make_tiny_qwen_image_edit)
    (tmp_path / "before" / "7.webp").unlink()
    assert not workspace.execute("train").success
    assert "photos/7.png" in closed_gates(workspace, "validated_dataset")["references_present"]
    assert workspace.entries("latents") == workspace.entries("text") == []
    assert not (workspace.out / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("model", [EDIT, IMAGE21], ids=["Qwen-Image-Edit", "Qwen-Image 2.1"])
def test_E01_the_repaired_pairs_train_a_lora_that_edits_and_an_edited_reference_is_encoded_alone(
    tmp_path: Path, model: tuple[Any, Any, Any]
) -> None:
    make, load_pipeline, small = model
    workspace, before = prepared(tmp_path, make), tmp_path / "before"
    shutil.move(before / "7.webp", tmp_path / "7.webp")
    assert not workspace.execute("train").success
    assert "photos/7.png" in closed_gates(workspace, "validated_dataset")["references_present"]

    shutil.move(tmp_path / "7.webp", before / "7.webp")
    assert workspace.execute("train").success
    assert workspace.report("vae_latents")["encoded"] == 2 * NUM_PAIRS
    # The caption and the empty one with the references of each sample, and the empty one without any.
    assert workspace.report("text_embeddings")["encoded"] == 2 * NUM_PAIRS + 1
    provenance = json.loads((workspace.out / "lora" / "provenance.json").read_text("utf-8"))
    assert len(provenance["samples"]["references"]) == NUM_PAIRS

    pipe = load_pipeline(workspace.model)
    pipe.set_progress_bar_config(disable=True)
    with small():
        without = edited(pipe, before / "1.webp")
        pipe.load_lora_weights(workspace.out / "lora")
        assert np.abs(edited(pipe, before / "1.webp") - without).max() > 0.01

    keys = text_keys(workspace)
    with Image.open(before / "3.webp") as image:
        image.transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(before / "3.webp", lossless=True)
    assert workspace.execute("cache").success
    changed = {name for name, key in text_keys(workspace).items() if keys[name] != key}
    assert changed == {("photos/3.png", -1), ("photos/3.png", 0)}
    for asset, number in (("vae_latents", 1), ("text_embeddings", 2)):
        report = workspace.report(asset)
        assert (report["encoded"], report["removed"]) == (number, number)
