from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from diffusers import AnimaModularPipeline, ClassifierFreeGuidance
from diffusers.models.transformers import transformer_cosmos
from diffusers.modular_pipelines.anima.before_denoise import AnimaTextConditioningStep
from diffusers.utils import is_torchvision_available
from torch.nn.functional import interpolate

from demo.tiny_models import make_tiny_anima
from demo.tiny_models.parts import write_json
from pipeline.errors import FamilyError
from pipeline.models.diffusers_folder import read_json
from pipeline.models.worker.families.anima import ImageCosmosTransformer
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.models.families.case import Case

ATTENTION = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out.0": "output_proj"}
LAYERS = {
    f"attn{number}.{name}": f"{kind}_attn.{original}"
    for number, kind in ((1, "self"), (2, "cross"))
    for name, original in ATTENTION.items()
}
LAYERS |= {"ff.net.0.proj": "mlp.layer1", "ff.net.2": "mlp.layer2"}


@pytest.fixture(autouse=True)
def resizable_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let diffusers resize its padding mask without torchvision, whose nearest pixels are those of torch."""
    if not is_torchvision_available():
        functional = SimpleNamespace(resize=lambda mask, size, interpolation: interpolate(mask, size))
        modes = SimpleNamespace(NEAREST="nearest")
        transforms = SimpleNamespace(functional=functional, InterpolationMode=modes)
        monkeypatch.setattr(transformer_cosmos, "transforms", transforms, raising=False)


class UsualPipeline:
    """The modular pipeline, called as a usual one."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pipeline, name)

    def __call__(
        self,
        *,
        guidance_scale: float = 4.0,
        callback_on_step_end: Any = None,
        return_dict: bool = False,
        **arguments: Any,
    ) -> tuple[Any]:
        self.pipeline.update_components(guider=ClassifierFreeGuidance(guidance_scale=guidance_scale))
        scheduler = self.pipeline.scheduler
        if callback_on_step_end is not None:

            def step(prediction: Any, time: Any, latents: torch.Tensor, **options: Any) -> Any:
                replaced = callback_on_step_end(self, 0, time, {"latents": latents.squeeze(2)})
                return (replaced["latents"].unsqueeze(2),)

            scheduler.step = step
        try:
            return (self.pipeline(**arguments, output="images"),)
        finally:
            vars(scheduler).pop("step", None)


