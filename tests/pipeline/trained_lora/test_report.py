from __future__ import annotations

import io

import pytest
from PIL import Image

from pipeline.trained_lora.report import loss_curve, running_mean


def test_the_running_mean_covers_the_preceding_losses() -> None:
    assert running_mean([5.0, 1.0, 3.0]) == [5.0, 3.0, 3.0]
    ramp = running_mean([float(number) for number in range(200)])
    assert ramp[100] == pytest.approx(95.5)


def test_the_loss_curve_is_a_small_png() -> None:
    metrics = [{"step": step, "loss": 1 / (step + 1)} for step in range(500)]
    drawn = loss_curve(metrics, [{"step": 0, "loss": 1.0}, {"step": 500, "loss": 0.5}])
    with Image.open(io.BytesIO(drawn)) as picture:
        assert picture.format == "PNG"
    assert len(drawn) < 66_000


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_loss_curve_of_one_point_is_left_out(num_steps: int) -> None:
    metrics = [{"step": step, "loss": 0.5} for step in range(num_steps)]
    assert loss_curve(metrics, []) == b""
    assert loss_curve(metrics, [{"step": 0, "loss": 1.0}]) == b""


def test_the_loss_curve_of_one_step_shows_two_validations() -> None:
    drawn = loss_curve([{"step": 0, "loss": 0.5}], [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 0.5}])
    assert drawn.startswith(b"\x89PNG")


def test_a_series_of_one_point_is_not_drawn_next_to_another() -> None:
    losses = [{"step": 0, "loss": 0.5}, {"step": 1, "loss": 0.4}]
    validation = [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 0.5}]
    assert loss_curve(losses, validation[:1]) == loss_curve(losses, [])
    assert loss_curve(losses[:1], validation) == loss_curve([], validation)
    assert loss_curve(losses, validation) != loss_curve(losses, [])
    paired = [{**line, "trained_loss": 0.3, "gap": 0.2} for line in validation]
    assert loss_curve(losses, paired) != loss_curve(losses, validation)
