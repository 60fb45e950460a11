"""The blocks that `training.offload: auto` keeps, for GPUs of given sizes."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.multiprocessing as mp
from accelerate import PartialState
from diffusers import FluxTransformer2DModel

from bench.gpu.configurations import PUBLISHED
from pipeline.errors import TrainingError
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.worker.memory.resident_blocks import (
    RESERVED_BYTES,
    ResidentBlocks,
    largest_size,
    least,
    resident_blocks,
)
from pipeline.trained_lora.worker.memory.training import TrainingForecast
from pipeline.trained_lora.worker.out_of_memory import out_of_memory_error
from tests.pipeline.trained_lora.runs import run_until

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

GIB = 2**30
NUM_BLOCKS = 8
SHALLOW = {"num_layers": 2, "num_single_layers": 6}
"""FLUX.1 with the published width, but few blocks."""


def recipe_of(folder: Path, **training: Any) -> Recipe:
    values = {
        "datasets": [{"name": "photos", "path": "/data/photos"}],
        "output_dir": "/data/out",
        "model": {"base": str(folder)},
        "training": {"gradient_checkpointing": True, "offload": "auto", **training},
    }
    return recipe_from_mapping("auto", values)


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> WorkerFamily:
    published = next(each for each in PUBLISHED if each.name == "FLUX.1 dev")
    networks = {**published.networks, "transformer": {**published.networks["transformer"], **SHALLOW}}
    return load_family(replace(published, networks=networks).write(tmp_path_factory.mktemp("flux") / "model"))


@cache
def needed_bytes(flux: WorkerFamily, offload: Any) -> int:
    """Return the free memory that `latentline plan` counts for a number of blocks."""
    recipe = recipe_of(flux.model.path)
    forecast = TrainingForecast(flux, recipe, largest_size(recipe))
    return forecast.memory(replace(forecast.variant, offload=offload)).device + RESERVED_BYTES


def test_auto_keeps_as_many_blocks_as_the_free_memory_allows(flux: WorkerFamily) -> None:
    recipe = recipe_of(flux.model.path)
    for offload in ("none", 2, 0):
        resolved = resident_blocks(flux, recipe, needed_bytes(flux, offload))
        assert (resolved.offload, resolved.num_blocks) == (offload, NUM_BLOCKS)
        kept = NUM_BLOCKS if offload == "none" else offload
        assert f"auto keeps {kept} of {NUM_BLOCKS} blocks on the GPU" in resolved.reason
        assert resolved.applied(recipe).training.offload == offload
    fewer = resident_blocks(flux, recipe, needed_bytes(flux, "none") - 1)
    assert fewer.offload == 5, "two slots hold as much as the two blocks that 6 would stream"


def test_auto_uses_the_least_memory_and_warns_if_nothing_fits(flux: WorkerFamily) -> None:
    resolved = resident_blocks(flux, recipe_of(flux.model.path), 2 * GIB)
    assert resolved.offload == 0
    assert resolved.reason.endswith("so memory may run out")


def test_a_number_is_used_as_it_is_and_a_cpu_streams_nothing(flux: WorkerFamily) -> None:
    assert resident_blocks(flux, recipe_of(flux.model.path, offload=3), 2 * GIB) == ResidentBlocks(3)
    on_cpu = resident_blocks(flux, recipe_of(flux.model.path), None)
    assert on_cpu.offload == "none"
    assert "on a CPU" in on_cpu.reason


def test_a_model_without_a_forecast_is_an_error_that_names_what_to_set(
    flux: WorkerFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("aten::unique has no meta implementation")

    monkeypatch.setattr(FluxTransformer2DModel, "forward", forward)
    with pytest.raises(
        TrainingError, match=r"memory cannot be forecast for FLUX\.1: aten::unique"
    ) as excinfo:
        resident_blocks(flux, recipe_of(flux.model.path), 24 * GIB)
    assert excinfo.value.where == "training.offload: auto"
    assert "training.offload to none, or to the number of blocks" in excinfo.value.fix


def _write_least(rank: int, folder: str, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    state = PartialState(cpu=True)
    answers = [least((24 - 8 * rank) * GIB), least(None if rank else 24 * GIB)]
    Path(folder, f"{rank}.json").write_text(json.dumps(answers), encoding="utf-8")
    state.destroy_process_group()


@pytest.mark.slow
def test_all_processes_of_a_run_use_the_memory_of_the_smallest_gpu(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    mp.spawn(_write_least, args=(str(tmp_path), port), nprocs=2)
    answers = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]
    assert answers == [[16 * GIB, None]] * 2


def test_a_run_on_a_cpu_records_that_all_blocks_stay(make_project: Callable[..., Project]) -> None:
    project = make_project(steps=2)
    resident, auto = project.job(), project.changed("auto", offload="auto").job()
    assert run_until(resident)[0]
    finished, lines = run_until(auto)
    assert finished
    assert "training.offload: auto streams no blocks on a CPU" in lines
    layouts = [RunLayout(job.folder) for job in (resident, auto)]
    results = [json.loads(layout.result.read_text(encoding="utf-8")) for layout in layouts]
    assert [result["offload"] for result in results] == ["none", "none"]
    assert results[0]["output_change"] == results[1]["output_change"]


@pytest.mark.slow
def test_the_advice_after_missing_memory_is_to_keep_half_as_many_blocks(flux: WorkerFamily) -> None:
    recipe = recipe_of(flux.model.path)
    for offload, half in (("none", 4), (5, 2)):
        resolved = resident_blocks(flux, recipe, needed_bytes(flux, offload))
        error = out_of_memory_error(recipe, "in the trial step before training", "", resident=resolved)
        assert error.fix.startswith(f"set training.offload: {half}, because auto kept")
    least_memory = resident_blocks(flux, recipe, 2 * GIB)
    assert "training.offload: 0," in out_of_memory_error(recipe, "in step 3", "").fix
    assert "training.offload" not in out_of_memory_error(recipe, "in step 3", "", resident=least_memory).fix
