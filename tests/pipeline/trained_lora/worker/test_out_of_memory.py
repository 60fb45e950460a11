"""A training that does not fit says what to change: what its recipe does not do yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from pipeline.errors import TrainingError
from pipeline.trained_lora.worker.loop import StopRequest, train
from pipeline.trained_lora.worker.out_of_memory import out_of_memory_error

if TYPE_CHECKING:
    from conftest import Project


class Unheard:
    def info(self, text: str) -> None:
        pass

    def progress(self, done: int, total: int, text: str) -> None:
        pass


def test_memory_that_runs_out_in_a_step_names_step_and_settings(make_project: Callable[..., Project]) -> None:
    order = make_project(optimizer="tests.pipeline.trained_lora.greedy.Greedy").order()
    with pytest.raises(TrainingError, match="memory ran out in step 0") as caught:
        train(order, Unheard(), StopRequest())
    assert "training.batch_size 2" in caught.value.where
    assert "gradient_checkpointing: true" in caught.value.fix
    assert "batch_size: 1 and gradient_accumulation: 4" in caught.value.fix


@pytest.mark.parametrize(
    ("settings", "not_advised"),
    [
        ({"gradient_checkpointing": True}, "gradient_checkpointing: true"),
        ({"batch_size": 1}, "batch_size"),
        ({"lora": {"rank": 4, "alpha": 2.0, "dora": True}}, "quantize"),
    ],
)
def test_what_is_done_already_or_not_possible_is_not_advised(
    make_project: Callable[..., Project], settings: dict[str, Any], not_advised: str
) -> None:
    plain = out_of_memory_error(make_project().recipe, "in step 3", "79.0 of 80.0 GiB used").fix
    assert not_advised in plain
    changed = out_of_memory_error(make_project(**settings).recipe, "in step 3", "")
    assert not_advised not in changed.fix
    assert "resolution" in changed.fix
