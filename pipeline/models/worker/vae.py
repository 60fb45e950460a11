"""VAE codecs: pixels to latents and back.

To support another VAE: write its codec here, declare the shape of its latents and the codec's name in
`pipeline.models.families.parts.vae`, and use both in the `latents` and `components` of a family.

Letters of shapes: B samples, C latent channels, h and w latent edges, H and W pixel edges.

    pixels --posterior--> raw latent --normalise--> latent --decode--> pixels
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from pipeline.errors import ModelError
from pipeline.models.diffusers_folder import weight_files
from pipeline.models.families import Family
from pipeline.models.families.parts.vae import ChannelScaledLatents, PatchedLatents
from pipeline.models.worker.loading import load_component

# `scaling_factor` of `AutoencoderKL` if its configuration has none.
_DEFAULT_SCALE = 0.18215


@dataclass(frozen=True)
class Posterior:
    """The VAE's output: a diagonal Gaussian over raw latents, both float32 of shape (B, C, h, w)."""

    mean: Tensor
    std: Tensor


class VaeCodec(ABC):
    """The VAE of a base model; `load` loads it."""

    def __init__(self, family: Family) -> None:
        self.family = family

    @property
    def config(self) -> dict[str, Any]:
        """Configuration of the VAE."""
        return self.family.model.config("vae")

    def load(self, dtype: str, device: str) -> nn.Module:
        """Return the VAE, frozen and in evaluation mode, with its convolutions in channels-last order."""
        return channels_last(load_component(self.family, "vae", dtype, device))

    def posterior(self, vae: nn.Module, pixels: Tensor) -> Posterior:
        """Return the raw latents of pixels, a float tensor (B, 3, H, W) in [-1, 1] on any device."""
        parameter = next(vae.parameters())
        with torch.inference_mode():
            pixels = pixels.to(parameter.device, parameter.dtype, memory_format=torch.channels_last)
            return self._encode(cast("Any", vae), pixels)

    def decode(self, vae: nn.Module, latent: Tensor) -> Tensor:
        """Return the pixels of a normalised latent, as at the end of the family's diffusers pipeline.

        The result is a float32 tensor (B, 3, H, W) on the VAE's device, about -1 to 1 and not clamped.
        """
        parameter = next(vae.parameters())
        with torch.inference_mode():
            # Statistics are applied in float32, because the VAE may compute in half precision.
            raw_latent = self.denormalise(latent.float()).to(parameter.device, parameter.dtype)
            return self._decode(cast("Any", vae), raw_latent).float()

    @abstractmethod
    def normalise(self, raw_latent: Tensor) -> Tensor:
        """Return the latent of `raw_latent` (B, C, h, w), of about unit variance; an affine function."""

    @abstractmethod
    def denormalise(self, latent: Tensor) -> Tensor:
        """Return the raw latent (B, C, h, w); the inverse of `normalise`."""

    def _encode(self, vae: Any, pixels: Tensor) -> Posterior:
        encoded = vae.encode(pixels).latent_dist
        return Posterior(encoded.mean.float(), torch.exp(0.5 * encoded.logvar.float()))

    def _decode(self, vae: Any, raw_latent: Tensor) -> Tensor:
        return vae.decode(raw_latent, return_dict=False)[0]


def channels_last(vae: nn.Module) -> nn.Module:
    """Store the weights of convolutions channels last, in place, and return the network."""
    # Convolutions then compute in this order, which is about 1.5 times as fast on a CPU. Results differ by
    # rounding.
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for weight in vae.parameters():
        if weight.dim() in formats:
            weight.data = weight.data.contiguous(memory_format=formats[weight.dim()])
    return vae


class KLCodec(VaeCodec):
    """`AutoencoderKL`: (raw_latent - shift) * scale."""

    @property
    def _shift(self) -> float:
        return float(self.config.get("shift_factor") or 0.0) if self.family.spec.latents.uses_shift else 0.0

    @property
    def _scale(self) -> float:
        return float(self.config.get("scaling_factor", _DEFAULT_SCALE))

    def normalise(self, raw_latent: Tensor) -> Tensor:
        return (raw_latent - self._shift) * self._scale if self._shift else raw_latent * self._scale

    def denormalise(self, latent: Tensor) -> Tensor:
        return latent / self._scale + self._shift


