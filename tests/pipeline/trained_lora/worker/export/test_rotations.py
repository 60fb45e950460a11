"""OFT: its files by the formulas of their readers, drawn pictures, resuming, checks, and what it refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import diffusers
import numpy as np
import pytest
import torch
from peft import get_peft_config, set_peft_model_state_dict
from peft.tuners.oft import OFTLayer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.cache.store import Store
from pipeline.errors import DrawingError, TrainingError
from pipeline.images.geometry import Size
from pipeline.models.worker.family import load_family
from pipeline.recipe import LoraSettings
from pipeline.recipe.lora import oft_block_size
from pipeline.reporting.findings import CheckContext
from pipeline.storage.tables import Tables
from pipeline.trained_lora import checks
from pipeline.trained_lora.export.lora_files import ADAPTER_METADATA_KEY, layout_file
from pipeline.trained_lora.previews import preview_file
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.worker.adapter.lora import add_lora, lora_modules
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.loader import read_entry
from pipeline.trained_lora.worker.memory.training import TrainingForecast
from pipeline.trained_lora.worker.optimizers import weight_groups
from tests.pipeline.trained_lora.pictures.drawings import all_pixels, drawn, pixels
from tests.pipeline.trained_lora.project import INFERENCE_STEPS, PROMPTS
from tests.pipeline.trained_lora.runs import outcome, run_folders, run_until
from tests.pipeline.trained_lora.worker.export.test_exporter import Trained

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

# numpy 2 deprecates how diffusers' Euler schedule converts a tensor to an array.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

OFT: dict[str, Any] = {"kind": "oft", "oft_block_size": 12}
"""A block size that divides neither 32 nor 64, the inputs of the tiny UNets' layers."""

PEFT_FILE = layout_file("diffusers", "demo")
COMFYUI_FILE = layout_file("comfyui", "demo")


@pytest.fixture(scope="module")
def oft(finished_once: Callable[..., Project]) -> Project:
    """A finished run, which tests only read."""
    settings = {"steps": 2, "gradient_accumulation": 1, "checkpoint_every": 1, "sample_every": 1}
    prompts = [*PROMPTS, {**PROMPTS[0], "lora_scale": 0.5}]
    return finished_once(**settings, learning_rate=3e-2, sample_prompts=prompts, lora=OFT)


def rotation(numbers: Tensor) -> Tensor:
    """Return the rotation of the inputs (in, in) from the numbers of its blocks, by the published formula."""
    blocks: list[Tensor] = []
    for row in numbers.double():
        size = (1 + math.isqrt(1 + 8 * len(row))) // 2
        upper = torch.zeros(size, size, dtype=torch.double)
        upper[tuple(torch.triu_indices(size, size, 1))] = row
        skew = upper - upper.T
        powers = [torch.linalg.matrix_power(skew, power) for power in range(5)]
        blocks.append(powers[0] + 2 * (powers[1] + powers[2] + powers[3]) + powers[4])
    return torch.block_diag(*blocks)


