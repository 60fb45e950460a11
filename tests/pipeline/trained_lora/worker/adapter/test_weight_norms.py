"""The limit of weight norms equals sd-scripts' algorithm, holds after every step, and resumes bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from pipeline.models.worker.family import load_family
from pipeline.recipe import LoraSettings
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.worker import engine
from pipeline.trained_lora.worker.adapter.lora import add_lora, lora_modules, trainable_weights
from pipeline.trained_lora.worker.adapter.weight_norms import WeightNormLimit
from pipeline.trained_lora.worker.checkpoint import checkpoint_path, load_checkpoint
from pipeline.trained_lora.worker.optimizers import UpdateOnDevice
from tests.pipeline.trained_lora.runs import outcome, run_until

if TYPE_CHECKING:
    from pipeline.trained_lora.job import TrainingJob
    from tests.pipeline.trained_lora.project import Project

Factors = dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], float]]


def network_of(base: Path, **settings: Any) -> nn.Module:
    """Return a denoiser with random weights in the LoRAs of its linear layers and convolutions."""
    family = load_family(base)
    denoiser = cast("Any", family.denoiser.load("float32", "cpu"))
    lora = LoraSettings(rank=4, alpha=2.0, conv_rank=2, conv_alpha=3.0, **settings)
    add_lora(denoiser, lora, targets=family.lora_targets(), seed=1)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in trainable_weights(denoiser):
            weight.copy_(0.11 * torch.randn(weight.shape, generator=draw))
    return denoiser


def factors_of(network: nn.Module) -> Factors:
    """Return (up, down, scale) of each module, as matrices in float64."""
    return {
        name: (_matrix(layer.lora_B), _matrix(layer.lora_A), layer.scaling["default"])
        for name, layer in cast("list[tuple[str, Any]]", [*lora_modules(network)])
    }


def _matrix(side: Any) -> np.ndarray[Any, Any]:
    return side["default"].weight.detach().flatten(1).double().numpy().copy()


@pytest.mark.parametrize("rslora", [False, True])
def test_modules_above_the_limit_get_its_norm_and_others_keep_every_bit(
    tiny_bases: dict[str, Path], rslora: bool
) -> None:
    network = network_of(tiny_bases["epsilon"], rslora=rslora)
    before = factors_of(network)
    norms = [np.linalg.norm(scale * up @ down) for up, down, scale in before.values()]
    limit = float(np.median(norms))
    WeightNormLimit([network], limit).apply()
    for name, (up, down, scale) in factors_of(network).items():
        old_up, old_down, old_scale = before[name]
        assert scale == old_scale

        # As `apply_max_norm_regularization`: from the complete product, and by the root for each matrix.
        ratio = min(1.0, limit / np.linalg.norm(old_scale * old_up @ old_down))
        if ratio == 1:
            assert np.array_equal(up, old_up)
            assert np.array_equal(down, old_down)
        np.testing.assert_allclose(up, old_up * ratio**0.5, rtol=1e-5)
        np.testing.assert_allclose(down, old_down * ratio**0.5, rtol=1e-5)


def test_an_update_that_a_device_skips_changes_nothing(tiny_bases: dict[str, Path]) -> None:
    network = network_of(tiny_bases["epsilon"])
    before = factors_of(network)
    WeightNormLimit([network], 0.01).apply(torch.tensor(False))
    after = factors_of(network)
    assert all(np.array_equal(after[name][0], before[name][0]) for name in before)
    WeightNormLimit([network], 0.01).apply(torch.tensor(True))
    assert not all(np.array_equal(factors_of(network)[name][0], before[name][0]) for name in before)


def norms_of(state: dict[str, Tensor], *, scale: float) -> list[float]:
    """Return the norm of each module's delta weight in a checkpoint."""
    downs = {name: weight for name, weight in state.items() if ".lora_A." in name}
    ups = {name: state[name.replace(".lora_A.", ".lora_B.")] for name in downs}
    return [float(np.linalg.norm(scale * ups[name].numpy() @ downs[name].numpy())) for name in downs]


def norms_at(job: TrainingJob, step: int) -> list[float]:
    state = load_checkpoint(checkpoint_path(RunLayout(job.folder).checkpoints, step), job.run)
    return norms_of(state.adapter, scale=0.5)


LORA = {"rank": 4, "alpha": 2.0, "text_encoders": {}}


def test_the_limit_holds_at_each_step_and_a_stopped_run_resumes_bit_for_bit(
    make_project: Callable[..., Project],
) -> None:
    plain_project = make_project(steps=3, lora=LORA, checkpoint_every=1, keep_checkpoints=5)
    plain = plain_project.job()
    run_until(plain)
    norms = norms_at(plain, 3)
    limit = sorted(norms)[len(norms) // 2]

    limited = LoraSettings.model_validate({**LORA, "scale_weight_norms": limit})
    project = plain_project.changed("limited", lora=limited)
    whole = project.job()
    run_until(whole)
    assert all(max(norms_at(whole, step)) <= limit * (1 + 1e-5) for step in (1, 2, 3))
    assert max(norms) > 1.1 * limit

    stopped = project.changed("stopped").job()
    run_until(stopped, 1)
    run_until(stopped, start=1)
    assert outcome(stopped) == outcome(whole)

    # A limit that no module reaches is the same training.
    unlimited = LoraSettings.model_validate({**LORA, "scale_weight_norms": 1e3})
    other = plain_project.changed("unlimited", lora=unlimited).job()
    run_until(other)
    assert outcome(other).adapter == outcome(plain).adapter

    file = RunLayout(whole.folder).exported / "demo_kohya.safetensors"
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["ss_scale_weight_norms"] == str(limit)


def test_the_limit_holds_where_the_device_checks_updates(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"optimizer": "torch.optim.AdamW", "optimizer_arguments": {"fused": True}}
    project = make_project(steps=3, lora={"rank": 4, "alpha": 2.0, "scale_weight_norms": 0.02}, **settings)
    on_host = project.job()
    run_until(on_host)
    monkeypatch.setattr(engine, "update_on_device", UpdateOnDevice)
    on_device = project.changed("on_device").job()
    run_until(on_device)
    assert outcome(on_device) == outcome(on_host)
    assert max(norms_at(on_device, 3)) == pytest.approx(0.02, rel=1e-5)