class ChannelScaledCodec(KLCodec):
    """`AutoencoderKL` with statistics if its configuration has them: (raw_latent - mean) * scale / std."""

    @property
    def _statistics(self) -> tuple[list[float], list[float]] | None:
        latents = cast("ChannelScaledLatents", self.family.spec.latents)
        return latents.statistics(self.family.model)

    def normalise(self, raw_latent: Tensor) -> Tensor:
        if self._statistics is None:
            return super().normalise(raw_latent)
        mean, std = (raw_latent.new_tensor(values)[:, None, None] for values in self._statistics)
        return super().normalise(raw_latent - mean) / std

    def denormalise(self, latent: Tensor) -> Tensor:
        if self._statistics is None:
            return super().denormalise(latent)
        mean, std = (latent.new_tensor(values)[:, None, None] for values in self._statistics)
        return super().denormalise(latent * std) + mean


class DeepCompressionCodec(KLCodec):
    """`AutoencoderDC`, which is deterministic: the posterior's standard deviation is 0."""

    def _encode(self, vae: Any, pixels: Tensor) -> Posterior:
        latent = vae.encode(pixels).latent.float()
        return Posterior(latent, torch.zeros_like(latent))


class FrameCodec(VaeCodec):
    """A video model's VAE, which encodes an image as a video of one frame: (raw_latent - mean) / std."""

    def normalise(self, raw_latent: Tensor) -> Tensor:
        mean, std = self._statistics(raw_latent)
        return (raw_latent - mean) / std

    def denormalise(self, latent: Tensor) -> Tensor:
        mean, std = self._statistics(latent)
        return latent * std + mean

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = (like.new_tensor(self.config[name]) for name in ("latents_mean", "latents_std"))
        return mean[:, None, None], std[:, None, None]

    def _encode(self, vae: Any, pixels: Tensor) -> Posterior:
        posterior = super()._encode(vae, pixels.unsqueeze(2))
        return Posterior(posterior.mean.squeeze(2), posterior.std.squeeze(2))

    def _decode(self, vae: Any, raw_latent: Tensor) -> Tensor:
        return super()._decode(vae, raw_latent.unsqueeze(2)).squeeze(2)


class PatchedCodec(VaeCodec):
    """`AutoencoderKLFlux2`: latents in patches (B, 4 C, h / 2, w / 2), each value of a patch normalised."""

    @property
    def _latents(self) -> PatchedLatents:
        return cast("PatchedLatents", self.family.spec.latents)

    @cached_property
    def _running_statistics(self) -> dict[str, Tensor]:
        # Mean and variance are running statistics of the VAE's batch norm, which are among its weights.
        names = {"bn.running_mean", "bn.running_var"}
        statistics: dict[str, Tensor] = {}
        folder = self.family.model.component("vae")
        for path in weight_files(folder):
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt") as file:
                    statistics |= {name: file.get_tensor(name).float() for name in names & set(file.keys())}
        if len(statistics) != len(names):
            raise ModelError(
                "the VAE lacks the running mean and variance that latents are normalised with",
                where=str(folder),
                fix="download the model again, with its VAE as safetensors",
            )
        return statistics

    def _mean_and_std(self, device: torch.device) -> tuple[Tensor, Tensor]:
        floor = self._latents.variance_floor
        if floor is None:
            floor = float(self.config["batch_norm_eps"])
        mean = self._running_statistics["bn.running_mean"]
        std = torch.sqrt(self._running_statistics["bn.running_var"] + floor)
        return mean.to(device)[:, None, None], std.to(device)[:, None, None]

    def normalise(self, raw_latent: Tensor) -> Tensor:
        patches = self._to_patches(raw_latent)
        mean, std = self._mean_and_std(patches.device)
        return (patches - mean) / std

    def denormalise(self, latent: Tensor) -> Tensor:
        mean, std = self._mean_and_std(latent.device)
        return self._from_patches(latent * std + mean)

    def _to_patches(self, raw_latent: Tensor) -> Tensor:
        edge = self._latents.patch_of(self.family.model)
        if not self._latents.channels_last:
            return pixel_unshuffle(raw_latent, edge)
        batch, channels, height, width = raw_latent.shape

        # pixel_unshuffle puts the channel first; Ideogram's transformer has the position first.
        grid = raw_latent.view(batch, channels, height // edge, edge, width // edge, edge)
        return grid.permute(0, 3, 5, 1, 2, 4).reshape(batch, -1, height // edge, width // edge)

    def _from_patches(self, patches: Tensor) -> Tensor:
        edge = self._latents.patch_of(self.family.model)
        if not self._latents.channels_last:
            return pixel_shuffle(patches, edge)
        batch, _, height, width = patches.shape
        grid = patches.view(batch, edge, edge, -1, height, width)
        return grid.permute(0, 3, 4, 1, 5, 2).reshape(batch, -1, height * edge, width * edge)
