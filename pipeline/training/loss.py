"""What the denoiser is asked for, and how far it was from it.

B is the number of samples, C, H, W those of the latent.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import mse_loss


def sample_losses(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of each sample.

    Args:
        prediction: (B, C, H, W), any float dtype.
        target: Like it.

    Returns:
        Float32 (B,): each the mean over C, H and W, computed in float32.
    """
    errors = mse_loss(prediction.float(), target.float(), reduction="none")
    return errors.flatten(start_dim=1).mean(dim=1)


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
