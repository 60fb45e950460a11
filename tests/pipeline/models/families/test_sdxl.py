from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLImg2ImgPipeline, StableDiffusionXLPipeline

from demo.tiny_models import make_tiny_sdxl
from pipeline.errors import FamilyError
from pipeline.images.geometry import Size
from pipeline.models.fingerprints import Fingerprints
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.models.worker.inference import PictureSettings
from pipeline.models.worker.loading import load_component
from pipeline.recipe import LoraSettings
from pipeline.trained_lora.worker.adapter.lora import add_lora, trainable_weights
from pipeline.trained_lora.worker.export.exporter import Exporter
from pipeline.trained_lora.worker.export.modules import describe_networks
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.models.families.case import Case
from tests.pipeline.models.families.sized_unet_case import ATTENTIONS, LAYERS, SizedUNetCase

# numpy 2 deprecates how diffusers' Euler schedule converts a tensor to an array.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module")
def family(tiny_sdxl: Path) -> WorkerFamily:
    return load_family(tiny_sdxl)


@pytest.fixture(scope="module")
def complete_pipeline(tiny_sdxl: Path) -> Any:
    pipeline = StableDiffusionXLPipeline.from_pretrained(tiny_sdxl, add_watermarker=False)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw_picture(pipeline: Any, **options: Any) -> np.ndarray[Any, Any]:
    rng = torch.Generator().manual_seed(1)
    kwargs = {"height": 64, "width": 64, "num_inference_steps": 2, "generator": rng, "output_type": "np"}
    return pipeline("a cat", **kwargs, **options).images[0]


class StableDiffusionXLCase(SizedUNetCase):
    pipeline_class = StableDiffusionXLPipeline
    previewing: ClassVar[dict[str, Any]] = {"negative_prompt": ""}  # with none, the pipeline uses zeros

    def make(self, folder: Path) -> None:
        make_tiny_sdxl(folder)

    def pooled_width(self, pipe: Any) -> int:
        return pipe.text_encoder_2.config.projection_dim

    def noisy(self, pipe: Any, micro: MicroInput) -> torch.Tensor:
        betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
        signal = torch.tensor(np.cumprod(1 - betas))[micro.timesteps].float()[:, None, None, None]
        return signal.sqrt() * micro.latent + (1 - signal).sqrt() * micro.noise

    def kohya_keys(self) -> set[str]:
        originals = [f"{block}.{layer}" for block in ATTENTIONS.values() for layer in LAYERS]
        return {f"lora_unet_{name.replace('.', '_')}" for name in originals}


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(StableDiffusionXLCase())


class HalfCase(StableDiffusionXLCase):
    """A model with only fp16 weights, as many are published."""

    def make(self, folder: Path) -> None:
        make_tiny_sdxl(folder.parent / "whole")
        pipe = StableDiffusionXLPipeline.from_pretrained(folder.parent / "whole", dtype=torch.float16)
        pipe.save_pretrained(folder, variant="fp16")
        weights = [*folder.glob("*/*.safetensors"), *folder.glob("*/*.bin")]
        assert len(weights) == 4
        assert [path.name for path in weights if not path.name.endswith(".fp16.safetensors")] == []

    def pipeline(self, folder: Path, **parts: Any) -> Any:
        return super().pipeline(folder, variant="fp16", dtype=torch.float32, **parts)


@pytest.mark.slow
def test_the_complete_job_equals_diffusers_if_all_weights_have_a_variant(
    check_family: Callable[[Case], None],
) -> None:
    check_family(HalfCase())


