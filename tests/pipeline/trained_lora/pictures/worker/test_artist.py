"""Drawn pictures equal the previews of training, and those of diffusers with the exported file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.cache.store import Store
from pipeline.encoding.jobs import Encoding, Job, write_encoding
from pipeline.errors import DrawingError
from pipeline.trained_lora.pictures.prepare import Request, prepare_drawing
from pipeline.trained_lora.pictures.worker.artist import prompt_texts
from pipeline.trained_lora.previews import preview_file
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.worker.loader import read_entry
from tests.in_process_worker import InProcessLaunch
from tests.in_process_worker import run as encode
from tests.pipeline.trained_lora.pictures.drawings import (
    InProcessDrawing,
    all_pixels,
    drawn,
    pixels,
)
from tests.pipeline.trained_lora.project import ALL_MODULES, FEW_MODULES, INFERENCE_STEPS, PROMPTS
from tests.pipeline.trained_lora.runs import run, run_folders

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

# numpy 2 deprecates how diffusers' Euler schedule converts a tensor to an array.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

OWN_SETTINGS = {
    "prompt": "a red cat",
    "negative_prompt": "a dog",
    "height": 32,
    "width": 96,
    "steps": 2,
    "guidance_scale": 3.0,
    "seed": 5,
    "lora_scale": 0.5,
}


@pytest.fixture
def train(make_project: Callable[..., Project], any_precision: None) -> Callable[..., Project]:
    """Return a function that trains a project with previews and checkpoints in each of 2 steps."""

    def make(prediction: str = "epsilon", mixed_precision: str = "no", **training: Any) -> Project:
        every_step = {"steps": 2, "gradient_accumulation": 1, "checkpoint_every": 1, "sample_every": 1}
        settings = {"sample_prompts": PROMPTS, "learning_rate": 3e-2, **every_step, **training}
        project = make_project(prediction=prediction, **settings)
        if mixed_precision != "no":
            project = project.changed("other output", mixed_precision=mixed_precision)
        run(project, InProcessLaunch())
        return project

    return make


OWN: dict[str, Any] = {"sample_prompts": [OWN_SETTINGS]}
TEXT = {**FEW_MODULES, "text_encoders": {}}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "plain": ("epsilon", "no", {}),
    "bf16": ("epsilon", "bf16", {}),
    "rslora": ("epsilon", "no", {"lora": {"rank": 3, "alpha": 1.0, "rslora": True, "conv_rank": 2}}),
    "dora": ("epsilon", "no", {"lora": {**FEW_MODULES, "dora": True}}),
    "text": ("epsilon", "no", {"lora": {**FEW_MODULES, "text_encoders": {"rank": 2}}}),
    "text-bf16": ("epsilon", "bf16", {"lora": TEXT}),
    "sdxl": ("sdxl", "no", {"lora": {**ALL_MODULES, "ranks": [{"modules": "*to_k", "rank": 2}]}}),
    "own-settings": ("epsilon", "no", OWN),
    "own-settings-dora": ("epsilon", "no", {**OWN, "lora": {**FEW_MODULES, "dora": True}}),
    "own-settings-sdxl-text-ema": ("sdxl", "no", {**OWN, "lora": TEXT, "ema_decay": 0.5}),
}
"""Base model, precision and settings of training; the last case runs by default."""


@pytest.mark.parametrize(
    ("prediction", "mixed_precision", "training"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if name != "own-settings-sdxl-text-ema" else [], id=name)
        for name, case in CASES.items()
    ],
)
def test_pictures_equal_the_previews_of_their_step_bit_for_bit(
    train: Callable[..., Project], prediction: str, mixed_precision: str, training: dict[str, Any]
) -> None:
    project = train(prediction, mixed_precision, **training)
    job = drawn(project, steps=(1, 2), strengths=(0.0, 1.0))
    samples = RunLayout(run_folders(project)[0]).previews
    for cell in job.cells():
        assert cell.lora.step is not None
        step = cell.lora.step if cell.strength else 0
        preview = pixels(preview_file(samples, step, cell.number))
        # DoRA's magnitudes round the base weights at step 0, strength 0 draws without it.
        if not (cell.strength == 0.0 and training.get("lora", {}).get("dora")):
            assert np.array_equal(pixels(cell.path), preview), cell.path.name
    first, *_, last = all_pixels(job)
    assert not np.array_equal(first, last), "the LoRA changes the picture"


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param({"kind": "loha"}, id="loha"),
        pytest.param({"kind": "lokr"}, id="lokr", marks=pytest.mark.slow),
        pytest.param({"init": "pissa"}, id="pissa", marks=pytest.mark.slow),
    ],
)
def test_pictures_of_a_converted_lora_equal_the_previews_up_to_rounding(
    train: Callable[..., Project], lora: dict[str, Any]
) -> None:
    prompts = [*PROMPTS, {**OWN_SETTINGS, "lora_scale": -1.5}]
    project = train(lora={**FEW_MODULES, **lora}, sample_prompts=prompts, sample_every=2, checkpoint_every=2)
    job = drawn(project, steps=(2,))
    samples = RunLayout(run_folders(project)[0]).previews
    for cell in job.cells():
        preview = pixels(preview_file(samples, 2, cell.number))
        difference = np.abs(pixels(cell.path).astype(int) - preview.astype(int))
        assert difference.max() <= 2
        assert difference.mean() < 0.02


def test_a_strength_multiplies_the_scale_of_a_prompt(trained: Project) -> None:
    prompt = trained.recipe.training.sample_prompts[0]
    prompts = tuple(prompt.model_copy(update={"lora_scale": scale}) for scale in (0.5, 1.0))
    project = trained.changed("output", sample_prompts=prompts)
    job = drawn(project, strengths=(0.0, 0.5, 1.0))
    pictures = {
        (cell.strength, job.prompts[cell.number].lora_scale): pixels(cell.path) for cell in job.cells()
    }
    assert np.array_equal(pictures[1.0, 0.5], pictures[0.5, 1.0])
    assert np.array_equal(pictures[0.0, 0.5], pictures[0.0, 1.0])
    assert not np.array_equal(pictures[1.0, 0.5], pictures[1.0, 1.0])


@pytest.mark.parametrize("option", [None, "dora", "rslora"])
def test_pictures_equal_those_of_diffusers_with_the_exported_file(
    trained: Project, train: Callable[..., Project], option: str | None
) -> None:
    project = train(lora={**FEW_MODULES, option: True}, sample_every=0) if option else trained
    job = drawn(project, strengths=(0.0, 1.0, 0.5, -1.0), seed=11)

    pipeline: Any = diffusers.StableDiffusionPipeline.from_pretrained(job.base, safety_checker=None)
    pipeline.set_progress_bar_config(disable=True)
    store = Store(project.recipe.cache_dir)
    negative = read_entry(store, job.empty_text, "the empty caption")["text_embedding"]
    for cell in sorted(job.cells(), key=lambda cell: cell.strength != 0):
        if cell.strength and not pipeline.get_active_adapters():
            pipeline.load_lora_weights(str(project.recipe.output_dir / "lora"), adapter_name="flowers")
        if cell.strength:
            pipeline.set_adapters("flowers", cell.strength)
        prompt = job.prompts[cell.number]
        pictures = pipeline(
            prompt_embeds=read_entry(store, prompt.text, prompt.caption)["text_embedding"][None],
            negative_prompt_embeds=negative[None],
            height=64,
            width=64,
            num_inference_steps=INFERENCE_STEPS,
            generator=torch.Generator("cpu").manual_seed(11),
        ).images
        difference = np.abs(pixels(cell.path).astype(int) - np.asarray(pictures[0]).astype(int))
        assert difference.max() <= 1, f"{cell.path.name}: more than the rounding of another memory format"
        assert (difference > 0).mean() < 0.001, cell.path.name


def test_pictures_with_references_equal_the_previews_and_those_of_diffusers(
    train: Callable[..., Project], tmp_path: Path
) -> None:
    files = [tmp_path / "before.png", tmp_path / "style.png"]
    noise = np.random.default_rng(1)
    for file, size in zip(files, ((64, 96, 3), (99, 75, 3)), strict=True):
        Image.fromarray(noise.integers(0, 256, size, dtype=np.uint8)).save(file)
    prompts = [{**PROMPTS[0], "references": [str(file) for file in order]} for order in (files, files[::-1])]
    project = train("klein", sample_prompts=[*prompts, PROMPTS[0]], sample_every=2, checkpoint_every=2)
    job = drawn(project)

    samples = RunLayout(run_folders(project)[0]).previews
    for cell in job.cells():
        assert np.array_equal(pixels(cell.path), pixels(preview_file(samples, 2, cell.number)))
    with Image.open(preview_file(samples, 2, 0)) as picture:
        assert picture.info["references"] == "before.png, style.png"

    pipeline: Any = diffusers.Flux2KleinPipeline.from_pretrained(job.base)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_lora_weights(str(project.recipe.output_dir / "lora"))
    store = Store(project.recipe.cache_dir)
    for cell, references in zip(job.cells(), (files, files[::-1], []), strict=True):
        pictures = pipeline(
            image=[Image.open(file) for file in references] or None,
            prompt_embeds=read_entry(store, job.prompts[0].text, "a red cat")["text_embedding"][None],
            negative_prompt_embeds=read_entry(store, job.empty_text, "")["text_embedding"][None],
            height=64,
            width=64,
            num_inference_steps=INFERENCE_STEPS,
            generator=torch.Generator("cpu").manual_seed(7),
        ).images
        difference = np.abs(pixels(cell.path).astype(int) - np.asarray(pictures[0]).astype(int))
        assert difference.max() <= 1
    both, swapped, plain = all_pixels(job)
    assert not np.array_equal(both, swapped)
    assert not np.array_equal(both, plain)

    again = drawn(project, references=tuple(files[::-1]))
    for number, picture in enumerate(all_pixels(again)):
        np.testing.assert_array_equal(picture, swapped, f"picture {number}")
    absent = tmp_path / "absent.png"
    for references, what in (
        ((files[0],) * 5, "at most 4 reference images, got 5"),
        ((absent,), str(absent)),
    ):
        with pytest.raises(DrawingError, match=re.escape(what)) as raised:
            drawn(project, references=references)
        assert raised.value.where == "--reference"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_prompt_outside_of_the_cache_gets_the_values_that_the_cache_would_store(
    trained: Project, tmp_path: Path, dtype: str
) -> None:
    project = trained
    file = project.recipe.output_dir / "lora" / "pytorch_lora_weights.safetensors"
    text = project.recipe.text.model_copy(update={"dtype": dtype, "offload": 0})
    recipe = project.recipe.model_copy(update={"text": text})

    job = prepare_drawing(recipe, Request(file=file, prompts=("a new prompt",)))
    prompt, store = job.prompts[0], Store(recipe.cache_dir)
    texts = prompt_texts(job, "cpu", InProcessDrawing(), scratch=tmp_path)
    assert not store.check(prompt.text).valid, "nothing is stored"

    encoding = Encoding(
        kind="text",
        model_folder=job.base,
        store_root=recipe.cache_dir,
        settings={"compute_dtype": recipe.text.compute_dtype, "offload": "none"},
        jobs=[Job(prompt.text, {"inputs": {}}, {"caption": prompt.caption}, "a prompt", 1)],
    )
    (tmp_path / "encoding").mkdir()
    encode(write_encoding(encoding, tmp_path / "encoding"), InProcessDrawing(), rank=0, num_ranks=1)
    stored = read_entry(store, prompt.text, "a prompt")
    encoded = texts[prompt.text.key]
    assert stored.keys() == encoded.keys()
    for name, tensor in stored.items():
        assert torch.equal(tensor, encoded[name])
