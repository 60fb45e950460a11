from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.sample_losses import loss_trend, sample_statistics, share_below_half

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


def test_the_outlier_is_listed_first_although_its_losses_are_not_the_largest(
    make_project: Callable[..., Project],
) -> None:
    """Losses fall a hundredfold from the first to the last timestep; one sample is 1.5 times too high."""
    job, rng = make_project().job(), np.random.default_rng(3)
    layout = RunLayout(job.folder)
    layout.sample_losses.parent.mkdir(parents=True)
    outlier, total = 5, dict.fromkeys(range(8), 0.0)
    with layout.sample_losses.open("w") as file:
        for step in range(500):
            samples = rng.choice(8, 2, replace=False).tolist()
            # The outlier is never drawn at the timesteps with large losses.
            steps = [rng.uniform(300 if sample == outlier else 0, 1000) for sample in samples]
            losses = [
                10 ** (-2 * at / 1000) * rng.uniform(0.8, 1.2) * (1.5 if sample == outlier else 1.0)
                for sample, at in zip(samples, steps, strict=True)
            ]
            for sample, loss in zip(samples, losses, strict=True):
                total[sample] += loss
            line = {"step": step, "samples": samples, "timesteps": steps, "losses": losses}
            file.write(json.dumps(line) + "\n")
    table = sample_statistics(job.inputs, layout, 500)
    assert table["sample_id"].to_list()[0] == job.inputs[outlier].variant_id
    assert table["mean_loss"][0] < table["mean_loss"].max()
    assert table["relative_loss"][0] == pytest.approx(1.5, abs=0.15)
    # Of eight images, one alone can be at most 7 / sqrt(8) standard deviations from the mean.
    assert table["deviation"][0] > 2.3
    assert table["deviation"][1] < 1
    assert table["times"].sum() == 1000
    by_id = dict(table.select("sample_id", "mean_loss").iter_rows())
    times = dict(table.select("sample_id", "times").iter_rows())
    for number, item in enumerate(job.inputs):
        assert by_id[item.variant_id] * times[item.variant_id] == pytest.approx(total[number])
    assert table.row(0, named=True)["caption"] == job.inputs[outlier].variants[0].caption


def test_the_deviations_have_a_spread_of_one_whether_or_not_images_differ(
    make_project: Callable[..., Project],
) -> None:
    job, rng = make_project(sizes={"64x64": 60}).job(), np.random.default_rng(6)
    for number, spread in enumerate((0.0, 0.3)):
        layout = RunLayout(job.folder / str(number))
        layout.sample_losses.parent.mkdir(parents=True)
        images = 1 + spread * rng.standard_normal(60)
        with layout.sample_losses.open("w") as file:
            for step in range(600):
                samples = rng.choice(60, 4, replace=False).tolist()
                losses = [images[sample] + 0.5 * rng.standard_normal() for sample in samples]
                line = {"step": step, "samples": samples, "timesteps": [500.0] * 4, "losses": losses}
                file.write(json.dumps(line) + "\n")
        deviations = sample_statistics(job.inputs, layout, 600)["deviation"].to_numpy()
        assert np.std(deviations) == pytest.approx(1.0, abs=0.25)
        assert np.mean(deviations) == pytest.approx(0.0, abs=0.01)


def test_a_run_without_steps_has_no_statistics(make_project: Callable[..., Project]) -> None:
    job = make_project().job()
    assert sample_statistics(job.inputs, RunLayout(job.folder), 5).is_empty()


def test_the_loss_trend_is_detected_despite_timestep_noise(
    make_project: Callable[..., Project],
) -> None:
    job, rng = make_project().job(), np.random.default_rng(4)
    layout = RunLayout(job.folder)
    layout.sample_losses.parent.mkdir(parents=True)
    with layout.sample_losses.open("w") as file:
        for step in range(400):
            at = rng.uniform(0, 1000)
            loss = 10 ** (-2 * at / 1000) * (1.1 - 0.2 * step / 400)
            line = {"step": step, "samples": [0], "timesteps": [at], "losses": [loss]}
            file.write(json.dumps(line) + "\n")
    trend = loss_trend(layout, 400)
    assert trend is not None
    assert trend["first"] - trend["last"] == pytest.approx(0.16, abs=2 * trend["error"])
    assert trend["error"] < 0.05
    assert loss_trend(RunLayout(layout.folder / "none"), 5) is None


def test_the_share_of_low_noise_levels_counts_draws_below_half_of_the_schedule(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    layout.sample_losses.parent.mkdir()
    lines = [
        {"step": step, "samples": [0, 1], "timesteps": timesteps, "losses": [1.0, 1.0]}
        for step, timesteps in enumerate([[499.9, 500.0], [0.0, 999.0], [1.0, 2.0]])
    ]
    layout.sample_losses.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert share_below_half(layout, 3, num_timesteps=1000) == pytest.approx(4 / 6)
    assert share_below_half(layout, 2, num_timesteps=1000) == 0.5
    assert share_below_half(layout, 3, num_timesteps=2) == pytest.approx(1 / 6)
    assert share_below_half(RunLayout(tmp_path / "none"), 3, num_timesteps=1000) is None
