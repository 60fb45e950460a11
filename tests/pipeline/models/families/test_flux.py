from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel

from demo.tiny_models import make_tiny_flux
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.recipe import LoraSettings
from pipeline.trained_lora.worker.adapter.lora import add_lora
from pipeline.trained_lora.worker.export.layouts import layout_tensors
from pipeline.trained_lora.worker.export.modules import describe_networks
from tests.pipeline.models.families.case import Case
from tests.pipeline.models.families.flux_case import FluxCase


class DevCase(FluxCase):
    def make(self, folder: Path) -> None:
        make_tiny_flux(folder)


class SchnellCase(DevCase):
    previewing: ClassVar[dict[str, Any]] = {"max_sequence_length": 256}

    guidance = None

    def make(self, folder: Path) -> None:
        make_tiny_flux(folder, schnell=True)

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        embedding, pooled, _ = pipe.encode_prompt(caption, caption, max_sequence_length=256)
        return {"text_embedding": embedding, "pooled_text_embedding": pooled}


def test_the_complete_job_of_dev_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(DevCase())


def test_the_complete_job_of_schnell_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(SchnellCase())


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> WorkerFamily:
    folder = tmp_path_factory.mktemp("base")
    make_tiny_flux(folder)
    return load_family(folder)


def test_size_multiple_length_and_architecture_follow_the_configuration(
    family: WorkerFamily, tmp_path: Path
) -> None:
    make_tiny_flux(tmp_path, schnell=True)
    schnell = load_family(tmp_path)
    assert family.size_multiple() == 16
    assert (family.max_length(), schnell.max_length()) == (512, 256)
    assert (family.modelspec_architecture(), schnell.modelspec_architecture()) == (
        "flux-1-dev",
        "flux-1-schnell",
    )


def test_dev_shifts_larger_pictures_to_more_noise_and_schnell_does_not(
    family: WorkerFamily, tmp_path: Path
) -> None:
    make_tiny_flux(tmp_path, schnell=True)
    half = torch.tensor([0.5], dtype=torch.float64)
    for each, expected in ((family, (622.459, 759.511)), (load_family(tmp_path), (500.0, 500.0))):
        scheduler = each.noise.load_scheduler()
        actual = [each.noise.timesteps(scheduler, half, (16, edge, edge)).item() for edge in (32, 128)]
        assert actual == pytest.approx(expected, abs=0.01)


def test_diffusers_reads_kohyas_layout_of_the_published_width(family: WorkerFamily, tmp_path: Path) -> None:
    """diffusers' converter supports only that width; the transformer here has no base weights."""
    with torch.device("meta"):
        sizes = {"num_layers": 1, "num_single_layers": 1}
        real: Any = FluxTransformer2DModel(**sizes)
    add_lora(real, LoraSettings(rank=2, alpha=3.0), targets=family.lora_targets(), seed=1)
    modules = describe_networks(family, {"": real})
    random = torch.Generator().manual_seed(1)
    state = {
        f"{module.name}.lora_{side}.weight": torch.randn(shape, generator=random)
        for module in modules
        for side, shape in zip("AB", module.shapes("diffusers").values(), strict=True)
    }
    assert len(modules) == 12 + 5
    converted = FluxPipeline.lora_state_dict(layout_tensors("kohya", modules, state, {}))
    assert set(converted) == {f"transformer.{name}" for name in state}
    for module in modules:
        down, up = (converted[f"transformer.{module.name}.lora_{side}.weight"] for side in "AB")
        probe = torch.randn(down.shape[1], generator=random)  # of the product, which would be large
        own_down, own_up = (state[f"{module.name}.lora_{side}.weight"] for side in "AB")
        expected = 1.5 * own_up @ (own_down @ probe)
        torch.testing.assert_close(up @ (down @ probe), expected, rtol=1e-5, atol=1e-3)
