from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pipeline.runs import RunLayout, read_metrics
from pipeline.training.checkpoint import checkpoint_path, load_checkpoint
from pipeline.training.loop import train
from pipeline.training.order import TrainingOrder
from pipeline.training.stopping import StopRequest

if TYPE_CHECKING:
    from conftest import Project


@dataclass
class Notes:
    """A report that remembers; and asks for a stop once `stop_after` steps are done."""

    stop: StopRequest = field(default_factory=StopRequest)
    stop_after: int = 10**9
    lines: list[str] = field(default_factory=list)

    def info(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, done: int, total: int, text: str) -> None:
        self.lines.append(f"{done}/{total} {text}")
        if done + 1 >= self.stop_after:
            self.stop.request()


def run_until(order: TrainingOrder, stop_after: int = 10**9) -> tuple[bool, list[str]]:
    notes = Notes(stop_after=stop_after)
    if stop_after <= 0:
        notes.stop.request()
    return train(order, notes, notes.stop), notes.lines


def outcome(order: TrainingOrder) -> tuple[list[tuple[int, float, float]], dict[str, torch.Tensor]]:
    layout = RunLayout(order.folder)
    steps = order.recipe.training.steps
    metrics = read_metrics(layout.metrics, steps)
    state = load_checkpoint(checkpoint_path(layout.checkpoints, steps), order.run)
    return [(line["step"], line["loss"], line["learning_rate"]) for line in metrics], state.adapter


def assert_same(a: Any, b: Any) -> None:
    assert a[0] == b[0]
    assert set(a[1]) == set(b[1])
    assert all(torch.equal(a[1][name], b[1][name]) for name in a[1])


def test_R01_a_run_cut_at_any_step_and_cut_twice_equals_the_uncut_one_bit_for_bit(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(lr_scheduler="cosine", warmup_steps=2)
    whole = project.changed("whole").order()
    assert run_until(whole)[0]
    expected = outcome(whole)
    assert len(expected[0]) == 6
    assert [line[0] for line in expected[0]] == list(range(6))
    for cuts in [(0,), (2,), (3,), (4,), (5,), (2, 4)]:
        order = project.changed(f"cut-{'-'.join(map(str, cuts))}").order()
        for cut in cuts:
            finished, lines = run_until(order, stop_after=cut)
            assert not finished
            assert f"asked to stop: {cut} of 6 steps are done and kept" in lines
        assert run_until(order)[0]
        assert_same(outcome(order), expected)
