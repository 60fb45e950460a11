"""Adapters in the shape of a LoRA file: every layout, other ranks, and files that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.errors import DrawingError
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.pictures.worker.file_adapter import FileAdapter
from pipeline.trained_lora.worker.adapter.lora import delta_weights
from pipeline.trained_lora.worker.adapter.warm_start import read_lora_tensors
from pipeline.trained_lora.worker.base_model import load_base
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.trained_lora.project import Project, project_in
from tests.pipeline.trained_lora.runs import run

NAMES = ("pytorch_lora_weights.safetensors", "demo_kohya.safetensors", "demo_comfyui.safetensors")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_bases: dict[str, Path]) -> Project:
    """A finished run, which tests only read."""
    modules = ["mid_block.*.to_q", "*.conv_shortcut"]
    lora = {"rank": 3, "alpha": 1.5, "conv_rank": 2, "modules": modules}
    project = project_in(tmp_path_factory.mktemp("adapter"), tiny_bases, steps=1, lora=lora)
    run(project, InProcessLaunch())
    return project


def deltas(project: Project, file: Path, strength: float = 1.0) -> dict[str, torch.Tensor]:
    family = load_family(Path(project.recipe.model.base))
    adapter = FileAdapter(family, {"": load_base(family, project.recipe, "cpu")}, read_lora_tensors(file))
    adapter.set_strength(strength)
    return {name: compute() for name, compute in delta_weights(adapter.networks[""]).items()}


def test_each_layout_has_the_same_effect_and_strength_multiplies_it(trained: Project) -> None:
    lora = trained.recipe.output_dir / "lora"
    expected = deltas(trained, lora / NAMES[0])
    assert max(float(delta.abs().max()) for delta in expected.values()) > 0
    for name in NAMES[1:]:
        other = deltas(trained, lora / name)
        assert other.keys() == expected.keys()
        # ComfyUI's file has the scale in its factors, which rounds them.
        for key, delta in expected.items():
            torch.testing.assert_close(other[key], delta, rtol=1e-5, atol=1e-6, msg=key)
    half = deltas(trained, lora / NAMES[1], 0.5)
    assert [key for key in expected if not torch.allclose(half[key], 0.5 * expected[key])] == []


def test_files_that_do_not_fit_the_base_model_are_errors_with_a_fix(trained: Project, tmp_path: Path) -> None:
    kohya = load_file(trained.recipe.output_dir / "lora" / NAMES[1])
    other, extra, wrong = (tmp_path / f"{name}.safetensors" for name in ("other", "extra", "wrong"))
    save_file({"lora_unet_nothing.lora_down.weight": torch.ones(2, 2)}, other)
    save_file({**kohya, "lora_unet_nothing.lora_up.weight": torch.ones(2, 2)}, extra)
    up = next(key for key in kohya if key.endswith("lora_up.weight"))
    save_file({**kohya, up: torch.ones(7, 3)}, wrong)
    for file, what in (
        (other, "no LoRA of"),
        (extra, "1 tensor does not match the layers"),
        (wrong, "1 tensor does not match the layers"),
    ):
        with pytest.raises(DrawingError) as raised:
            deltas(trained, file)
        assert what in raised.value.what
        assert raised.value.where == str(file)
        assert "base model" in raised.value.fix
