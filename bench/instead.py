"""The alternative to Latentline: the text-to-image LoRA loop from the diffusers documentation.

The loop scales images by the shorter edge and crops them to a centre square. The VAE and text encoder run
in the training process. The scheduler adds the noise, and AdamW trains the UNet's LoRA. Nothing is cached
on disk: the loop either encodes each batch when it is needed or encodes everything once into memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.utils.state_dict_utils import convert_state_dict_to_diffusers
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image
from torch.nn.functional import mse_loss
from transformers import CLIPTextModel, CLIPTokenizer

from bench.measure import timed

Batch = tuple[torch.Tensor, torch.Tensor]
"""Latents (B, C, h, w) and text embeddings (B, T, D)."""


@dataclass(frozen=True)
class LoopSettings:
    """Settings of the training.

    Attributes:
        resolution: Edge of the square images, in pixels.
        batch_size: Number of samples per step.
        epochs: Number of passes over the samples.
        learning_rate: Learning rate of AdamW.
        rank: Rank and alpha of the LoRA.
        targets: Name suffixes of the UNet modules that get an adapter.
    """

    resolution: int
    batch_size: int
    epochs: int
    learning_rate: float
    rank: int
    targets: Sequence[str]


class DiffusersLoop:
    """The loop with its models loaded. Each call of `seconds` trains a new LoRA."""

    def __init__(self, base: Path, paths: Sequence[Path], settings: LoopSettings) -> None:
        """Load the models. Images are read during training."""
        self._base = base
        self._paths = list(paths)
        self._settings = settings
        self.vae: Any = _frozen(AutoencoderKL, base / "vae")
        self._text: Any = _frozen(CLIPTextModel, base / "text_encoder")
        self._tokenizer: Any = CLIPTokenizer.from_pretrained(base / "tokenizer")
        self._scheduler: Any = DDPMScheduler.from_pretrained(base / "scheduler")

    def seconds(self, *, in_memory: bool) -> float:
        """Train a LoRA and return the seconds, excluding model loading.

        Args:
            in_memory: Encode everything once before the first step instead of encoding each batch.
        """
        torch.manual_seed(0)
        unet: Any = _frozen(UNet2DConditionModel, self._base / "unet")
        rank, targets = self._settings.rank, list(self._settings.targets)
        unet.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=targets))
        weights = [weight for weight in unet.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=self._settings.learning_rate)

        def train() -> None:
            memory = {path: self._encoded([path]) for path in self._paths} if in_memory else None
            for _ in range(self._settings.epochs):
                order = [self._paths[index] for index in torch.randperm(len(self._paths)).tolist()]
                for start in range(0, len(order), self._settings.batch_size):
                    chosen = order[start : start + self._settings.batch_size]
                    self._step(unet, optimizer, self._batch(chosen, memory))
            self._save(unet)

        return timed(train)()

    def _batch(self, paths: list[Path], memory: dict[Path, Batch] | None) -> Batch:
        if memory is None:
            return self._encoded(paths)
        latents, embeddings = zip(*(memory[path] for path in paths), strict=True)
        return torch.cat(latents), torch.cat(embeddings)

    @torch.no_grad()
    def _encoded(self, paths: list[Path]) -> Batch:
        pixels = torch.stack([centre_square(path, self._settings.resolution) for path in paths])
        latents = self.vae.encode(pixels).latent_dist.sample() * self.vae.config.scaling_factor
        captions = [path.with_suffix(".txt").read_text(encoding="utf-8").strip() for path in paths]
        tokens = self._tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt")
        return latents, self._text(tokens.input_ids)[0]

    def _step(self, unet: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        latents, embeddings = batch
        noise = torch.randn_like(latents)
        last = self._scheduler.config.num_train_timesteps
        timesteps = torch.randint(0, last, (len(latents),))
        noisy = self._scheduler.add_noise(latents, noise, timesteps)
        loss = mse_loss(unet(noisy, timesteps, encoder_hidden_states=embeddings).sample, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([w for group in optimizer.param_groups for w in group["params"]], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        # The example logs the loss of each step, which waits for the device.
        loss.item()

    def _save(self, unet: Any) -> None:
        layers = convert_state_dict_to_diffusers(get_peft_model_state_dict(unet))
        with tempfile.TemporaryDirectory() as folder:
            StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=layers)


def centre_square(path: Path, resolution: int) -> torch.Tensor:
    """Return the image's centre square as a float tensor (3, resolution, resolution) in [-1, 1]."""
    with Image.open(path) as image:
        scale = resolution / min(image.size)
        wide, high = (max(resolution, round(edge * scale)) for edge in image.size)
        resized = image.convert("RGB").resize((wide, high), Image.Resampling.BILINEAR)
    left, upper = (wide - resolution) // 2, (high - resolution) // 2
    square = resized.crop((left, upper, left + resolution, upper + resolution))
    return torch.from_numpy(np.array(square)).permute(2, 0, 1).float() / 127.5 - 1


def _frozen(kind: Any, folder: Path) -> Any:
    model = kind.from_pretrained(folder)
    model.requires_grad_(False)
    return model
