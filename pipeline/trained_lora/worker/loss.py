"""The training loss: error per sample, weighting by noise level, and each share's part of the mean.

B is the number of samples; C, H and W are the latent's dimensions. The signal-to-noise ratio (SNR) of a noisy
latent is the ratio of the variances of its signal and its noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import huber_loss, mse_loss, smooth_l1_loss

from pipeline.errors import TrainingError

if TYPE_CHECKING:
    from pipeline.models.families import Prediction
    from pipeline.recipe import LossSettings, MaskSettings

MAX_SNR = 1000.0
"""Largest SNR of the `debiased` weighting, so that nearly clean timesteps keep some weight."""

MAX_SKIPPED_STEPS = 20
"""Maximum number of consecutive steps that fp16's loss scaling may skip before the run stops.

Each skipped step halves the scale; a few skips at the start of a run are normal.
"""

MAX_NAMED_SAMPLES = 20
"""Maximum number of samples listed in an error."""


def sample_losses(
    prediction: Tensor, target: Tensor, settings: LossSettings, place_weights: Tensor | None = None
) -> Tensor:
    """Return the error of each sample, float32 (B,), not yet weighted by noise level.

    The error is mean squared error, or PyTorch's `huber_loss` (Huber 1964) or `smooth_l1_loss`
    (https://arxiv.org/abs/1504.08083), which is Huber's divided by delta, each as the mean over C, H and W.

    `prediction` and `target` are (B, C, H, W) of any float dtype. `place_weights`, float32 (B, 1, H, W), are
    weights of the error by place; None for ones.
    """
    # In half precision the mean over tens of thousands of values would lose digits.
    prediction, target = prediction.float(), target.float()
    if settings.kind == "huber":
        errors = huber_loss(prediction, target, reduction="none", delta=settings.delta)
    elif settings.kind == "smooth_l1":
        errors = smooth_l1_loss(prediction, target, reduction="none", beta=settings.delta)
    else:
        errors = mse_loss(prediction, target, reduction="none")
    if place_weights is not None:
        errors = errors * place_weights
    return errors.flatten(start_dim=1).mean(dim=1)


def mask_loss_weights(mask: Tensor, settings: MaskSettings) -> Tensor:
    """Return the weights of the loss by place.

    A weight is the value of the mask, float32 (1, H, W) from 0 to 1, but at least `unmasked_weight`.
    """
    weights = mask.clamp(min=settings.unmasked_weight)

    # The loss is then sum(w e) / sum(w), the weighted mean of the errors.
    return weights / weights.mean() if settings.normalise else weights


def mask_prior_weights(mask: Tensor, settings: MaskSettings) -> Tensor:
    """Return the weights by place of the distance from the base model's prediction.

    They are `prior_weight` times one minus the mask's value, which is at least `unmasked_weight`.
    """
    outside = 1.0 - mask.clamp(min=settings.unmasked_weight)

    # A white mask has nothing outside, and a mean of zero.
    if settings.normalise and bool(outside.any()):
        outside = outside / outside.mean()
    return settings.prior_weight * outside


def snr_weights(snr: Tensor, settings: LossSettings, prediction: Prediction) -> Tensor:
    """Return each sample's weight for its noise level, float32 (B,); ones without a weighting.

    A weighting is a function w of the SNR, which is at least 0:

        min_snr       w = min(SNR, gamma)                (https://arxiv.org/abs/2303.09556)
        soft_min_snr  w = SNR gamma / (SNR + gamma)      (https://arxiv.org/abs/2401.11605)
        debiased      w = sqrt(SNR), SNR at most 1000    (https://arxiv.org/abs/2310.08442)
    """
    if settings.weighting == "none":
        return torch.ones_like(snr, dtype=torch.float32)

    gamma = settings.gamma
    if settings.weighting == "min_snr":
        latent_weights = snr.clamp(max=gamma)
    elif settings.weighting == "soft_min_snr":
        latent_weights = snr * gamma / (snr + gamma)
    else:
        snr = snr.clamp(max=MAX_SNR)
        latent_weights = snr.sqrt()

    # w weights the error of the predicted clean latent. The error of the predicted noise is SNR times as
    # large, and the error of the velocity SNR + 1 times.
    return (latent_weights / (snr if prediction == "epsilon" else snr + 1.0)).float()


def share_of_mean(losses: Tensor, weights: Tensor, *, num_samples: int, num_processes: int) -> Tensor:
    """Return this share's part of the mean loss over a step's global batch, a scalar to call `backward` on.

    `losses` and `weights` are (B,), of one rank in one micro-batch; a placeholder has weight 0. `num_samples`
    counts the slots of weight 1 over all ranks, and gradients are averaged over `num_processes`.
    """
    # Gradient accumulation sums over micro-batches and DDP averages over processes. The parts then add up to
    # sum(weights * losses) / num_samples: every sample counts the same, whatever the sizes of the shares.
    return (losses * weights).sum() * (num_processes / num_samples)


def not_finite_error(quantity: str, step: int, value: float, samples: list[str]) -> TrainingError:
    """Return the error for a loss or gradient that is not finite, with the samples of the step."""
    listed = "\n".join(samples[:MAX_NAMED_SAMPLES])
    more = f"\nand {len(samples) - MAX_NAMED_SAMPLES} more" if len(samples) > MAX_NAMED_SAMPLES else ""
    return TrainingError(
        f"the {quantity} of step {step} must be finite, got {value}",
        where=f"samples:\n{listed}{more}",
        fix=(
            "lower training.learning_rate, set accelerate.mixed_precision to bf16 or no, or check these "
            "images; the weights before this step are kept"
        ),
    )


def skipped_steps_error(last_step: int) -> TrainingError:
    """Return the error for `MAX_SKIPPED_STEPS` consecutive steps that fp16's loss scaling skipped."""
    return TrainingError(
        f"fp16 loss scaling skipped the last {MAX_SKIPPED_STEPS} steps, up to step {last_step}: their "
        "gradients were not finite",
        where="accelerate.mixed_precision: fp16",
        fix="set accelerate.mixed_precision to bf16 or no, or lower training.learning_rate",
    )
