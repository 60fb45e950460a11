"""The comparison of a file's weights with the trained ones."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import TrainingError
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.worker.export.layouts import ModuleWeights
from pipeline.trained_lora.worker.export.read_back import (
    largest_error,
    loaded_weights,
    module_error,
    relative_difference,
    require_tolerable,
)

DRAW = torch.Generator().manual_seed(1)
WEIGHTS = ModuleWeights(torch.randn(2, 4, generator=DRAW), torch.randn(3, 2, generator=DRAW), 0.5)
ROWS = torch.tensor([1.0, 2.0, 4.0])


def test_a_difference_is_relative_to_the_largest_expected_number() -> None:
    expected = torch.tensor([1.0, -4.0])
    assert relative_difference(expected, expected) == 0.0
    assert relative_difference(torch.tensor([2.0, -4.0]), expected) == 0.25
    assert relative_difference(torch.tensor([[1.0], [-2.0]]), expected) == 0.5
    assert relative_difference(torch.tensor([2.0, -4.0]), expected, least_scale=8.0) == 0.125
    assert relative_difference(torch.tensor([2.0, -4.0]), expected, least_scale=2.0) == 0.25
    assert relative_difference(torch.tensor([0.5]), torch.zeros(1)) == 0.5, "relative to 1 if all are zero"


@pytest.mark.parametrize(
    ("error", "is_refused"), [(0.0, False), (1e-6, False), (1.1e-6, True), (math.nan, True)]
)
def test_an_error_may_be_as_large_as_the_tolerance(error: float, is_refused: bool) -> None:
    if not is_refused:
        require_tolerable("to_q", error, where=Path("lora"), tolerance=1e-6)
        return
    with pytest.raises(TrainingError, match="the LoRA of to_q in the file differs") as excinfo:
        require_tolerable("to_q", error, where=Path("lora"), tolerance=1e-6)
    assert excinfo.value.where == "lora"


def test_equal_weights_have_no_error_and_another_scale_has_its_relative_difference() -> None:
    assert module_error(WEIGHTS, replace(WEIGHTS)) == 0.0
    assert module_error(replace(WEIGHTS, scale=0.6), WEIGHTS) == pytest.approx(0.2)
    assert module_error(replace(WEIGHTS, scale=0.4), WEIGHTS) == pytest.approx(0.2)
    assert module_error(replace(WEIGHTS, scale=-0.5), WEIGHTS) == pytest.approx(2.0)


def test_a_scale_may_be_part_of_the_factors_and_the_rank_may_differ() -> None:
    moved = ModuleWeights(WEIGHTS.down * 0.25, WEIGHTS.up * 2.0, 1.0)
    assert module_error(moved, WEIGHTS) < 1e-7
    padded = ModuleWeights(
        torch.cat([WEIGHTS.down, torch.zeros(1, 4)]), torch.cat([WEIGHTS.up, torch.ones(3, 1)], dim=1), 0.5
    )
    assert module_error(padded, WEIGHTS) < 1e-7


@pytest.mark.parametrize("factor", ["down", "up"])
def test_the_error_of_other_factors_is_the_norm_of_the_difference_relative_to_the_terms(factor: str) -> None:
    changed = getattr(WEIGHTS, factor).clone()
    changed[1, 1] += 0.1
    other = replace(WEIGHTS, **{factor: changed})
    difference = (other.delta().double() - WEIGHTS.delta().double()).norm()
    terms = [0.5 * torch.outer(WEIGHTS.up[:, rank], WEIGHTS.down[rank]).norm() ** 1 for rank in range(2)]
    expected = float(difference) / math.hypot(*map(float, terms))
    assert module_error(other, WEIGHTS) == pytest.approx(expected, rel=1e-4)
    assert expected > 1e-3


def test_the_error_is_absolute_if_the_trained_product_is_zero() -> None:
    zero = replace(WEIGHTS, up=torch.zeros(3, 2))
    assert module_error(WEIGHTS, zero) == pytest.approx(float(WEIGHTS.delta().norm()), rel=1e-5)


@pytest.mark.parametrize(
    "other", [{"up": torch.ones(4, 2)}, {"down": torch.ones(2, 5)}], ids=["rows", "columns"]
)
def test_weights_of_another_shape_have_an_infinite_error(other: dict[str, torch.Tensor]) -> None:
    assert module_error(replace(WEIGHTS, **other), WEIGHTS) == math.inf


def test_row_factors_must_be_on_both_sides_and_their_difference_counts() -> None:
    dora = replace(WEIGHTS, row_factors=ROWS)
    assert module_error(dora, replace(WEIGHTS, row_factors=ROWS.clone())) == 0.0
    assert module_error(dora, WEIGHTS) == module_error(WEIGHTS, dora) == math.inf
    other = replace(WEIGHTS, row_factors=ROWS + torch.tensor([0.0, 0.4, 0.0]))
    assert module_error(other, dora) == pytest.approx(0.1)
    assert module_error(replace(other, scale=1.0), dora) == pytest.approx(1.0), "the larger of the two"


def test_the_largest_error_of_all_modules_is_returned() -> None:
    trained: dict[str, ModuleWeights] = dict.fromkeys(("a", "b", "c"), WEIGHTS)
    errors: dict[str, Any] = {"path": Path("lora"), "exact": True, "tolerance": 0.3}
    assert largest_error(weights=dict(trained), expected=trained, **errors) == 0.0
    weights = trained | {"b": replace(WEIGHTS, scale=0.6), "c": replace(WEIGHTS, scale=0.55)}
    assert largest_error(weights=weights, expected=trained, **errors) == pytest.approx(0.2)
    with pytest.raises(
        TrainingError, match=r"the LoRA of b in the file differs from the trained one by 0\.2"
    ):
        largest_error(weights=weights, expected=trained, **{**errors, "tolerance": 0.15})


def test_factors_that_a_reader_does_not_change_must_be_equal() -> None:
    trained = {"a": WEIGHTS}
    moved = {"a": ModuleWeights(WEIGHTS.down * 0.25, WEIGHTS.up * 2.0, 1.0)}
    assert largest_error(Path("lora"), moved, trained, exact=False, tolerance=1e-6) < 1e-6
    for other in (moved, {"a": replace(WEIGHTS, up=WEIGHTS.up.nextafter(torch.ones(())))}):
        with pytest.raises(TrainingError, match="the factors of a in the file differ"):
            largest_error(Path("lora"), other, trained, exact=True, tolerance=1.0)


def test_a_file_with_other_modules_is_an_error_that_names_the_first() -> None:
    trained = {"a": WEIGHTS, "b": WEIGHTS}
    for weights, message in (
        ({"a": WEIGHTS}, "1 module is not in both.*the first is b"),
        ({**trained, "c": WEIGHTS}, "1 module is not in both.*the first is c"),
        ({"a": WEIGHTS, "c": WEIGHTS}, "2 modules are not in both.*the first is b"),
    ):
        with pytest.raises(TrainingError, match=message):
            largest_error(Path("lora"), weights, trained, exact=True, tolerance=1.0)


class Refusing:
    """A pipeline whose loader raises an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def lora_state_dict(self, *_: object, **__: object) -> Any:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [OSError("no"), ValueError("no"), KeyError("no"), TypeError("no"), RuntimeError("no")],
    ids=lambda error: type(error).__name__,
)
def test_a_file_that_diffusers_does_not_load_is_an_error(
    tiny_bases: dict[str, Path], tmp_path: Path, error: Exception
) -> None:
    denoiser: Any = load_family(tiny_bases["epsilon"]).denoiser.load("float32", "cpu")
    with pytest.raises(TrainingError, match=r"diffusers cannot load the file: .*no") as excinfo:
        loaded_weights(tmp_path / "lora", Refusing(error), {"": denoiser}, {}, denoiser_name="unet")
    assert excinfo.value.where == str(tmp_path / "lora")
