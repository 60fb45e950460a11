from __future__ import annotations

import pytest
import torch

from pipeline.recipe import LossSettings
from pipeline.trained_lora.worker.loss import sample_losses, share_of_mean, snr_weights


def test_each_sample_s_loss_is_its_mean_in_float32() -> None:
    prediction, target = torch.randn(3, 4, 5, 6), torch.randn(3, 4, 5, 6)
    losses = sample_losses(prediction, target, LossSettings())
    expected = torch.stack([((p - t) ** 2).mean() for p, t in zip(prediction, target, strict=True)])
    torch.testing.assert_close(losses, expected)
    assert sample_losses(prediction.bfloat16(), target, LossSettings()).dtype == torch.float32


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


def test_huber_and_smooth_l1_are_squared_below_delta_and_linear_above() -> None:
    target = torch.zeros(4, 1, 1, 1)
    errors = torch.tensor([0.0, 0.05, -0.2, 1.0])
    delta = 0.1
    huber = [0.0, 0.5 * 0.05**2, delta * (0.2 - delta / 2), delta * (1.0 - delta / 2)]
    losses = sample_losses(errors.view(4, 1, 1, 1), target, LossSettings(kind="huber", delta=delta))
    torch.testing.assert_close(losses, torch.tensor(huber))
    smooth = sample_losses(errors.view(4, 1, 1, 1), target, LossSettings(kind="smooth_l1", delta=delta))
    torch.testing.assert_close(smooth, torch.tensor(huber) / delta)


SNR = torch.tensor([0.01, 0.5, 1.0, 5.0, 50.0, 2000.0], dtype=torch.float64)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_weightings_follow_the_papers(prediction: str) -> None:
    for gamma in (1.0, 5.0):
        hard = snr_weights(SNR, LossSettings(weighting="min_snr", gamma=gamma), prediction)
        soft = snr_weights(SNR, LossSettings(weighting="soft_min_snr", gamma=gamma), prediction)
        for index, snr in enumerate(SNR.tolist()):
            if prediction == "epsilon":
                assert float(hard[index]) == pytest.approx(min(1.0, gamma / snr))
                assert float(soft[index]) == pytest.approx(gamma / (snr + gamma))
            else:
                assert float(hard[index]) == pytest.approx(min(snr, gamma) / (snr + 1))
                assert float(soft[index]) == pytest.approx(1 / (1 / snr + 1 / gamma) / (snr + 1))
    debiased = snr_weights(SNR, LossSettings(weighting="debiased"), prediction)
    for weight, snr in zip(debiased.tolist(), SNR.clamp(max=1000).tolist(), strict=True):
        expected = snr**-0.5 if prediction == "epsilon" else snr**0.5 / (snr + 1)
        assert weight == pytest.approx(expected)


def test_an_error_has_the_same_weight_for_every_prediction_type() -> None:
    """The velocity's error is (SNR + 1) / SNR times the noise's, so its weight is divided by that factor."""
    for weighting in ("min_snr", "soft_min_snr", "debiased"):
        settings = LossSettings(weighting=weighting)
        noise, velocity = snr_weights(SNR, settings, "epsilon"), snr_weights(SNR, settings, "v_prediction")
        snr = SNR.clamp(max=1000) if weighting == "debiased" else SNR
        torch.testing.assert_close(noise, (velocity * (snr + 1) / snr).float())


def test_without_a_weighting_all_weights_are_one() -> None:
    assert snr_weights(SNR, LossSettings(), "epsilon").tolist() == [1.0] * 6
