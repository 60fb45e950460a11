from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.errors import TrainingError
from pipeline.models.worker.family import load_family
from pipeline.recipe import LoraSettings, recipe_from_mapping
from pipeline.recipe.project import project_root
from pipeline.trained_lora.export.lora_files import (
    ADAPTER_METADATA_KEY,
    LAYOUTS,
    LoraFile,
    LoraModule,
    layout_file,
)
from pipeline.trained_lora.fingerprint import run_facts
from pipeline.trained_lora.start_file import require_start_file
from pipeline.trained_lora.worker.adapter.lora import adapter_state
from pipeline.trained_lora.worker.adapter.warm_start import file_scale, unmatched_keys, without_zero_modules
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.export.exporter import Exporter
from tests.pipeline.trained_lora.adapters import delta_weights

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

KINDS = {"plain": {}, "dora": {"dora": True}, "locon": {"conv_rank": 2}}


def settings(**lora: Any) -> LoraSettings:
    path = lora.pop("start_from", None)
    return LoraSettings.model_validate_json(json.dumps({"rank": 4, "alpha": 2.0, **lora})).model_copy(
        update={"start_from": path}
    )


def engine(project: Project, **lora: Any) -> Engine:
    job = project.changed("started", lora=settings(**lora)).job()
    return Engine(job, load_family(job.base))


def files(project: Project, folder: Path, **lora: Any) -> Engine:
    """Export a trained adapter to `folder` and return its engine."""
    source = engine(project, **lora)
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in source.weights:
            weight.copy_(weight + 0.2 * torch.rand(weight.shape, generator=rng))
    Exporter(load_family(project.job().base), "demo", {}).export(source.networks, folder)
    return source


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_start_from_any_layout_has_the_effect_of_the_file(
    make_project: Callable[..., Project], tmp_path: Path, kind: str
) -> None:
    project, lora = make_project(), KINDS[kind]
    source = files(project, tmp_path / "lora", **lora).denoiser
    expected, expected_deltas = adapter_state(source), delta_weights(source)
    for layout in LAYOUTS:
        path = tmp_path / "lora" / layout_file(layout, "demo")
        require_start_file(project.changed("started", lora=settings(start_from=path, **lora)).recipe)
        started = engine(project, start_from=path, **lora).denoiser
        assert set(adapter_state(started)) == set(expected)
        for name, delta in delta_weights(started).items():
            torch.testing.assert_close(delta, expected_deltas[name], rtol=1e-6, atol=1e-7)
        for name, weight in adapter_state(started).items():
            if layout == "diffusers" or "lora_magnitude_vector" in name:
                torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-7)


def test_another_alpha_rescales_the_weights_and_half_precision_files_are_read(
    make_project: Callable[..., Project], tmp_path: Path
) -> None:
    project = make_project()
    source = files(project, tmp_path / "lora")
    path = tmp_path / "lora" / layout_file("kohya", "demo")
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    started = engine(project, start_from=path, alpha=16.0)
    expected = delta_weights(source.denoiser)
    for name, delta in delta_weights(started.denoiser).items():
        torch.testing.assert_close(
            delta, expected[name], rtol=0, atol=0.02 * float(expected[name].abs().max())
        )
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(tmp_path / "lora" / layout_file("diffusers", "demo")), bare)
    unscaled = delta_weights(engine(project, start_from=bare).denoiser)
    for name, delta in unscaled.items():  # diffusers applies a file without alpha at scale 1
        torch.testing.assert_close(delta, 2 * expected[name])


def test_a_module_that_has_learned_nothing_is_part_of_the_start(
    make_project: Callable[..., Project], tmp_path: Path
) -> None:
    project = make_project()
    source = files(project, tmp_path / "lora")
    path = tmp_path / "lora" / layout_file("kohya", "demo")
    tensors = load_file(path)
    key = min(name for name in tensors if name.endswith("lora_up.weight"))
    tensors[key] = torch.zeros_like(tensors[key])
    save_file(tensors, path)
    expected, actual = (
        adapter_state(source.denoiser),
        adapter_state(engine(project, start_from=path).denoiser),
    )
    unequal = [name for name, weight in actual.items() if not torch.allclose(weight, expected[name])]
    assert len(unequal) == 1, f"only the up matrix of {key} is zero: {unequal}"
    assert not actual[unequal[0]].any()


def test_a_file_of_another_adapter_is_an_error_that_lists_the_differences(
    make_project: Callable[..., Project], tmp_path: Path
) -> None:
    project = make_project()
    files(project, tmp_path / "lora", **KINDS["locon"])
    path = tmp_path / "lora" / layout_file("comfyui", "demo")
    for lora, message in (
        ({}, "in_layers.2.lora_down.weight: the adapter has no such tensor"),
        ({"conv_rank": 3}, "the adapter has (3, 32, 3, 3), the file (2, 32, 3, 3)"),
        ({"conv_rank": 2, "targets": "blocks"}, "the file no such tensor"),
    ):
        with pytest.raises(TrainingError) as excinfo:
            engine(project, start_from=path, **lora)
        assert message in excinfo.value.where
        assert "read in the comfyui layout" in excinfo.value.what
    path.write_bytes(b"no such thing")
    with pytest.raises(TrainingError, match="cannot be read"):
        engine(project, start_from=path)


