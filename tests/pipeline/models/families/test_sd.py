from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline

from demo.tiny_models import make_tiny
from pipeline.errors import BucketError, FamilyError
from pipeline.images.geometry import Size
from pipeline.models.families import Layer
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.models.worker.inference import PictureSettings
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.models.families.case import Case

ATTENTIONS = {
    "down_blocks.0.attentions.0": "input_blocks.1.1",
    "mid_block.attentions.0": "middle_block.1",
    "up_blocks.1.attentions.0": "output_blocks.2.1",
    "up_blocks.1.attentions.1": "output_blocks.3.1",
}
"""Attention blocks of the tiny UNet by their CompVis names."""

LAYERS = [
    f"transformer_blocks.0.{attention}.{layer}"
    for attention in ("attn1", "attn2")
    for layer in ("to_q", "to_k", "to_v", "to_out.0")
]


RESIDUAL = {
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
"""Members of CompVis's `ResBlock` by their diffusers names."""


class StableDiffusionCase(Case):
    pipeline_class = StableDiffusionPipeline
    targets: ClassVar[list[str]] = ["to_q", "to_k", "to_v", "to_out.0"]

    def make(self, folder: Path) -> None:
        make_tiny(folder)

    def pipeline(self, folder: Path, **parts: Any) -> Any:
        return super().pipeline(folder, safety_checker=None, **parts)

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        return {"text_embedding": pipe.encode_prompt(caption, "cpu", 1, False)[0]}

    def latent(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        return pipe.vae.encode(pixels).latent_dist.mean * pipe.vae.config.scaling_factor

    def noisy(self, pipe: Any, micro: MicroInput) -> torch.Tensor:
        betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
        signal = torch.tensor(np.cumprod(1 - betas))[micro.timesteps].float()[:, None, None, None]
        return signal.sqrt() * micro.latent + (1 - signal).sqrt() * micro.noise

    def target(self, micro: MicroInput) -> torch.Tensor:
        return micro.noise

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        return pipe.unet(noisy, micro.timesteps, micro.conditions["text_embedding"]).sample

    def kohya_keys(self) -> set[str]:
        return {f"lora_unet_{block}_{layer}".replace(".", "_") for block in ATTENTIONS for layer in LAYERS}

    def comfyui_keys(self, modules: set[str]) -> set[str]:
        assert modules == {f"{block}.{layer}" for block in ATTENTIONS for layer in LAYERS}
        return {f"diffusion_model.{block}.{layer}" for block in ATTENTIONS.values() for layer in LAYERS}


class VPredictionCase(StableDiffusionCase):
    """v-prediction, as in Stable Diffusion 2.1 at 768 pixels."""

    def make(self, folder: Path) -> None:
        make_tiny(folder, prediction_type="v_prediction")

    def target(self, micro: MicroInput) -> torch.Tensor:
        betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
        signal = torch.tensor(np.cumprod(1 - betas))[micro.timesteps].float()[:, None, None, None]
        return signal.sqrt() * micro.noise - (1 - signal).sqrt() * micro.latent


@pytest.mark.parametrize("case", [StableDiffusionCase, VPredictionCase])
def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None], case: type[Case]
) -> None:
    check_family(case())


@pytest.fixture
def family(tiny_sd: Path) -> WorkerFamily:
    return load_family(tiny_sd)


@pytest.fixture
def v_family(tiny_sd: Path, tmp_path: Path) -> WorkerFamily:
    folder = shutil.copytree(tiny_sd, tmp_path / "v")
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "prediction_type": "v_prediction"}))
    return load_family(folder)


