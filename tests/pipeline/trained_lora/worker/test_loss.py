from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler

from pipeline.images.geometry import Size
from pipeline.images.mask import mask_weights
from pipeline.recipe import LossSettings, MaskSettings
from pipeline.trained_lora.worker.loss import (
    mask_loss_weights,
    mask_prior_weights,
    not_finite_error,
    sample_losses,
    share_of_mean,
    skipped_steps_error,
    snr_weights,
)


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


@pytest.mark.parametrize(
    ("weighting", "prediction", "cleanest", "noisiest"),
    [
        ("min_snr", "epsilon", 5 / 1175.4706, 1.0),
        ("min_snr", "v_prediction", 5 / 1176.4706, 0.0046817 / 1.0046817),
        ("soft_min_snr", "epsilon", 5 / 1180.4706, 5 / 5.0046817),
        (
            "soft_min_snr",
            "v_prediction",
            1175.4706 * 5 / 1180.4706 / 1176.4706,
            0.0046817 * 5 / 5.0046817 / 1.0046817,
        ),
        ("debiased", "epsilon", 1000**-0.5, 14.61506),
        ("debiased", "v_prediction", 1000**0.5 / 1001, 0.0681043),
    ],
)
def test_weights_at_both_ends_of_stable_diffusion_s_schedule(
    weighting: Any, prediction: Any, cleanest: float, noisiest: float
) -> None:
    """The SNR is 1 / 0.00085 - 1 at the first timestep, and 0.0047 at the last one."""
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    signal = scheduler.alphas_cumprod[[0, -1]].double()
    snr = signal / (1 - signal)
    assert snr.tolist() == pytest.approx([1175.4706, 0.0046817], rel=1e-4)
    weights = snr_weights(snr, LossSettings(weighting=weighting), prediction)
    assert weights.tolist() == pytest.approx([cleanest, noisiest], rel=1e-4)


def test_an_error_has_the_same_weight_for_every_prediction_type() -> None:
    """The velocity's error is (SNR + 1) / SNR times the noise's, so its weight is divided by that factor."""
    for weighting in ("min_snr", "soft_min_snr", "debiased"):
        settings = LossSettings(weighting=weighting)
        noise, velocity = snr_weights(SNR, settings, "epsilon"), snr_weights(SNR, settings, "v_prediction")
        snr = SNR.clamp(max=1000) if weighting == "debiased" else SNR
        torch.testing.assert_close(noise, (velocity * (snr + 1) / snr).float())


def test_without_a_weighting_all_weights_are_one() -> None:
    assert snr_weights(SNR, LossSettings(), "epsilon").tolist() == [1.0] * 6


