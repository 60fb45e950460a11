"""The limits: networks of diffusers and transformers alone, on tensors on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.gpu.rig import LEARNING_RATE, RANK, Rig
from pipeline.models.worker.loading import component_class

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from pipeline.trained_lora.worker.micro_input import MicroInput


def vae(folder: Path, dtype: str, device: str) -> Any:
    """Return a frozen `AutoencoderKL` whose convolutions are channels last, as fast as it gets."""
    import torch
    from diffusers import AutoencoderKL

    loaded: Any = AutoencoderKL.from_pretrained(folder, torch_dtype=getattr(torch, dtype))
    return loaded.to(device, memory_format=torch.channels_last).requires_grad_(False).eval()


def pixels(network: Any, count: int, resolution: int) -> Tensor:
    """Return random images (count, 3, H, W) in [-1, 1], channels last, on the network's device."""
    import torch

    parameter = next(network.parameters())
    shape = (count, 3, resolution, resolution)
    images = torch.rand(shape, device=parameter.device, dtype=parameter.dtype) * 2 - 1
    return images.contiguous(memory_format=torch.channels_last)


def encode(network: Any, images: Tensor, total: int) -> None:
    """Encode at least `total` images by repeating the batch `images`."""
    import torch

    with torch.inference_mode():
        for _ in range(-(-total // len(images))):
            network.encode(images).latent_dist.mode()


def text_forward(rig: Rig, captions: Sequence[str], device: str) -> Callable[[], None]:
    """Load all text encoders and return a function that encodes one caption at a time."""
    import torch

    family = rig.family
    encoders: list[tuple[Any, list[Tensor]]] = []
    for role in ("text_encoder", "text_encoder_2"):
        kind: Any = component_class(family, role)
        network = kind.from_pretrained(family.model.component(role), dtype=torch.bfloat16).to(device).eval()
        name = role.replace("text_encoder", "tokenizer")
        tokenizer = component_class(family, name).from_pretrained(family.model.component(name))
        limit = 77 if "clip" in family.model.config(role)["model_type"] else family.max_length()
        options = {"padding": "max_length", "truncation": True, "max_length": limit, "return_tensors": "pt"}
        encoders.append((network, [tokenizer(text, **options)["input_ids"].to(device) for text in captions]))

    def forward() -> None:
        with torch.inference_mode():
            for network, each in encoders:
                for ids in each:
                    network(ids)

    return forward


@dataclass(frozen=True)
class BareBatch:
    """Arguments of the denoiser for one step, and its target output."""

    arguments: dict[str, Any]
    target: Tensor


class BareTraining:
    """A minimal training loop: a denoiser with a peft adapter, autocast and AdamW."""

    def __init__(self, rig: Rig, batches: Sequence[MicroInput], device: str) -> None:
        """Load the denoiser, move the batches to the device, and add the noise in advance."""
        import torch
        from peft import LoraConfig

        self._device = device.partition(":")[0]
        kind: Any = component_class(rig.family, rig.family.spec.denoiser_name)
        folder = rig.family.model.component(rig.family.spec.denoiser_name)
        self._denoiser: Any = kind.from_pretrained(folder, torch_dtype=torch.bfloat16).to(device)
        self._denoiser.train().requires_grad_(False)
        targets = rig.family.lora_targets()
        self._denoiser.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets))
        self.weights = [weight for weight in self._denoiser.parameters() if weight.requires_grad]
        for weight in self.weights:
            weight.data = weight.data.float()
        if rig.recipe.training.gradient_checkpointing:
            self._denoiser.enable_gradient_checkpointing()
        self._optimizer = torch.optim.AdamW(self.weights, lr=LEARNING_RATE)
        scheduler = rig.family.noise.load_scheduler()
        bare = _sdxl_batch if rig.model.name == "SDXL" else _flux_batch
        self._batches = [bare(scheduler, batch.to(torch.device(device))) for batch in batches]

    def steps(self) -> None:
        """Train one step on each batch."""
        import torch
        from torch.nn.functional import mse_loss

        for batch in self._batches:
            with torch.autocast(self._device, torch.bfloat16):
                answer = self._denoiser(**batch.arguments, return_dict=False)[0]
            mse_loss(answer.float(), batch.target).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()


def _sdxl_batch(scheduler: Any, batch: MicroInput) -> BareBatch:
    import torch

    conditions = batch.conditions
    sizes = [conditions[name] for name in ("original_size_hw", "crop_top_left", "target_size_hw")]
    arguments = {
        "sample": scheduler.add_noise(batch.latent, batch.noise, batch.timesteps),
        "timestep": batch.timesteps,
        "encoder_hidden_states": conditions["text_embedding"],
        "added_cond_kwargs": {
            "text_embeds": conditions["pooled_text_embedding"],
            "time_ids": torch.cat(sizes, dim=1).float(),
        },
    }
    return BareBatch(arguments, batch.noise)


def _flux_batch(scheduler: Any, batch: MicroInput) -> BareBatch:
    import torch
    from diffusers import FluxPipeline

    pipeline: Any = FluxPipeline
    sigma = (batch.timesteps / scheduler.config.num_train_timesteps)[:, None, None, None]
    conditions, device = batch.conditions, batch.latent.device
    size, channels, height, width = batch.latent.shape

    def packed(latent: Tensor) -> Tensor:
        return pipeline._pack_latents(latent, size, channels, height, width)

    arguments = {
        "hidden_states": packed((1 - sigma) * batch.latent + sigma * batch.noise),
        "timestep": sigma.flatten(),
        "guidance": torch.ones(size, device=device),
        "pooled_projections": conditions["pooled_text_embedding"],
        "encoder_hidden_states": conditions["text_embedding"],
        "txt_ids": torch.zeros(conditions["text_embedding"].shape[1], 3, device=device),
        "img_ids": pipeline._prepare_latent_image_ids(size, height // 2, width // 2, device, torch.float32),
    }
    return BareBatch(arguments, packed(batch.noise - batch.latent))