def test_the_run_depends_on_the_file_s_bytes_and_not_on_its_path(
    make_project: Callable[..., Project], tmp_path: Path
) -> None:
    project = make_project()
    for name, text in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / name).write_text(text)

    def facts(path: Path | None) -> Any:
        changed = project.changed("facts", lora=settings(start_from=path))
        return run_facts(changed.recipe, RecipeEntries(changed.recipe), changed.job().inputs)

    assert facts(tmp_path / "a") == facts(tmp_path / "b")
    assert facts(tmp_path / "a") != facts(tmp_path / "c"), "files with other bytes"
    assert facts(None) not in (facts(tmp_path / "a"), facts(tmp_path / "c")), "no file"
    with pytest.raises(TrainingError, match="cannot be read"):
        facts(tmp_path / "absent")


def test_the_path_is_relative_to_the_project_root(tmp_path: Path) -> None:
    values = {"datasets": [{"name": "p", "path": "p"}], "output_dir": "o", "model": {"base": "a/b"}}
    recipe = recipe_from_mapping(
        "x", {**values, "training": {"lora": {"start_from": "outputs/x.safetensors"}}}
    )
    assert recipe.training.lora.start_from == project_root() / "outputs" / "x.safetensors"


QUERY = LoraModule(
    name="to_q",
    diffusers="unet.to_q",
    kohya="lora_unet_to_q",
    comfyui="diffusion_model.to_q",
    in_features=4,
    out_features=3,
    rank=2,
    alpha=3.0,
)


def file_of(tensors: dict[str, torch.Tensor], **metadata: str) -> LoraFile:
    return LoraFile(Path("lora"), 0, 0, metadata, tensors)  # pyright: ignore[reportArgumentType] - as torch reads it


@pytest.mark.parametrize("endings", [("lora_down", "lora_up"), ("lora_A", "lora_B")], ids=str)
def test_modules_without_an_adapter_are_ignored_only_if_they_have_no_effect(endings: tuple[str, str]) -> None:
    down, up = endings
    layout: Any = "kohya" if up == "lora_up" else "diffusers"
    own = QUERY.kohya if layout == "kohya" else QUERY.diffusers
    zero, one = torch.zeros(3, 2), torch.ones(3, 2)
    tensors = {
        f"{own}.{down}.weight": torch.ones(2, 4),
        f"{own}.{up}.weight": zero,
        f"x.zero.{down}.weight": one,
        f"x.zero.{up}.weight": zero,
        "x.zero.alpha": torch.ones(()),
        f"x.zero2.{down}.weight": one,
        f"x.zero2.{up}.weight": one,
        f"x.dora.{down}.weight": one,
        f"x.dora.{up}.weight": zero,
        "x.dora.dora_scale": one,
        f"x.peft.{up}.weight": zero,
        "x.peft.lora_magnitude_vector": one,
    }
    kept = without_zero_modules(file_of(tensors), [QUERY], layout).tensors
    assert set(tensors) - set(kept) == {name for name in tensors if name.startswith("x.zero.")}


def test_keys_that_file_and_adapter_do_not_share_are_listed_without_alphas() -> None:
    shapes = QUERY.shapes("kohya")
    tensors = {key: torch.zeros(shape) for key, shape in shapes.items()}
    assert unmatched_keys(file_of(tensors), [QUERY], "kohya") == []
    without_alpha = {key: tensor for key, tensor in tensors.items() if not key.endswith(".alpha")}
    assert unmatched_keys(file_of({**without_alpha, "b.alpha": torch.ones(())}), [QUERY], "kohya") == []
    down = "lora_unet_to_q.lora_down.weight"
    other = {**tensors, down: torch.zeros(1, 4), "b.lora_up.weight": torch.zeros(1)}
    assert unmatched_keys(file_of(other), [QUERY], "kohya") == ["b.lora_up.weight", down]


def test_the_scale_of_a_file_without_alpha_is_one() -> None:
    tensors = {key: torch.full(shape, 3.0) for key, shape in QUERY.shapes("kohya").items()}
    assert file_scale(file_of(tensors), QUERY, "kohya") == 1.5
    del tensors["lora_unet_to_q.alpha"]
    assert file_scale(file_of(tensors), QUERY, "kohya") == 1.0
    adapter = json.dumps({"unet.r": 2, "unet.lora_alpha": 5.0})
    assert file_scale(file_of({}, **{ADAPTER_METADATA_KEY: adapter}), QUERY, "diffusers") == 2.5
    assert file_scale(file_of({}), QUERY, "diffusers") == 1.0
