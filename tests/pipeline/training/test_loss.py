from __future__ import annotations

import torch

from pipeline.training.loss import sample_losses, share_of_mean


def test_each_sample_s_loss_is_its_own_mean_in_float32() -> None:
    prediction, target = torch.randn(3, 4, 5, 6), torch.randn(3, 4, 5, 6)
    losses = sample_losses(prediction, target)
    expected = torch.stack([((p - t) ** 2).mean() for p, t in zip(prediction, target, strict=True)])
    torch.testing.assert_close(losses, expected)
    assert sample_losses(prediction.bfloat16(), target).dtype == torch.float32


def test_shares_of_any_size_add_up_to_the_mean_over_the_samples() -> None:
    losses = torch.arange(1.0, 8.0)
    weights = torch.tensor([1.0, 1, 1, 1, 1, 0, 0])
    parts = [
        share_of_mean(losses[cut], weights[cut], num_samples=5, num_processes=1)
        for cut in (slice(0, 4), slice(4, 6), slice(6, 7))
    ]
    torch.testing.assert_close(torch.stack(parts).sum(), losses[:5].mean())


def test_the_average_over_processes_is_the_mean_over_the_samples() -> None:
    losses, weights = torch.tensor([1.0, 2.0, 9.0]), torch.ones(3)
    shares = [
        share_of_mean(losses[cut], weights[cut], num_samples=3, num_processes=2)
        for cut in (slice(0, 2), slice(2, 3))
    ]
    torch.testing.assert_close(torch.stack(shares).mean(), losses.mean())