def test_facts_from_configurations_need_no_torch(tiny_sd: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from pipeline.models.families import detect\n"
        "from pipeline.images.geometry import Size\n"
        "f = detect(Path(sys.argv[1]))\n"
        "print(f.latent_shape(Size(64, 96)), f.text_shapes(), f.max_length(), f.prediction_type(),\n"
        "      f.size_multiple(), f.modelspec_architecture(),\n"
        "      [len(f.fingerprint_parts(use)) for use in ('latents', 'text', 'denoiser')],\n"
        "      'torch' in sys.modules, 'diffusers' in sys.modules, 'transformers' in sys.modules)"
    )
    root = str(Path(__file__).parents[4])
    completed = subprocess.run(
        [sys.executable, "-c", code, str(tiny_sd)], cwd=root, capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == (
        "(4, 8, 12) {'text_embedding': (77, 32)} 77 epsilon 8 stable-diffusion-v1 [1, 2, 2] False False False"
    )


def test_B03_a_size_the_vae_cannot_divide_is_an_error(family: WorkerFamily) -> None:
    with pytest.raises(BucketError):
        family.latent_shape(Size(60, 64))


def test_posterior_and_scaling_equal_diffusers(family: WorkerFamily, tiny_sd: Path) -> None:
    from diffusers import AutoencoderKL

    pixels = torch.rand(2, 3, 64, 48, generator=torch.Generator().manual_seed(1)) * 2 - 1
    posterior = family.vae.posterior(family.vae.load("float32", "cpu"), pixels)
    # In the same memory format the arithmetic is the same; `test_vae.py` compares with the usual one.
    vae = AutoencoderKL.from_pretrained(tiny_sd / "vae").to(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = vae.encode(pixels.contiguous(memory_format=torch.channels_last)).latent_dist
    torch.testing.assert_close(posterior.mean, expected.mean, rtol=0, atol=0)
    torch.testing.assert_close(posterior.std, expected.std, rtol=0, atol=0)
    assert posterior.mean.shape == (2, 4, 8, 6)
    assert torch.equal(family.vae.normalise(posterior.mean), posterior.mean * 0.18215)


def test_the_shift_is_subtracted_before_scaling(tiny_sd: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_sd, tmp_path / "shifted")
    path = folder / "vae" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "shift_factor": 0.5, "scaling_factor": 2.0}))
    assert torch.equal(load_family(folder).vae.normalise(torch.tensor([1.0, 0.5])), torch.tensor([1.0, 0.0]))


def _formula(family: WorkerFamily, latent, noise, timestep: int):
    """Return signal and noise rates of the scaled linear schedule, in float64."""
    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    signal = np.cumprod(1 - betas)[timestep]
    return signal**0.5, (1 - signal) ** 0.5


@pytest.mark.parametrize("kind", ["family", "v_family"])
def test_noise_and_target_follow_the_formulas(kind: str, request: pytest.FixtureRequest) -> None:
    family: WorkerFamily = request.getfixturevalue(kind)
    scheduler = family.noise.load_scheduler()
    generator = torch.Generator().manual_seed(2)
    latent, noise = (torch.randn(1, 4, 8, 8, generator=generator) for _ in range(2))
    for timestep in (0, 321, 999):
        a, s = _formula(family, latent, noise, timestep)
        times = torch.tensor([timestep])
        torch.testing.assert_close(
            family.noise.add_noise(scheduler, latent, noise, times), a * latent + s * noise, rtol=0, atol=1e-5
        )
        expected = noise if kind == "family" else a * noise - s * latent
        torch.testing.assert_close(
            family.noise.target(scheduler, latent, noise, times), expected, rtol=0, atol=1e-5
        )


def test_uniform_levels_give_each_timestep_equally_often(family: WorkerFamily) -> None:
    scheduler = family.noise.load_scheduler()
    uniform = torch.arange(4000, dtype=torch.float64) / 4000
    timesteps = family.noise.timesteps(scheduler, uniform, (4, 8, 8))
    assert timesteps.dtype == torch.int64
    assert torch.equal(torch.bincount(timesteps), torch.full((1000,), 4))


def test_a_prediction_equals_a_direct_call_of_the_unet(family: WorkerFamily) -> None:
    unet = family.denoiser.load("float32", "cpu")
    noisy, text = torch.ones(2, 4, 8, 8), torch.ones(2, 77, 32)
    times = torch.tensor([5, 900])
    with torch.no_grad():
        predicted = family.denoiser.predict(unet, noisy, times, {"text_embedding": text})
        assert torch.equal(predicted, unet(noisy, times, text, return_dict=False)[0])
    assert predicted.shape == noisy.shape
    assert [name for name, weight in unet.named_parameters() if weight.requires_grad] == []


def test_a_picture_equals_that_of_the_complete_pipeline(family: WorkerFamily, tiny_sd: Path) -> None:
    encoders = family.text.load("float32", "cpu")
    text, empty = (family.text.encode_caption(encoders, caption).tensors for caption in ("a cat", ""))
    pipeline = family.drawing.load_pipeline(dtype="float32", device="cpu")
    preview = family.drawing.draw(pipeline, text, empty, PictureSettings(Size(64, 64), steps=2, seed=7))
    pipeline_of_diffusers = StableDiffusionPipeline.from_pretrained(tiny_sd)
    pipeline_of_diffusers.vae.to(memory_format=torch.channels_last)
    expected = pipeline_of_diffusers(
        "a cat", height=64, width=64, num_inference_steps=2, generator=torch.Generator().manual_seed(7)
    ).images[0]
    assert np.array_equal(np.asarray(preview), np.asarray(expected))
    assert preview.size == (64, 64)
    assert np.asarray(preview).std() > 1