def test_shards_of_a_variant_load_and_have_the_same_fingerprint(
    family: WorkerFamily, tiny_sdxl: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(tiny_sdxl, tmp_path / "other")
    pipe = StableDiffusionXLPipeline.from_pretrained(other)
    for role, size in (("unet", "2MB"), ("text_encoder", "30KB")):
        for path in (other / role).glob("*.safetensors"):
            path.unlink()
        getattr(pipe, role).save_pretrained(other / role, variant="bf16", max_shard_size=size)
        assert len(list((other / role).glob("*.bf16-0000?-of-*.safetensors"))) > 1
    vae = other / "vae" / "diffusion_pytorch_model.safetensors"
    vae.rename(vae.with_suffix(".fp16.safetensors"))
    changed, hashes = load_family(other), Fingerprints(tmp_path)
    for role in ("unet", "text_encoder", "vae"):
        expected, actual = (
            load_component(each, role, "float32", "cpu").state_dict() for each in (family, changed)
        )
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert hashes.of(changed.fingerprint_parts("latents")) == hashes.of(family.fingerprint_parts("latents"))


class ChannelCase(StableDiffusionXLCase):
    """A VAE with channel statistics, like Playground 2.5's."""

    known: ClassVar[dict[str, Any]] = {
        "latents_mean": [-1.6, 0.8, 0.2, -0.4],
        "latents_std": [8.4, 5.9, 6.6, 5.3],
        "scaling_factor": 0.5,
    }

    def make(self, folder: Path) -> None:
        super().make(folder)
        path = folder / "vae" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **self.known}))

    def latent(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        mean, std = (
            torch.tensor(self.known[name])[:, None, None] for name in ("latents_mean", "latents_std")
        )
        return (pipe.vae.encode(pixels).latent_dist.mean - mean) / std * 0.5


@pytest.mark.slow
def test_the_complete_job_equals_diffusers_if_each_channel_has_a_mean_and_a_deviation(
    check_family: Callable[[Case], None],
) -> None:
    check_family(ChannelCase())


def test_L04_channel_statistics_are_applied_as_in_diffusers_and_change_the_keys(
    family: WorkerFamily, tmp_path: Path
) -> None:
    ChannelCase().make(tmp_path)
    changed = load_family(tmp_path)
    methods = [each.spec.latents.method_of(each.model) for each in (changed, family)]
    assert methods[0] != methods[1] == family.spec.latents.method
    vae, draw = changed.vae.load("float32", "cpu"), torch.Generator().manual_seed(1)
    pixels = torch.rand(1, 3, 64, 64, generator=draw) * 2 - 1
    posterior = changed.vae.posterior(vae, pixels)
    raw = posterior.mean + posterior.std * torch.randn(1, 4, 8, 8, generator=draw.manual_seed(2))
    latent = changed.vae.normalise(raw)
    pipe: Any = StableDiffusionXLImg2ImgPipeline.from_pretrained(tmp_path, add_watermarker=False)
    pipe.vae.to(memory_format=torch.channels_last)
    arguments = {
        "generator": draw.manual_seed(2),
        "add_noise": False,
        "dtype": torch.float32,
        "device": "cpu",
    }
    with torch.no_grad():
        last = pixels.contiguous(memory_format=torch.channels_last)
        expected = pipe.prepare_latents(last, None, 1, 1, **arguments)
    torch.testing.assert_close(latent, expected, rtol=0, atol=1e-5)
    pipe = StableDiffusionXLPipeline.from_pretrained(tmp_path, add_watermarker=False)
    pipe.vae.to(memory_format=torch.channels_last)
    size = {"height": 64, "width": 64, "num_inference_steps": 1, "output_type": "pt"}
    picture = pipe("a cat", **size, callback_on_step_end=lambda *_: {"latents": latent}).images
    decoded = (changed.vae.decode(vae, latent) / 2 + 0.5).clamp(0, 1)
    assert decoded.std() > 0.01
    torch.testing.assert_close(decoded, picture, rtol=0, atol=1e-5)


def test_a_picture_equals_that_of_the_complete_pipeline(family: WorkerFamily, complete_pipeline: Any) -> None:
    encoders = family.text.load("float32", "cpu")
    text, empty = (family.text.encode_caption(encoders, caption).tensors for caption in ("a cat", ""))
    pipeline = family.drawing.load_pipeline(dtype="float32", device="cpu")
    preview = family.drawing.draw(pipeline, text, empty, PictureSettings(Size(64, 64), steps=2, seed=1))
    expected = draw_picture(complete_pipeline, negative_prompt="")
    np.testing.assert_allclose(np.asarray(preview) / 255, expected, atol=0.6 / 255)


def test_cut_tokens_are_counted(family: WorkerFamily) -> None:
    encoders = family.text.load("float32", "cpu")
    encoded = family.text.encode_caption(encoders, "cat " * 80)
    assert (encoded.num_tokens, encoded.num_cut, encoded.cut_from) == (82, 5, 4 * 75)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"_class_name": "EDMEulerScheduler"}, "EDMEuler"), ({"prediction_type": "sample"}, "sample")],
)
def test_a_schedule_that_cannot_be_trained_is_an_error(
    tiny_sdxl: Path, tmp_path: Path, change: dict[str, str], message: str
) -> None:
    folder = shutil.copytree(tiny_sdxl, tmp_path / "other")
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(FamilyError, match=message):
        load_family(folder).prediction_type()


