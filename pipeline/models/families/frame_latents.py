"""Latents of a video's VAE, of one frame: each channel normalised for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from pipeline.models.families.base import Posterior
from pipeline.models.families.language import LanguageTransformer

if TYPE_CHECKING:
    from torch import Tensor, nn


class FrameLatents(LanguageTransformer):
    """A flow transformer, told by a language model, whose VAE takes a picture for a video of one frame."""

    @property
    def latent_channels(self) -> int:
        """The VAE's `z_dim`."""
        return int(self.vae_config["z_dim"])

    def posterior(self, vae: nn.Module, pixels: Tensor) -> Posterior:
        """Of a video of one frame."""
        import torch

        parameter = next(vae.parameters())
        frame = pixels.to(parameter.device, parameter.dtype).unsqueeze(2)
        with torch.inference_mode():
            encoded = cast("Any", vae).encode(frame).latent_dist
            std = torch.exp(0.5 * encoded.logvar.float())
            return Posterior(encoded.mean.float().squeeze(2), std.squeeze(2))

    def normalise(self, raw_latent: Tensor) -> Tensor:
        """Each channel by its own mean and deviation, which the VAE's configuration has."""
        mean, std = self._statistics(raw_latent)
        return (raw_latent - mean) / std

    def denormalise(self, latent: Tensor) -> Tensor:
        """Each channel by the same."""
        mean, std = self._statistics(latent)
        return latent * std + mean

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation (C, 1, 1) of each channel."""
        mean, std = (like.new_tensor(self.vae_config[name]) for name in ("latents_mean", "latents_std"))
        return mean[:, None, None], std[:, None, None]

    def decode(self, vae: nn.Module, latent: Tensor) -> Tensor:
        """Of a video of one frame."""
        import torch

        parameter = next(vae.parameters())
        with torch.inference_mode():
            raw = self.denormalise(latent.float()).to(parameter.device, parameter.dtype)
            return cast("Any", vae).decode(raw.unsqueeze(2), return_dict=False)[0].squeeze(2).float()
