"""The comparison of two finished runs, bit for bit."""

from __future__ import annotations

from safetensors.torch import load_file

from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.run_folder import RunLayout, read_metrics
from pipeline.trained_lora.worker.checkpoint import checkpoint_path, load_checkpoint
from tests.tensor_differences import differing_tensors


def assert_equal_runs(actual: TrainingJob, expected: TrainingJob, steps: int) -> None:
    """Compare the losses, the LoRA files and the last checkpoints of two runs."""
    jobs = (actual, expected)
    layouts = [RunLayout(job.folder) for job in jobs]
    losses = [[line["loss"] for line in read_metrics(layout.metrics, steps)] for layout in layouts]
    assert losses[0] == losses[1]
    assert len(losses[0]) == steps

    names = [sorted(path.name for path in layout.exported.glob("*.safetensors")) for layout in layouts]
    assert names[0] == names[1] != []
    for name in names[0]:
        tensors = [load_file(layout.exported / name) for layout in layouts]
        assert tensors[0].keys() == tensors[1].keys()
        assert differing_tensors(tensors[0], tensors[1]) == []

    states = [
        load_checkpoint(checkpoint_path(layout.checkpoints, steps), job.run)
        for layout, job in zip(layouts, jobs, strict=True)
    ]
    assert differing_tensors(states[0].adapter, states[1].adapter) == []
