from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from diffusers import QwenImage21Pipeline
from PIL import Image
from transformers import AutoTokenizer, ProcessorMixin

from demo.tiny_models import make_tiny_qwen_image21
from pipeline.images.geometry import Size
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.export.lora_files import read_lora_file
from pipeline.trained_lora.export.metadata import READERS_KEY
from pipeline.trained_lora.worker.loader import MicroInput
from tests.pipeline.models.families.complete_job import TOLERANCE, Case, check_drawing

LAYERS = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]
LAYERS += ["img_mlp.gate_layer", "img_mlp.proj", "img_mlp.out"]
MODULES = [f"transformer_blocks.{block}.{layer}" for block in range(2) for layer in LAYERS]


class TextProcessor(ProcessorMixin):
    """A processor without image processors, which need torchvision; its mark makes it batch one prompt."""

    image_token = "<|image_pad|>"

    def __init__(self, tokenizer: Any = None) -> None:
        super().__init__(tokenizer, chat_template=tokenizer.chat_template)


class QwenImage21Case(Case):
    pipeline_class = QwenImage21Pipeline
    targets: ClassVar[list[str]] = LAYERS

    def __init__(self, *, turbo: bool = False) -> None:
        self.turbo = turbo

    def make(self, folder: Path) -> None:
        make_tiny_qwen_image21(folder, turbo=self.turbo)

    def pipeline(self, folder: Path, **parts: Any) -> Any:
        processor = TextProcessor(AutoTokenizer.from_pretrained(folder / "processor"))
        return super().pipeline(folder, processor=processor, **parts)

    def guidance_arguments(self, scale: float) -> dict[str, Any]:
        return {"true_cfg_scale": scale}

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        embedding, mask, is_image = pipe.encode_prompt(caption)
        assert mask is None
        assert not is_image.any()
        return {"text_embedding": embedding, "text_mask": torch.ones(embedding.shape[:2])}

    def latent(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Encode an opaque picture as the pipeline encodes its condition images."""
        picture = pixels[0].permute(1, 2, 0).add(1).mul(127.5).round().numpy().astype(np.uint8)
        rgba = pipe.image_processor.preprocess(Image.fromarray(picture).convert("RGBA"))
        torch.testing.assert_close(rgba[:, :3], pixels)
        return pipe._encode_vae_image(rgba.unsqueeze(2), generator=None)[:, :, 0]

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Predict each sample alone; one slot of the mask stands for four tokens, which are latent values."""
        channels, height, width = noisy.shape[1:]
        predictions = []
        for index, text in enumerate(micro.conditions["text_embedding"]):
            length = int(micro.conditions["text_mask"][index].sum())
            tokens = pipe.transformer(
                noisy[index].reshape(1, channels, -1).mT,
                text[None, :length],
                micro.timesteps[index : index + 1] / 1000,
                [[(1, height, width)]],
                torch.tensor([[False] * length + [True] * (height * width // 4)]),
            ).sample
            predictions.append(tokens[:, length:].mT.reshape(1, channels, height, width))
        return torch.cat(predictions)

    def kohya_keys(self) -> set[str]:
        return {f"lora_unet_{module.replace('.', '_')}" for module in MODULES}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny_qwen_image21(tmp_path / "base")
    return tmp_path / "base"


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None], tmp_path: Path
) -> None:
    check_family(QwenImage21Case())
    metadata = read_lora_file(tmp_path / "output" / "lora" / "demo_kohya.safetensors").metadata
    assert "name ends in _comfyui" in metadata[READERS_KEY]


def test_previews_of_turbo_are_drawn_at_its_published_noise_levels(tmp_path: Path) -> None:
    case = QwenImage21Case(turbo=True)
    case.make(tmp_path)
    family, pipe = load_family(tmp_path), case.pipeline(tmp_path)
    check_drawing(case, family, pipe)
    assert (pipe.scheduler.timesteps / 1000).tolist() == pytest.approx(pipe.config.sample_sigmas)
    assert len(pipe.config.sample_sigmas) == 8  # also if a preview has another number of steps

    levels = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    timesteps = family.noise.timesteps(family.noise.load_scheduler(), levels, (64, 64, 64))
    torch.testing.assert_close(timesteps, (1000 * levels).float())


def test_training_calls_the_transformer_as_each_step_of_the_pipeline_does(folder: Path) -> None:
    """The pipeline computes keys and values of the caption in its first step only."""
    family, pipe = load_family(folder), QwenImage21Case().pipeline(folder)
    calls: list[tuple[dict[str, Any], torch.Tensor]] = []
    hook = pipe.transformer.register_forward_hook(
        lambda _, __, given, result: calls.append((given, result[0])), with_kwargs=True
    )
    pipe("a cat", height=64, width=96, num_inference_steps=3, generator=torch.Generator().manual_seed(1))
    drawn = calls.copy()
    assert [given["kv_cache_mode"] for given, _ in drawn] == ["extract", "cached", "cached"]

    encoders = family.text.load("float32", "cpu")
    conditions = family.text.stack([family.text.encode_caption(encoders, "a cat").tensors])
    for given, result in drawn:
        calls.clear()
        noisy = given["hidden_states"].mT.reshape(1, 64, 4, 6)
        with torch.no_grad():
            prediction = family.denoiser.predict(
                pipe.transformer, noisy, 1000 * given["timestep"], conditions
            )
        ((ours, _),) = calls
        for name in ours:
            torch.testing.assert_close(ours[name], given[name], rtol=0.0, atol=1e-6)
        assert given.keys() - ours.keys() == {"attention_kwargs", "kv_cache", "kv_cache_mode"}
        torch.testing.assert_close(prediction, result[:, -24:].mT.reshape(1, 64, 4, 6), **TOLERANCE)
    hook.remove()

    levels = torch.linspace(1, 1 / 3, 3, dtype=torch.float64)
    timesteps = family.noise.timesteps(family.noise.load_scheduler(), levels, (64, 4, 6))
    torch.testing.assert_close(timesteps, pipe.scheduler.timesteps)


@pytest.mark.parametrize("extra", [0, 1, 5])
def test_a_caption_is_cut_before_the_end_of_the_template(folder: Path, extra: int) -> None:
    family, pipe = load_family(folder), QwenImage21Case().pipeline(folder)
    encoders = family.text.load("float32", "cpu")
    num_words = 2048 - pipe.encode_prompt("cat")[0].shape[1] + len("cat") + extra  # letters are tokens
    caption = "cat" + " cat" * (num_words - len("cat"))
    encoded = family.text.encode_caption(encoders, caption)
    assert encoded.num_cut == extra
    assert encoded.cut_from == (len(caption) - len(" cat") * extra if extra else None)
    assert encoded.num_tokens == 2048 + pipe._drop_idx + extra
    embedding, *_ = pipe.encode_prompt(caption[: encoded.cut_from])
    torch.testing.assert_close(encoded.tensors["text_embedding"], embedding[0], **TOLERANCE)


def test_a_caption_may_contain_the_mark_of_a_condition_image(folder: Path) -> None:
    """The pipeline's own processor would ask for the image."""
    family = load_family(folder)
    encoded = family.text.encode_caption(family.text.load("float32", "cpu"), "a <|image_pad|> cat")
    assert encoded.tensors["text_embedding"].isfinite().all()


def test_both_edges_of_a_latent_are_even(folder: Path) -> None:
    family = load_family(folder)
    assert family.size_multiple() == 32
    assert family.latent_shape(Size(64, 96)) == (64, 4, 6)


def test_the_tokenizer_alone_encodes_captions_as_the_complete_processor(folder: Path) -> None:
    pytest.importorskip("torchvision")
    from transformers import Qwen3VLProcessor

    processor = Qwen3VLProcessor.from_pretrained(folder / "processor")
    encoders = load_family(folder).text.load("float32", "cpu")
    message: Any = [{"role": "system", "content": [{"type": "text", "text": encoders.sys_prompt}]}]
    options: dict[str, Any] = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
    prompts = [encoders.prompt_template_t2i.format(caption) for caption in ("a cat", "a white cat on a wall")]
    expected, actual = (
        (each.apply_chat_template(message, tokenize=True), each(text=prompts, **options))
        for each in (processor, encoders.processor)
    )
    assert actual[0] == expected[0]
    assert all(torch.equal(actual[1][name], expected[1][name]) for name in ("input_ids", "attention_mask"))
