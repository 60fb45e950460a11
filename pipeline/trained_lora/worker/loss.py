"""What the denoiser is asked for, and how far it was from it.

B is the number of samples, C, H, W those of the latent. The ratio of signal to noise (SNR) is that of the
variances in a noisy latent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import huber_loss, mse_loss, smooth_l1_loss

if TYPE_CHECKING:
    from pipeline.models.families import Prediction
    from pipeline.recipe import LossSettings

MAX_SNR = 1000.0
"""Of `debiased`: hardly noisy timesteps, whose weight would vanish, count as this one."""


def sample_losses(prediction: Tensor, target: Tensor, settings: LossSettings) -> Tensor:
    """The error of each sample, not weighted.

    Mean squared error; or PyTorch's `huber_loss` (Huber 1964) or `smooth_l1_loss`
    (https://arxiv.org/abs/1504.08083), which is Huber's divided by delta.

    Args:
        prediction: (B, C, H, W), any float dtype.
        target: Like it.
        settings: `kind` and `delta`.

    Returns:
        Float32 (B,): each the mean over C, H and W, computed in float32.
    """
    answer, wanted = prediction.float(), target.float()
    if settings.kind == "huber":
        errors = huber_loss(answer, wanted, reduction="none", delta=settings.delta)
    elif settings.kind == "smooth_l1":
        errors = smooth_l1_loss(answer, wanted, reduction="none", beta=settings.delta)
    else:
        errors = mse_loss(answer, wanted, reduction="none")
    return errors.flatten(start_dim=1).mean(dim=1)


def snr_weights(snr: Tensor, settings: LossSettings, prediction: Prediction) -> Tensor:
    """How much each sample's error counts for its noise level.

    Each weighting is a function w of the SNR on the error of the clean latent; an error of the noise is SNR
    times as large, and one of the velocity SNR + 1 times, so that w is divided by that:

        min_snr       w = min(SNR, gamma)                (https://arxiv.org/abs/2303.09556)
        soft_min_snr  w = SNR gamma / (SNR + gamma)      (https://arxiv.org/abs/2401.11605)
        debiased      w = sqrt(SNR), SNR at most 1000    (https://arxiv.org/abs/2310.08442)

    Args:
        snr: (B,), at least 0.
        settings: `weighting` and `gamma`.
        prediction: What the denoiser predicts: "epsilon" or "v_prediction".

    Returns:
        Float32 (B,); ones without a weighting.
    """
    if settings.weighting == "none":
        return torch.ones_like(snr, dtype=torch.float32)
    gamma = settings.gamma
    if settings.weighting == "min_snr":
        on_latent = snr.clamp(max=gamma)
    elif settings.weighting == "soft_min_snr":
        on_latent = snr * gamma / (snr + gamma)
    else:
        snr = snr.clamp(max=MAX_SNR)
        on_latent = snr.sqrt()
    return (on_latent / (snr if prediction == "epsilon" else snr + 1.0)).float()


def share_of_mean(losses: Tensor, weights: Tensor, *, num_samples: int, num_processes: int) -> Tensor:
    """This share's part of the mean loss over a step's global batch.

    Samples are weighed, not batches: summed over micro-batches and averaged over processes, as accumulation
    and DDP do with the gradients, the parts are sum(weights * losses) / num_samples, whatever the sizes of
    the shares.

    Args:
        losses: (B,), of one rank in one micro-step.
        weights: (B,), 0 for a stand-in.
        num_samples: Slots of weight 1 in the whole step, over all ranks.
        num_processes: Over which the gradients are averaged.

    Returns:
        A scalar to call backward on.
    """
    return (losses * weights).sum() * (num_processes / num_samples)