def masked_batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a prediction and a target (3, 4, 8, 12), and masks (3, 1, 8, 12) with black, grey and white."""
    random = torch.Generator().manual_seed(seed)
    prediction, target = (torch.randn(3, 4, 8, 12, generator=random) for _ in range(2))
    masks = torch.rand(3, 1, 8, 12, generator=random)
    masks[masks < 0.4] = 0.0
    masks[masks > 0.8] = 1.0
    return prediction, target, masks


def weights_of(masks: torch.Tensor, settings: MaskSettings) -> torch.Tensor:
    return torch.stack([mask_loss_weights(mask, settings) for mask in masks])


@pytest.mark.parametrize("kind", ["mse", "huber", "smooth_l1"])
@pytest.mark.parametrize("normalise", [True, False])
def test_a_mask_of_ones_equals_no_mask_bit_for_bit(kind: str, normalise: bool) -> None:
    settings = LossSettings.model_validate({"kind": kind})
    prediction, target, masks = masked_batch()
    weights = weights_of(torch.ones_like(masks), mask_settings(normalise=normalise))
    with_mask, without = prediction.clone().requires_grad_(), prediction.clone().requires_grad_()
    masked = sample_losses(with_mask, target, settings, weights)
    plain = sample_losses(without, target, settings)
    assert torch.equal(masked, plain)
    masked.sum().backward()
    plain.sum().backward()
    assert with_mask.grad is not None
    assert without.grad is not None
    assert torch.equal(with_mask.grad, without.grad)


@pytest.mark.parametrize("kind", ["mse", "huber", "smooth_l1"])
def test_the_gradient_of_the_answer_is_zero_exactly_where_the_weight_is_zero(kind: str) -> None:
    prediction, target, masks = masked_batch()
    prediction.requires_grad_()
    weights = weights_of(masks, mask_settings())
    sample_losses(prediction, target, LossSettings.model_validate({"kind": kind}), weights).sum().backward()
    assert prediction.grad is not None
    assert torch.equal(prediction.grad != 0, (masks > 0).expand_as(prediction))


@pytest.mark.parametrize("unmasked_weight", [0.0, 0.25])
def test_a_normalised_masked_loss_is_the_weighted_mean_of_the_errors(unmasked_weight: float) -> None:
    prediction, target, masks = masked_batch()
    weights = weights_of(masks, mask_settings(unmasked_weight=unmasked_weight))
    losses = sample_losses(prediction, target, LossSettings(), weights)
    for sample in range(3):
        total = weight_sum = 0.0
        for channel, row, column in itertools.product(range(4), range(8), range(12)):
            weight = max(float(masks[sample, 0, row, column]), unmasked_weight)
            error = float(prediction[sample, channel, row, column] - target[sample, channel, row, column])
            total += weight * error**2
            weight_sum += weight
        assert float(losses[sample]) == pytest.approx(total / weight_sum, rel=1e-5)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("unmasked_weight", [0.0, 0.1])
def test_masked_losses_are_those_of_onetrainer(normalise: bool, unmasked_weight: float) -> None:
    prediction, target, masks = masked_batch()
    settings = mask_settings(unmasked_weight=unmasked_weight, normalise=normalise)
    ours = sample_losses(prediction, target, LossSettings(), weights_of(masks, settings))

    # OneTrainer, modules/util/loss/masked_loss.py: errors times the mask clamped to [unmasked_weight, 1], and
    # with "normalize masked area loss" divided by the clamped mask's mean.
    clamped = torch.clamp(masks, unmasked_weight, 1)
    theirs = (prediction - target) ** 2 * clamped
    if normalise:
        theirs = theirs / clamped.mean(dim=(1, 2, 3), keepdim=True)
    torch.testing.assert_close(ours, theirs.mean(dim=(1, 2, 3)), rtol=1e-6, atol=0)


def test_masked_losses_without_normalisation_are_those_of_sd_scripts() -> None:
    prediction, target, _ = masked_batch()
    pixels = torch.randint(0, 256, (3, 64, 96), generator=torch.Generator().manual_seed(1))
    stored = [mask_weights(mask.numpy().astype(np.uint8), Size(8, 12)) for mask in pixels]
    masks = torch.from_numpy(np.stack(stored)).float()
    ours = sample_losses(
        prediction, target, LossSettings(), weights_of(masks, mask_settings(normalise=False))
    )

    # sd-scripts, library/custom_train_functions.py: the mask interpolated with mode "area" times the errors.
    areas = torch.nn.functional.interpolate(pixels[:, None] / 255, size=(8, 12), mode="area")
    theirs = ((prediction - target) ** 2 * areas).mean(dim=(1, 2, 3))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=0)


def mask_settings(**values: object) -> MaskSettings:
    return MaskSettings.model_validate({"from": "alpha", **values})


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("unmasked_weight", [0.0, 0.25])
def test_the_prior_loss_outside_a_mask_is_that_of_onetrainer(
    *, normalise: bool, unmasked_weight: float
) -> None:
    prediction, prior, masks = masked_batch()
    settings = mask_settings(normalise=normalise, unmasked_weight=unmasked_weight, prior_weight=0.3)
    weights = torch.stack([mask_prior_weights(mask, settings) for mask in masks])
    losses = sample_losses(prediction, prior, LossSettings(), weights)
    for sample in range(3):
        total = weight_sum = 0.0
        for channel, row, column in itertools.product(range(4), range(8), range(12)):
            weight = 1 - max(float(masks[sample, 0, row, column]), unmasked_weight)
            error = float(prediction[sample, channel, row, column] - prior[sample, channel, row, column])
            total += weight * error**2
            weight_sum += weight
        divisor = weight_sum if normalise else 4 * 8 * 12
        assert float(losses[sample]) == pytest.approx(0.3 * total / divisor, rel=1e-5)


def test_a_white_mask_has_no_prior_loss() -> None:
    weights = mask_prior_weights(torch.ones(1, 8, 12), mask_settings(prior_weight=1.0))
    assert torch.equal(weights, torch.zeros(1, 8, 12))


@pytest.mark.parametrize(("num_samples", "more"), [(1, ""), (20, ""), (21, "and 1 more"), (23, "and 3 more")])
def test_an_error_about_a_loss_names_at_most_twenty_samples(num_samples: int, more: str) -> None:
    samples = [f"photos/{number}.png" for number in range(num_samples)]
    error = not_finite_error("loss", 7, float("nan"), samples)
    assert error.what == "the loss of step 7 must be finite, got nan"
    lines = ["samples:", *samples[:20], *([more] if more else [])]
    assert error.where.splitlines() == lines


def test_an_error_about_skipped_steps_has_their_number_and_the_last_one() -> None:
    assert "skipped the last 20 steps, up to step 31" in skipped_steps_error(31).what
