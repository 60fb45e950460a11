from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import Ideogram4Pipeline
from diffusers.pipelines.ideogram4.pipeline_ideogram4 import _logit_normal_sigmas, _resolution_aware_mu

from demo.tiny_models import make_tiny_ideogram4
from pipeline.models.families import Layer
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.models.families.case import Case

ORIGINAL = ("attention.qkv", "attention.o", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
LAYERS = tuple(f"attention.{end}" for end in ("to_q", "to_k", "to_v", "to_out.0")) + ORIGINAL[2:]


class Ideogram4Case(Case):
    pipeline_class = Ideogram4Pipeline
    targets: ClassVar[list[str]] = list(LAYERS)
    drawing: ClassVar[dict[str, Any]] = {
        "guidance_scale": 3.0,
        "guidance_schedule": None,
        "max_sequence_length": 128,
    }

    def make(self, folder: Path) -> None:
        make_tiny_ideogram4(folder)

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        """Return the states with the role of text; padding precedes them."""
        states, _, _, roles = pipe.encode_prompt(caption, 2, 3, 256, "cpu")
        text_states = states[:, roles[0] == 3]
        assert 0 < text_states.shape[1] < 256
        return {"text_embedding": text_states, "text_mask": torch.ones(text_states.shape[:2])}

    def latent(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Return the latent that the end of the pipeline converts back; a patch is (row, column, channel)."""
        raw = pipe.vae.encode(pixels).latent_dist.mean
        inner = [raw[:, :, row::2, column::2] for row in (0, 1) for column in (0, 1)]
        deviation = (pipe.vae.bn.running_var + pipe.vae.config.batch_norm_eps).sqrt()[:, None, None]
        return (torch.cat(inner, dim=1) - pipe.vae.bn.running_mean[:, None, None]) / deviation

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Predict each sample alone, without padding; positions of the image start at 65536."""
        rows, columns = noisy.shape[2:]
        places = [[0, row, column] for row in range(rows) for column in range(columns)]
        predictions = []
        for index, text in enumerate(micro.conditions["text_embedding"]):
            length = int(micro.conditions["text_mask"][index].sum())
            tokens = noisy[index].flatten(1).T
            positions = torch.tensor(
                [[at] * 3 for at in range(length)] + [[65536 + i for i in p] for p in places]
            )
            prediction = pipe.transformer(
                torch.cat([torch.zeros(length, tokens.shape[1]), tokens])[None],
                1 - micro.timesteps[index : index + 1] / 1000,
                torch.cat([text[:length], torch.zeros(len(places), text.shape[1])])[None],
                positions[None],
                torch.ones(1, len(positions), dtype=torch.int64),
                torch.tensor([[3] * length + [2] * len(places)]),
            ).sample
            predictions.append(-prediction[0, length:].T.reshape(noisy.shape[1:]))
        return torch.stack(predictions)

    def kohya_keys(self) -> set[str]:
        return {f"lora_unet_{key}".replace(".", "_") for key in originals()}

    def comfyui_keys(self, modules: set[str]) -> set[str]:
        return self.kohya_keys()


def originals() -> set[str]:
    return {f"layers.{block}.{layer}" for block in range(2) for layer in ORIGINAL}


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(Ideogram4Case())


def test_original_layer_names_match_diffusers_converter(tmp_path: Path) -> None:
    make_tiny_ideogram4(tmp_path)
    family = load_family(tmp_path)
    for path in originals():
        weights = {"lora_A.weight": torch.zeros(1, 1), "lora_B.weight": torch.arange(3.0)[:, None]}
        read = Ideogram4Pipeline.lora_state_dict(
            {f"diffusion_model.{path}.{end}": each for end, each in weights.items()}
        )
        ups = {key.removeprefix("transformer."): up for key, up in read.items() if "lora_B" in key}
        in_order = sorted(ups, key=lambda key: float(ups[key][0]))  # their rows in the layer
        modules = tuple(key.removesuffix(".lora_B.weight") for key in in_order)
        expected = Layer("lora_unet_" + path.replace(".", "_"), modules)
        assert [family.kohya_layer(module) for module in modules] == [expected] * len(modules)
        assert len(modules) == (3 if path.endswith("qkv") else 1)


def test_noise_levels_have_the_density_of_the_pipelines_steps(tmp_path: Path) -> None:
    make_tiny_ideogram4(tmp_path)
    family = load_family(tmp_path)
    shares = torch.linspace(0, 1, 9, dtype=torch.float64)[1:].flip(0)
    levels = torch.sigmoid(torch.special.ndtri(shares))  # at equal shares of a logit-normal density
    for height, width in ((512, 512), (1024, 2048), (64, 96)):
        expected = _logit_normal_sigmas(8, _resolution_aware_mu(height, width, 0.0), std=1.5)
        actual = family.noise.timesteps(
            family.noise.load_scheduler(), levels, (32, height // 16, width // 16)
        )
        torch.testing.assert_close(actual, 1000 * expected, rtol=0, atol=1e-3)


def test_a_caption_that_the_pipeline_rejects_is_cut_and_the_template_is_kept(tmp_path: Path) -> None:
    make_tiny_ideogram4(tmp_path)
    family = load_family(tmp_path)
    encoders = family.text.load("float32", "cpu")
    around = family.text.encode_caption(encoders, "").num_tokens
    fits = "a" + " cat" * (2048 - around - 1)
    encoded = family.text.encode_caption(encoders, fits)
    assert (encoded.num_tokens, encoded.num_cut, encoded.cut_from) == (2048, 0, None)
    longer = family.text.encode_caption(encoders, fits + " cup cup")
    assert (longer.num_tokens, longer.num_cut, longer.cut_from) == (2050, 2, len(fits))
    assert torch.equal(longer.tensors["text_embedding"], encoded.tensors["text_embedding"])