class AnimaCase(Case):
    pipeline_class = AnimaModularPipeline
    targets: ClassVar[list[str]] = list(LAYERS)

    def make(self, folder: Path) -> None:
        make_tiny_anima(folder)

    def pipeline(self, folder: Path, **parts: Any) -> Any:
        pipeline = AnimaModularPipeline.from_pretrained(str(folder), local_files_only=True)
        pipeline.load_components(local_files_only=True)
        assert type(pipeline.transformer) is not ImageCosmosTransformer
        return UsualPipeline(pipeline)

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        blocks = pipe.blocks.get_workflow("text2image")
        state = blocks.sub_blocks["text_encoder"].init_pipeline()
        state.update_components(
            text_encoder=pipe.text_encoder, tokenizer=pipe.tokenizer, t5_tokenizer=pipe.t5_tokenizer
        )
        encoded = state(prompt=caption, max_sequence_length=512)
        step = AnimaTextConditioningStep().init_pipeline()
        step.update_components(text_conditioner=pipe.text_conditioner, transformer=pipe.transformer)
        return {"text_embedding": step(state=encoded, output="prompt_embeds")}

    def latent(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        config = pipe.vae.config
        raw = pipe.vae.encode(pixels[:, :, None]).latent_dist.mode()
        mean, std = (
            torch.tensor(each).view(1, -1, 1, 1, 1) for each in (config.latents_mean, config.latents_std)
        )
        return ((raw - mean) / std)[:, :, 0]

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Predict each sample alone, with the padding mask of its size in pixels."""
        mask = torch.zeros(1, 1, 8 * noisy.shape[2], 8 * noisy.shape[3])
        predictions = [
            pipe.transformer(
                sample[None, :, None],
                timestep[None] / 1000,
                text[None],
                padding_mask=mask,
            ).sample[:, :, 0]
            for sample, timestep, text in zip(
                noisy, micro.timesteps, micro.conditions["text_embedding"], strict=True
            )
        ]
        return torch.cat(predictions)

    def kohya_keys(self) -> set[str]:
        return {f"lora_unet_{key}".replace(".", "_") for key in originals()}

    def comfyui_keys(self, modules: set[str]) -> set[str]:
        return {f"diffusion_model.{key}" for key in originals()}


def originals() -> set[str]:
    return {f"blocks.{block}.{layer}" for block in (0, 1) for layer in LAYERS.values()}


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(AnimaCase())


def test_original_layer_names_match_diffusers_converter(tmp_path: Path) -> None:
    make_tiny_anima(tmp_path)
    family = load_family(tmp_path)
    linear = torch.nn.Linear
    network = family.denoiser.load("float32", "cpu")
    modules = [name for name, module in network.named_modules() if isinstance(module, linear)]
    assert len(modules) == 38
    ends = ("lora_A.weight", "lora_B.weight")
    original = {f"{family.comfyui_key(each)}.{end}": torch.zeros(1, 1) for each in modules for end in ends}
    read = AnimaModularPipeline.lora_state_dict(original)
    assert set(read) == {f"transformer.{module}.{end}" for module in modules for end in ends}
    with pytest.raises(FamilyError, match=r"transformer_blocks\.0\.other"):
        family.comfyui_key("transformer_blocks.0.other")


@pytest.mark.parametrize("concat_padding_mask", [True, False])
def test_a_padding_mask_of_zeros_is_the_channel_that_diffusers_appends(
    tmp_path: Path, concat_padding_mask: bool
) -> None:
    make_tiny_anima(tmp_path)
    stored = read_json(tmp_path / "transformer" / "config.json")
    torch.manual_seed(2)
    theirs: Any = transformer_cosmos.CosmosTransformer3DModel.from_config(
        {**stored, "concat_padding_mask": concat_padding_mask}
    )
    ours: Any = ImageCosmosTransformer.from_config(theirs.config)
    config = ours.config
    ours.load_state_dict(theirs.state_dict())
    arguments = {
        "hidden_states": torch.randn(2, 16, 1, 8, 12),
        "timestep": torch.tensor([0.2, 0.9]),
        "encoder_hidden_states": torch.randn(2, 512, 16),
        "return_dict": False,
    }
    with torch.no_grad():
        expected = theirs(**arguments, padding_mask=torch.zeros(1, 1, 64, 96))[0]
        assert torch.equal(ours(**arguments)[0], expected)
    assert ours.config == config, "forward leaves the configuration as it was"


def test_the_length_of_captions_is_the_conditioners(tmp_path: Path) -> None:
    make_tiny_anima(tmp_path)
    path = tmp_path / "text_conditioner" / "config.json"
    write_json(path, {**read_json(path), "min_sequence_length": 24})
    family = load_family(tmp_path)
    assert family.text_shapes() == {"text_embedding": (24, 16)}
    encoders = family.text.load("float32", "cpu")
    encoded = family.text.encode_caption(encoders, "cat " * 30)
    assert encoded.tensors["text_embedding"].shape == (24, 16)
    assert encoded.num_cut > 0


def test_a_patch_of_several_frames_is_an_error(tmp_path: Path) -> None:
    make_tiny_anima(tmp_path)
    path = tmp_path / "transformer" / "config.json"
    write_json(path, {**read_json(path), "patch_size": [2, 2, 2]})
    with pytest.raises(FamilyError, match=r"1 frame and a square, got \[2, 2, 2\]"):
        load_family(tmp_path).size_multiple()
