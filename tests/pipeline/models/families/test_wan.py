from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from peft import LoraConfig

from demo.tiny_models import make_tiny_wan
from demo.tiny_models.parts import write_json
from pipeline.errors import BucketError, FamilyError
from pipeline.images.geometry import Size
from pipeline.models.diffusers_folder import read_json
from pipeline.models.families import family_spec
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.export.lora_files import LAYOUTS, layout_file
from pipeline.trained_lora.worker.adapter.lora import ADAPTER, adapted_networks, trainable_weights
from pipeline.trained_lora.worker.export.exporter import Exporter
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.models.families.case import Case
from tests.tensor_differences import differing_tensors

ATTENTION = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o"}
LAYERS = {
    f"attn{number}.{name}": f"{kind}_attn.{original}"
    for number, kind in ((1, "self"), (2, "cross"))
    for name, original in ATTENTION.items()
}
LAYERS |= {"ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"}
ORIGINALS = {f"blocks.{block}.{layer}" for block in (0, 1) for layer in LAYERS.values()}


class FirstFrame:
    """The video pipeline, whose pictures are the first frames of its videos."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pipeline, name)

    def __call__(self, **arguments: Any) -> tuple[Any]:
        return (self.pipeline(**arguments)[0][:, 0],)


class WanCase(Case):
    pipeline_class = WanPipeline
    targets: ClassVar[list[str]] = list(LAYERS)
    drawing: ClassVar[dict[str, Any]] = {"num_frames": 1}

    def make(self, folder: Path) -> None:
        make_tiny_wan(folder)

    def pipeline(self, folder: Path, **parts: Any) -> Any:
        return FirstFrame(WanPipeline.from_pretrained(folder, **parts))

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        embedding, _ = pipe.encode_prompt(caption, do_classifier_free_guidance=False, max_sequence_length=512)
        return {"text_embedding": embedding}

    def pixels(self, pipe: Any, image: np.ndarray[Any, Any]) -> torch.Tensor:
        return pipe.video_processor.preprocess(image[None].astype(np.float32) / 255)

    def latent(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Return the latent that the end of the pipeline converts back to the raw latent."""
        config = pipe.vae.config
        raw = pipe.vae.encode(pixels[:, :, None]).latent_dist.mode()[:, :, 0]
        mean, std = (torch.tensor(each)[:, None, None] for each in (config.latents_mean, config.latents_std))
        return (raw - mean) / std

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Predict each sample alone."""
        predictions = [
            pipe.transformer(sample[None, :, None], timestep[None], text[None]).sample[:, :, 0]
            for sample, timestep, text in zip(
                noisy, micro.timesteps, micro.conditions["text_embedding"], strict=True
            )
        ]
        return torch.cat(predictions)

    def kohya_keys(self) -> set[str]:
        return {f"lora_unet_{key}".replace(".", "_") for key in ORIGINALS}

    def comfyui_keys(self, modules: set[str]) -> set[str]:
        return {f"diffusion_model.{key}" for key in ORIGINALS}


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(WanCase())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_tiny_wan(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("transformer_2", ["diffusers", "WanTransformer3DModel"], "has two transformers"),
        ("boundary_ratio", 0.875, "has a transformer for a part of the noise levels only"),
        ("expand_timesteps", True, "takes a timestep for each token"),
    ],
)
def test_a_model_of_wan_2_2_is_an_error_that_names_its_index_and_a_model_to_use(
    model: Path, key: str, value: Any, message: str
) -> None:
    index = model / "model_index.json"
    write_json(index, {**read_json(index), key: value})
    with pytest.raises(FamilyError, match=message) as error:
        family_spec(model)
    assert error.value.where == f"{index}, {key}"
    assert "Wan-AI/Wan2.1-T2V-1.3B-Diffusers" in error.value.fix


def test_an_index_without_the_settings_of_later_models_is_wan_2_1(model: Path) -> None:
    index = model / "model_index.json"
    later = ("transformer_2", "boundary_ratio", "expand_timesteps")
    write_json(index, {name: value for name, value in read_json(index).items() if name not in later})
    assert family_spec(model).name == "Wan 2.1 (image)"


def test_original_layer_names_match_diffusers_converters(model: Path) -> None:
    family = load_family(model)
    network = family.denoiser.load("float32", "cpu")
    modules = [name for name, module in network.named_modules() if isinstance(module, torch.nn.Linear)]
    assert len(modules) == 26
    ends = ("lora_A.weight", "lora_B.weight")
    comfyui = {f"{family.comfyui_key(each)}.{end}": torch.zeros(1, 1) for each in modules for end in ends}
    assert set(WanPipeline.lora_state_dict(comfyui)) == {
        f"transformer.{module}.{end}" for module in modules for end in ends
    }

    # musubi-tuner adapts blocks only.
    blocks = [module for module in modules if module.startswith("blocks.")]
    tensors = {"lora_down.weight": torch.ones(2, 1), "lora_up.weight": torch.ones(1, 2)}
    tensors["alpha"] = torch.tensor(1.0)
    kohya = {f"{family.kohya_layer(each).key}.{end}": tensors[end] for each in blocks for end in tensors}
    assert set(WanPipeline.lora_state_dict(kohya)) == {
        f"transformer.{module}.{end}" for module in blocks for end in ends
    }
    with pytest.raises(FamilyError, match="patch_embedding"):
        family.comfyui_key("patch_embedding")


def test_the_files_of_all_layouts_change_every_frame_of_a_video_equally(model: Path, tmp_path: Path) -> None:
    family = load_family(model)
    denoiser: Any = family.denoiser.load("float32", "cpu")
    denoiser.add_adapter(LoraConfig(r=2, lora_alpha=1, target_modules=list(LAYERS)), adapter_name=ADAPTER)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in trainable_weights(denoiser):
            weight.copy_(torch.randn(weight.shape, generator=generator))
    Exporter(family, "demo", {}).export(adapted_networks(denoiser, {}), tmp_path / "lora")

    pipe: Any = WanPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    plain, videos = video(pipe), []
    for layout in LAYOUTS:
        pipe.load_lora_weights(tmp_path / "lora", weight_name=layout_file(layout, "demo"))
        videos.append(video(pipe))
        pipe.unload_lora_weights()
    for each in videos:
        np.testing.assert_allclose(each, videos[0], atol=1e-4)
        assert np.abs(each - plain).max(axis=(1, 2, 3)).min() > 0.01


def video(pipe: Any) -> np.ndarray[Any, Any]:
    """Draw five frames, (F, H, W, 3)."""
    generator = torch.Generator().manual_seed(1)
    size = {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 2}
    return pipe(prompt="a cat", **size, generator=generator).frames[0]


def test_captions_are_cleaned_as_in_the_pipeline(model: Path) -> None:
    family = load_family(model)
    encoders = family.text.load("float32", "cpu")
    dirty = family.text.encode_caption(encoders, " a cat\n &amp;amp;  a\tdog ")
    clean = family.text.encode_caption(encoders, "a cat & a dog")
    assert differing_tensors(dirty.tensors, clean.tensors) == []
    assert dirty.num_tokens == clean.num_tokens
    expected, _ = WanPipeline.encode_prompt(
        encoders, " a cat\n &amp;amp;  a\tdog ", device=torch.device("cpu")
    )
    assert torch.equal(dirty.tensors["text_embedding"], expected[0, : dirty.num_tokens])
    assert not expected[0, dirty.num_tokens :].any()


def test_a_size_beyond_the_position_tables_is_an_error(model: Path) -> None:
    family = load_family(model)
    assert family.latent_shape(Size(16 * 1024, 64)) == (16, 2048, 8)
    with pytest.raises(BucketError, match="64x16400"):
        family.latent_shape(Size(64, 16 * 1025))


def test_a_vae_of_before_the_key_of_its_factor_has_factor_8(model: Path) -> None:
    path = model / "vae" / "config.json"
    config = read_json(path)
    assert config.pop("scale_factor_spatial") == 8
    write_json(path, config)
    assert load_family(model).vae_factor == WanPipeline.from_pretrained(model).vae_scale_factor_spatial == 8


def test_a_patch_of_several_frames_is_an_error(model: Path) -> None:
    path = model / "transformer" / "config.json"
    write_json(path, {**read_json(path), "patch_size": [2, 2, 2]})
    with pytest.raises(FamilyError, match=r"1 frame and a square, got \[2, 2, 2\]"):
        load_family(model).size_multiple()
