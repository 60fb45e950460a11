"""Text encoder LoRA in exported files: keys, loading in diffusers, and warm starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from safetensors.torch import load_file, save_file

from pipeline.errors import TrainingError
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.export.lora_files import LAYOUTS, layout_file, read_lora_file
from pipeline.trained_lora.worker.adapter.lora import collect
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.export.exporter import Exporter
from tests.pipeline.trained_lora.adapters import delta_weights
from tests.pipeline.trained_lora.text_encoder_project import (
    ATTENTION,
    project_of,
    settings,
    with_large_weights,
)
from tests.pipeline.trained_lora.worker.engine_steps import engine_of

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


class Exported:
    """An engine with large adapter weights, and its exported files."""

    def __init__(self, project: Project, folder: Path) -> None:
        self.job = project.job()
        self.engine = with_large_weights(engine_of(self.job))
        self.exporter = Exporter(load_family(self.job.base), "demo", {})
        self.files = self.exporter.export(self.engine.networks, folder)


def embedding_of(pipe: Any, caption: str) -> torch.Tensor:
    with torch.no_grad():
        embeddings = pipe.encode_prompt(
            caption, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=False
        )
    return torch.cat([part.flatten() for part in embeddings if part is not None])


@pytest.mark.parametrize("prediction", ["epsilon", "sdxl"])
def test_R06_load_lora_weights_restores_the_trained_text_encoders(
    make_project: Callable[..., Project], tmp_path: Path, prediction: str
) -> None:
    text = {"rank": 2, "alpha": 3.0, "targets": "blocks"}
    exported = Exported(project_of(make_project, prediction, text), tmp_path / "lora")
    assert max(file.max_error for file in exported.files) < 1e-6
    kind: Any = StableDiffusionXLPipeline if prediction == "sdxl" else StableDiffusionPipeline
    deltas = collect(exported.engine.networks, delta_weights)
    assert exported.engine.text is not None
    with torch.no_grad():
        trained = exported.engine.text.embed(["a cat"])
    expected = torch.cat([tensor.flatten() for tensor in trained.values()])
    for layout in ("diffusers", "kohya"):
        pipe = kind.from_pretrained(exported.job.base)
        assert (embedding_of(pipe, "a cat") - expected).abs().max() > 0.05
        pipe.load_lora_weights(tmp_path / "lora", weight_name=layout_file(layout, "demo"))
        for role in ("unet", *exported.engine.text_networks):
            prefix = "" if role == "unet" else f"{role}."
            network = exported.engine.networks[prefix]
            loaded = delta_weights(getattr(pipe, role), "default_0")
            assert set(loaded) == set(delta_weights(network))
            for name, delta in loaded.items():
                torch.testing.assert_close(delta, deltas[prefix + name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(embedding_of(pipe, "a cat"), expected, rtol=0, atol=1e-5)


GOLDEN = {
    "epsilon": {"text_encoder": ("lora_te", "clip_l", 2)},
    "sdxl": {"text_encoder": ("lora_te1", "clip_l", 1), "text_encoder_2": ("lora_te2", "clip_g", 3)},
}
"""Text encoder to its names in kohya's and ComfyUI's layouts and its number of adapted layers."""


@pytest.mark.parametrize("prediction", GOLDEN)
def test_each_layout_has_the_keys_of_its_loader(
    make_project: Callable[..., Project], tmp_path: Path, prediction: str
) -> None:
    Exported(project_of(make_project, prediction), tmp_path / "lora")
    keys = {
        layout: set(read_lora_file(tmp_path / "lora" / layout_file(layout, "demo")).tensors)
        for layout in LAYOUTS
    }
    expected: dict[str, set[str]] = {layout: set() for layout in LAYOUTS}
    for role, (kohya, comfyui, layers) in GOLDEN[prediction].items():
        for number in range(layers):
            for layer in ATTENTION:
                path = f"text_model.encoder.layers.{number}.{layer}"
                expected["diffusers"] |= {f"{role}.{path}.lora_{side}.weight" for side in "AB"}
                for end in ("lora_down.weight", "lora_up.weight", "alpha"):
                    expected["kohya"].add(f"{kohya}_{path.replace('.', '_')}.{end}")
                    expected["comfyui"].add(f"text_encoders.{comfyui}.transformer.{path}.{end}")
    denoisers = {"diffusers": "unet.", "kohya": "lora_unet_", "comfyui": "diffusion_model."}
    for layout in LAYOUTS:
        text = {key for key in keys[layout] if not key.startswith(denoisers[layout])}
        assert text == expected[layout]
        assert len(keys[layout]) > len(text)


@pytest.mark.slow
def test_a_warm_start_from_any_layout_has_the_effect_of_the_file(
    make_project: Callable[..., Project], tmp_path: Path
) -> None:
    project = project_of(make_project, "sdxl", {"rank": 2})
    exported = Exported(project, tmp_path / "lora")
    paths = {layout: tmp_path / "lora" / layout_file(layout, "demo") for layout in LAYOUTS}

    def started(from_file: Path, **text: Any) -> Engine:
        lora = settings(**text).model_copy(update={"start_from": from_file})
        return engine_of(project.changed("started", lora=lora).job())

    expected = collect(exported.engine.networks, delta_weights)
    for path in paths.values():
        loaded = collect(started(path, rank=2).networks, delta_weights)
        assert set(loaded) == set(expected)
        for name, delta in loaded.items():
            torch.testing.assert_close(delta, expected[name], rtol=1e-6, atol=1e-7)
    rescaled = collect(started(paths["diffusers"], rank=2, alpha=5.0).networks, delta_weights)
    for name, delta in collect(exported.engine.networks, delta_weights).items():
        torch.testing.assert_close(rescaled[name], delta, rtol=1e-4, atol=1e-6)
    denoiser_only = settings().model_copy(update={"text_encoders": None, "start_from": paths["kohya"]})
    with pytest.raises(TrainingError, match="do not match the adapter") as excinfo:
        engine_of(project.changed("alone", lora=denoiser_only).job())
    assert "the adapter has no such tensor" in excinfo.value.where
    assert "text_encoders" in excinfo.value.fix


def test_a_zero_layer_without_an_adapter_is_ignored_and_a_nonzero_one_is_an_error(
    make_project: Callable[..., Project], tmp_path: Path
) -> None:
    project = project_of(make_project, "sdxl")
    Exported(project, tmp_path / "lora")
    path = tmp_path / "lora" / layout_file("kohya", "demo")
    tensors = load_file(path)
    name = "lora_te1_text_model_encoder_layers_{}_self_attn_q_proj.{}"
    for end in ("lora_down.weight", "lora_up.weight", "alpha"):
        tensors[name.format(1, end)] = tensors[name.format(0, end)].clone()
    lora = settings().model_copy(update={"start_from": path})
    job = project.changed("started", lora=lora).job()
    save_file(tensors, path)
    with pytest.raises(TrainingError, match="do not match the adapter"):
        engine_of(job)
    tensors[name.format(1, "lora_up.weight")].zero_()
    save_file(tensors, path)
    engine_of(job)
