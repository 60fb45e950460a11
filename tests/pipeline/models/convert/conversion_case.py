"""Conversion of a tiny model from a single file in its original layout, compared value by value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from pipeline.models.convert.contents import read_contents
from pipeline.models.convert.convert import Choices, Plan, convert, plan_conversion
from pipeline.models.convert.job import read_job
from pipeline.models.convert.worker.components import convert_components
from pipeline.models.diffusers_folder import index_file
from pipeline.models.worker.family import WorkerFamily
from pipeline.processes.launch import Meanwhile
from tests.pipeline.models.convert.state_dicts import State, weights

Originals = Callable[[Path], State]


def convert_in_process(module: str, order: Path, meanwhile: Meanwhile | None = None) -> None:
    """Convert in this process; see `Launch`."""
    assert module == "pipeline.models.convert.worker"
    convert_components(read_job(order), lambda done, total, text: None)


def as_file(path: Path, state: Mapping[str, torch.Tensor], *, prefix: str = "", **metadata: str) -> Path:
    save_file({prefix + name: each.contiguous() for name, each in state.items()}, path, metadata or None)
    return path


def planned(file: Path, like: Path, choices: Choices | None = None) -> Plan:
    chosen = choices or Choices(reference=str(like))
    return plan_conversion(read_contents(file), file.parent / "converted", chosen)


def require_same(folder: Path, model: Path, roles: tuple[str, ...], dtype: torch.dtype | None = None) -> None:
    """Assert that the components in `folder` have the tensors of `model`, in `dtype` or unchanged."""
    for role in roles:
        actual, expected = weights(folder / role), weights(model / role)
        assert actual.keys() == expected.keys(), role
        for name, tensor in expected.items():
            assert actual[name].dtype == (dtype or tensor.dtype), (role, name)
            assert torch.equal(actual[name], tensor.to(actual[name].dtype)), (role, name)
        assert (folder / role / "config.json").read_bytes() == (model / role / "config.json").read_bytes()


def check_conversion(model: Path, state: State, roles: tuple[str, ...], *, prefix: str = "") -> WorkerFamily:
    """Convert a file with `state`, check that the folder equals `model`, and return its family."""
    file = as_file(model.parent / "single.safetensors", state, prefix=prefix)
    plan = planned(file, model)
    assert set(plan.parts) == set(roles)
    family = convert(plan, launch=convert_in_process)
    require_same(plan.folder, model, roles)
    for role in plan.copied:
        for copy in (plan.folder / role).iterdir():
            assert copy.read_bytes() == (model / role / copy.name).read_bytes()
    used = {role for role in family.spec.components if (model / role).is_dir()}
    assert {each.name for each in plan.folder.iterdir()} == used | {index_file(model).name}
    assert not plan.building.exists()
    return family