def test_each_file_holds_the_trained_rotations_under_its_readers_names(
    make_project: Callable[..., Project], tmp_path: Path
) -> None:
    adapted = Trained(make_project(lora=OFT))
    exported = adapted.export(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {PEFT_FILE, COMFYUI_FILE}
    assert [file.max_error for file in exported] == [0.0, 0.0]

    modules = dict(lora_modules(adapted.engine.denoiser))
    names = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    by_peft, by_comfyui = (load_file(tmp_path / name) for name in (PEFT_FILE, COMFYUI_FILE))
    assert len(by_peft) == len(by_comfyui) == len(modules) == 32
    for name, key, tensors in (
        (names, f"unet.{names}.oft_R.weight", by_peft),
        (names, "diffusion_model.middle_block.1.transformer_blocks.0.attn1.to_q.oft_R.weight", by_comfyui),
    ):
        layer = cast("Any", modules[name])
        assert torch.equal(tensors[key], layer.oft_R["default"].weight)
        torch.testing.assert_close(
            rotation(tensors[key]), layer.get_delta_weight("default").double(), rtol=0, atol=1e-5
        )


def test_query_key_and_value_have_their_own_rotations_where_kohya_joins_them(
    make_project: Callable[..., Project], tmp_path: Path
) -> None:
    """ComfyUI translates diffusers' names of this family to parts of its layers."""
    adapted = Trained(make_project(prediction="klein", lora={"kind": "oft"}))
    adapted.export(tmp_path)
    names = [name for name, _ in lora_modules(adapted.engine.denoiser)]
    tensors = load_file(tmp_path / COMFYUI_FILE)
    assert {*tensors} == {f"transformer.{name}.oft_R.weight" for name in names}
    assert len({name.rpartition(".")[2] for name in names} & {"to_q", "to_k", "to_v"}) == 3


def loaded_with_peft(base: Path, file: Path) -> Any:
    """Load a file as docs/outputs.md and the model card show it."""
    pipe: Any = diffusers.StableDiffusionPipeline.from_pretrained(base, safety_checker=None)
    with safe_open(file, "pt") as opened:
        settings = json.loads(opened.metadata()["lora_adapter_metadata"])
        weights = {key.removeprefix("unet."): opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    config = get_peft_config({key.removeprefix("unet."): value for key, value in settings.items()})
    pipe.unet.add_adapter(config)
    set_peft_model_state_dict(pipe.unet, weights)
    return pipe


@pytest.mark.filterwarnings("ignore:Invalid `oft_block_size`:UserWarning")
def test_pictures_equal_previews_and_those_of_diffusers_with_peft_and_of_merged_weights(
    oft: Project,
) -> None:
    job = drawn(oft, strengths=(0.0, 1.0), seed=None)
    samples = RunLayout(run_folders(oft)[0]).previews
    cells = list(job.cells())
    for cell in cells:
        step = 2 if cell.strength else 0
        if cell.strength or job.prompts[cell.number].lora_scale == 1.0:
            assert np.array_equal(pixels(cell.path), pixels(preview_file(samples, step, cell.number)))

    # ComfyUI's extension changes a weight W to W + strength * W (R^T - I).
    lora = oft.recipe.output_dir / "lora"
    with_peft = loaded_with_peft(job.base, lora / PEFT_FILE)
    merged: Any = diffusers.StableDiffusionPipeline.from_pretrained(job.base, safety_checker=None)
    by_name = {
        key.removeprefix("unet.").removesuffix(".oft_R.weight"): numbers
        for key, numbers in load_file(lora / PEFT_FILE).items()
    }
    comfyui = sorted(map(bytes, (each.numpy() for each in load_file(lora / COMFYUI_FILE).values())))
    assert comfyui == sorted(map(bytes, (each.numpy() for each in by_name.values())))
    weights = {name: merged.unet.get_submodule(name).weight.data.clone() for name in by_name}

    store = Store(oft.recipe.cache_dir)
    for cell in cells:
        prompt = job.prompts[cell.number]
        strength = cell.strength * prompt.lora_scale
        for name, numbers in by_name.items():
            change = weights[name].double() @ (rotation(numbers).T - torch.eye(weights[name].shape[1]))
            merged.unet.get_submodule(name).weight.data = (weights[name] + strength * change).float()
        for pipe in (with_peft, merged) if strength == 1.0 else (merged,):
            pipe.set_progress_bar_config(disable=True)
            negative = read_entry(store, job.empty_text, "the empty caption")["text_embedding"]
            picture = pipe(
                prompt_embeds=read_entry(store, prompt.text, prompt.caption)["text_embedding"][None],
                negative_prompt_embeds=negative[None],
                height=64,
                width=64,
                num_inference_steps=INFERENCE_STEPS,
                generator=torch.Generator("cpu").manual_seed(job.seed),
            ).images[0]
            difference = np.abs(pixels(cell.path).astype(int) - np.asarray(picture).astype(int))
            assert difference.max() <= 1, cell.path.name
            assert (difference > 0).mean() < 0.01, cell.path.name
    assert len({picture.tobytes() for picture in all_pixels(job)}) == 2 + 3, "the rotation changes a picture"


def test_the_file_for_comfyui_draws_the_same_pictures_without_its_block_size(
    oft: Project, tmp_path: Path
) -> None:
    lora = oft.recipe.output_dir / "lora"
    expected = all_pixels(drawn(oft, file=lora / PEFT_FILE))
    actual = all_pixels(drawn(oft, file=lora / COMFYUI_FILE))
    assert all(np.array_equal(*pair) for pair in zip(actual, expected, strict=True))

    tensors = load_file(lora / COMFYUI_FILE)
    first = min(tensors)
    for changed, what in (
        ({**tensors, f"{first}_2": tensors[first]}, "1 tensor does not match"),
        ({**tensors, first: tensors[first][:1]}, "not those that peft makes"),
        ({"a.oft_R.weight": tensors[first]}, "no OFT of this base model"),
    ):
        save_file({key: each.clone() for key, each in changed.items()}, tmp_path / "changed.safetensors")
        with pytest.raises(DrawingError, match=what):
            drawn(oft, file=tmp_path / "changed.safetensors")


def test_a_run_that_is_stopped_and_resumed_equals_one_that_is_not(
    make_project: Callable[..., Project],
) -> None:
    settings = {"steps": 4, "checkpoint_every": 2, "lora": OFT, "ema_decay": 0.5}
    whole = make_project(**settings).job()
    run_until(whole)
    parts = make_project(**settings).changed("stopped").job()
    for start, stop in ((0, 1), (1, 3)):
        run_until(parts, stop, start=start)
    run_until(parts, start=3)
    assert outcome(parts) == outcome(whole)


def test_the_checks_pass_and_find_a_changed_and_a_scaled_file(oft: Project) -> None:
    result = {finding.name: finding for finding in checks.run(context(oft))}
    assert [name for name, finding in result.items() if not finding.passed] == []
    assert result["modules_touched"].summary == "32 modules, all changed by their adapters"

    path = oft.recipe.output_dir / "lora" / COMFYUI_FILE
    before = path.read_bytes()
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(path)
    first = min(tensors)
    save_file({**tensors, first: 1.01 * tensors[first]}, path, metadata=metadata)
    rows = {finding.name: finding for finding in checks.run(context(oft))}["reload_equals"].rows
    path.write_bytes(before)
    assert [row["reason"] for row in rows] == [
        "the file changed after the run verified it",
        f"{first} differs from the diffusers layout",
    ]


def context(project: Project) -> CheckContext:
    return CheckContext(project.recipe, Tables(project.recipe.output_dir))


@pytest.mark.parametrize("layout", ["diffusers", "comfyui"])
def test_a_damaged_file_is_found(make_project: Callable[..., Project], tmp_path: Path, layout: Any) -> None:
    adapted = Trained(make_project(lora=OFT))
    adapted.export(tmp_path)
    path = tmp_path / layout_file(layout, "demo")
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(path)
    changes: list[tuple[dict[str, Tensor], dict[str, str]]] = [
        ({key: each * (1 + 1e-6) for key, each in tensors.items()}, metadata)
    ]
    if layout == "diffusers":
        # The same numbers rotate in another way with another number of terms.
        settings = json.loads(metadata[ADAPTER_METADATA_KEY])
        settings["unet.num_cayley_neumann_terms"] = 4
        changes.append((tensors, {**metadata, ADAPTER_METADATA_KEY: json.dumps(settings)}))
    for changed, header in changes:
        save_file(changed, path, metadata=header)
        with pytest.raises(TrainingError, match="differs from the trained one"):
            adapted.exporter.verify(adapted.engine.networks, tmp_path)


@pytest.mark.parametrize("size", [2, 3, 7, 12, 31, 32, 100])
@pytest.mark.parametrize("columns", [32, 36, 49, 64, 97, 320, 1280])
@pytest.mark.filterwarnings("ignore:Invalid `oft_block_size`:UserWarning")
def test_blocks_have_the_size_that_peft_makes(size: int, columns: int) -> None:
    layer = cast("Any", OFTLayer(torch.nn.Linear(columns, 1)))
    adjusted = size if columns % size == 0 else layer.adjust_oft_parameters(columns, size)
    assert oft_block_size(columns, size) == adjusted


def test_the_forecast_counts_the_rotations_their_gradients_and_the_state_of_adamw(
    make_project: Callable[..., Project],
) -> None:
    recipe = make_project(lora=OFT).recipe
    family = load_family(Path(recipe.model.base))
    forecast = TrainingForecast(family, recipe, Size(64, 64))
    memory = forecast.memory(forecast.variant)

    # A weight has its gradient and two numbers of AdamW's state, all of them float32.
    denoiser = cast("Any", family.denoiser.load("float32", "cpu"))
    add_lora(denoiser, recipe.training.lora, targets=family.lora_targets(), seed=1)
    number = sum(
        layer.in_features * (oft_block_size(layer.in_features, 12) - 1) // 2
        for _, layer in cast("Any", lora_modules(denoiser))
    )
    assert memory.trained == 16 * number

    plain = recipe.model_copy(
        update={"training": recipe.training.model_copy(update={"lora": LoraSettings(rank=1)})}
    )
    other = TrainingForecast(family, plain, Size(64, 64))
    assert memory.step > other.memory(other.variant).step, "rotated inputs are kept for the backward pass"


def test_modules_may_have_their_own_learning_rate(make_project: Callable[..., Project]) -> None:
    rates = [{"modules": "*.attn2.*", "learning_rate": 1e-5}]
    project = make_project(lora={**OFT, "learning_rates": rates})
    engine = Engine(project.job(), load_family(Path(project.recipe.model.base)))
    groups = weight_groups(engine.networks, project.recipe.training)
    assert [(len(group["params"]), group.get("lr")) for group in groups] == [(16, None), (16, 1e-5)]


@pytest.mark.parametrize("modules", ["*.conv1", "*.proj_in"])
def test_convolutions_are_refused(tiny_bases: dict[str, Path], modules: str) -> None:
    family = load_family(tiny_bases["epsilon"])
    denoiser = cast("Any", family.denoiser.load("float32", "cpu"))
    lora = LoraSettings(kind="oft", modules=(modules,))
    with pytest.raises(TrainingError, match="is a convolution"):
        add_lora(denoiser, lora, targets=family.lora_targets(), seed=1)


def test_a_layer_with_nothing_to_rotate_is_refused() -> None:
    network = cast("Any", torch.nn.Sequential(torch.nn.Linear(7, 4)))
    lora = LoraSettings(kind="oft", oft_block_size=2, modules=("0",))
    with pytest.raises(TrainingError, match="the closest divisor of its 7 inputs is 1"):
        add_lora(network, lora, targets=[], seed=1)
