"""Latents of `AutoencoderKLFlux2`: 32 channels in patches, whose values are normalised each for itself."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipeline.errors import ModelError
from pipeline.images.geometry import Size
from pipeline.models.diffusers_folder import weight_files
from pipeline.models.families.language import LanguageTransformer

if TYPE_CHECKING:
    from torch import Tensor

_PATCH = 2


class Flux2Latents(LanguageTransformer):
    """A flow transformer, told by a language model, whose tokens are the values of a patched latent."""

    latent_method = "autoencoder-kl-flux2 patched normalised, 1"

    def size_multiple(self) -> int:
        """The VAE's factor times the edge of what becomes one value: 16."""
        return self.factor * _PATCH

    def latent_shape(self, target: Size) -> tuple[int, int, int]:
        """(4 C, h / 2, w / 2): a latent is stored in patches."""
        channels, height, width = super().latent_shape(target)
        return channels * _PATCH**2, height // _PATCH, width // _PATCH

    def num_tokens(self, latent_shape: tuple[int, int, int]) -> int:
        """One a value of the patched latent."""
        return latent_shape[1] * latent_shape[2]

    @property
    def variance_floor(self) -> float:
        """Added to each variance before its root is taken."""
        return float(self.vae_config["batch_norm_eps"])

    @cached_property
    def _statistics(self) -> dict[str, Tensor]:
        """Running mean and variance of the VAE's batch norm, which are weights of it."""
        from safetensors import safe_open

        found: dict[str, Tensor] = {}
        for path in weight_files(self.place("vae")):
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt") as file:
                    names = {"bn.running_mean", "bn.running_var"} & set(file.keys())
                    found |= {name: file.get_tensor(name).float() for name in names}
        if len(found) != len(("mean", "variance")):
            fix = "download the model again, with its VAE as safetensors"
            what = "the VAE has no running mean and variance, by which latents are normalised"
            raise ModelError(what, where=str(self.place("vae")), fix=fix)
        return found

    def normalise(self, raw_latent: Tensor) -> Tensor:
        """The latent in patches (B, 4 C, h / 2, w / 2), each of their values by its mean and deviation."""
        from torch.nn.functional import pixel_unshuffle

        patches = pixel_unshuffle(raw_latent, _PATCH)
        mean, std = self.mean_and_deviation(patches.device)
        return (patches - mean) / std

    def denormalise(self, latent: Tensor) -> Tensor:
        """The raw latent (B, C, h, w), out of patches."""
        from torch.nn.functional import pixel_shuffle

        mean, std = self.mean_and_deviation(latent.device)
        return pixel_shuffle(latent * std + mean, _PATCH)

    def mean_and_deviation(self, device: Any) -> tuple[Tensor, Tensor]:
        """Of each value of a patch, (4 C, 1, 1)."""
        import torch

        variance = self._statistics["bn.running_var"] + self.variance_floor
        both = self._statistics["bn.running_mean"], torch.sqrt(variance)
        mean, std = (each.to(device)[:, None, None] for each in both)
        return mean, std