def test_lora_targets_exist_and_have_names_in_both_layouts(family: WorkerFamily) -> None:
    unet = family.denoiser.load("float32", "cpu")
    modules = [name for name, _ in unet.named_modules() if name.endswith(tuple(family.lora_targets()))]
    assert len(modules) == 4 * 8
    for keys in ([family.kohya_layer(name).key for name in modules], map(family.comfyui_key, modules)):
        assert [key for key, count in Counter(keys).items() if count > 1] == [], "keys of several modules"
    name = "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_out.0"
    assert family.kohya_layer(name) == Layer(
        "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_out_0", (name,)
    )


def compvis_blocks(levels: list[bool], layers: int) -> dict[str, str]:
    """Return CompVis's name of each block by its diffusers name.

    Follows the loops of `UNetModel.__init__` in ldm/modules/diffusionmodules/openaimodel.py of
    github.com/CompVis/stable-diffusion, which appends to `input_blocks` and `output_blocks`.

    Args:
        levels: Whether each level on the way down has attention.
        layers: Number of residual blocks per level.
    """
    names = {
        "mid_block.resnets.0": "middle_block.0",
        "mid_block.attentions.0": "middle_block.1",
        "mid_block.resnets.1": "middle_block.2",
    }
    num_inputs = 1  # the first convolution
    for level, has_attention in enumerate(levels):
        for layer in range(layers):
            names[f"down_blocks.{level}.resnets.{layer}"] = f"input_blocks.{num_inputs}.0"
            if has_attention:
                names[f"down_blocks.{level}.attentions.{layer}"] = f"input_blocks.{num_inputs}.1"
            num_inputs += 1
        if level < len(levels) - 1:
            names[f"down_blocks.{level}.downsamplers.0.conv"] = f"input_blocks.{num_inputs}.0.op"
            num_inputs += 1

    num_outputs = 0
    for level, has_attention in enumerate(reversed(levels)):
        for layer in range(layers + 1):
            members = ["resnets", "attentions"] if has_attention else ["resnets"]
            for member, kind in enumerate(members):
                names[f"up_blocks.{level}.{kind}.{layer}"] = f"output_blocks.{num_outputs}.{member}"
            if level < len(levels) - 1 and layer == layers:
                member = len(members)
                upsampler = f"up_blocks.{level}.upsamplers.0.conv"
                names[upsampler] = f"output_blocks.{num_outputs}.{member}.conv"
            num_outputs += 1
    return names


@pytest.mark.parametrize(
    ("levels", "layers"),
    [([True, True, True, False], 2), ([False, True, True], 2), ([True, False], 1), ([False, True, False], 3)],
    ids=["SD 1 and 2", "SDXL", "tiny", "attention in the middle"],
)
def test_comfyui_keys_name_every_block_as_the_original_constructor_numbers_it(
    tiny_sd: Path, tmp_path: Path, levels: list[bool], layers: int
) -> None:
    folder = shutil.copytree(tiny_sd, tmp_path / "unet_of_these_levels")
    path = folder / "unet" / "config.json"
    down = ["CrossAttnDownBlock2D" if has_attention else "DownBlock2D" for has_attention in levels]
    up = ["CrossAttnUpBlock2D" if has_attention else "UpBlock2D" for has_attention in reversed(levels)]
    changes = {"layers_per_block": layers, "down_block_types": down, "up_block_types": up}
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    family = load_family(folder)
    members = {"resnets": RESIDUAL, "attentions": {"proj_in": "proj_in"}}
    expected = {
        module + (f".{name}" if name else ""): f"diffusion_model.{original}" + (f".{inner}" if inner else "")
        for module, original in compvis_blocks(levels, layers).items()
        for name, inner in next((each for kind, each in members.items() if kind in module), {"": ""}).items()
    }
    wrong = {
        module: (family.comfyui_key(module), key)
        for module, key in expected.items()
        if family.comfyui_key(module) != key
    }
    assert wrong == {}, "each module: (its key, its key in the original code)"


def test_a_module_without_an_original_name_is_an_error(family: WorkerFamily) -> None:
    with pytest.raises(FamilyError, match="conv_in"):
        family.comfyui_key("conv_in")


def test_a_prediction_type_that_cannot_be_trained_is_an_error(tiny_sd: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_sd, tmp_path / "sample")
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "prediction_type": "sample"}))
    with pytest.raises(FamilyError, match="sample"):
        load_family(folder).prediction_type()