def test_a_module_without_a_name_in_kohyas_layout_is_an_error(family: WorkerFamily) -> None:
    with pytest.raises(FamilyError, match="original code's layout does not include"):
        family.kohya_layer("add_embedding.linear_1")


def test_diffusers_reads_the_kohya_names_of_convolutions(
    family: WorkerFamily, tiny_sdxl: Path, tmp_path: Path
) -> None:
    unet: Any = family.denoiser.load("float32", "cpu")
    settings = LoraSettings(rank=2, alpha=2.0, modules=("*.time_emb_proj", "*.conv_shortcut"), conv_rank=2)
    add_lora(unet, settings, targets=family.lora_targets(), seed=1)
    for weight in trainable_weights(unet):
        torch.nn.init.normal_(weight.data, generator=torch.Generator().manual_seed(weight.numel()))
    exporter = Exporter(family, "demo", {})
    assert [file.max_error for file in exporter.export({"": unet}, tmp_path)] == [0.0] * 3
    keys = {module.kohya for module in describe_networks(family, {"": unet})}
    assert {
        "lora_unet_input_blocks_1_0_in_layers_2",
        "lora_unet_input_blocks_2_0_out_layers_3",
        "lora_unet_input_blocks_3_0_op",
        "lora_unet_input_blocks_4_0_skip_connection",
        "lora_unet_input_blocks_4_0_emb_layers_1",
        "lora_unet_middle_block_2_in_layers_2",
        "lora_unet_output_blocks_2_2_conv",
    } <= keys


def test_large_sizes_stay_exact_in_half_precision(family: WorkerFamily) -> None:
    time_ids: list[torch.Tensor] = []

    class Listening(torch.nn.Module):
        def forward(self, noisy: torch.Tensor, times: Any, **kwargs: Any) -> Any:
            time_ids.append(kwargs["added_cond_kwargs"]["time_ids"])
            return SimpleNamespace(sample=noisy)

    sizes = {"original_size_hw": [[3001, 4099]], "crop_top_left": [[257, 0]], "target_size_hw": [[1024, 960]]}
    conditions = {name: torch.tensor(size) for name, size in sizes.items()}
    conditions |= {
        "text_embedding": torch.ones(1, 77, 72).bfloat16(),
        "pooled_text_embedding": torch.ones(1, 48).bfloat16(),
    }
    family.denoiser.predict(Listening(), torch.ones(1, 4, 8, 8), torch.tensor([5]), conditions)
    assert time_ids[0].dtype == torch.float32
    assert time_ids[0].tolist() == [[3001, 4099, 257, 0, 1024, 960]]


def test_the_pipeline_class_decides_and_an_unknown_one_lists_the_families(
    tiny_sdxl: Path, tmp_path: Path
) -> None:
    assert load_family(tiny_sdxl).spec.name == "Stable Diffusion XL"
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "NobodysPipeline"}))
    with pytest.raises(FamilyError, match="NobodysPipeline") as excinfo:
        load_family(tmp_path)
    assert "StableDiffusionXLPipeline" in excinfo.value.fix
    assert "StableDiffusionPipeline" in excinfo.value.fix
