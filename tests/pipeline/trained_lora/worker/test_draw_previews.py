from __future__ import annotations

import gc
import json
import os
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.cache.local_folder import LocalFolder
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.store import Store
from pipeline.images.geometry import Size
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.models.worker.inference import PictureSettings
from pipeline.models.worker.loading import unpacked_weight
from pipeline.processes.launch import LocalLaunch
from pipeline.recipe import NoiseSettings, Recipe
from pipeline.storage.atomic import write_text
from pipeline.storage.tables import frame
from pipeline.trained_lora.export.model_card import model_card
from pipeline.trained_lora.previews import PROMPT_KEY, read_previews
from pipeline.trained_lora.provenance import provenance, shareable
from pipeline.trained_lora.worker.draw_previews import draw_previews, load_drawing_pipeline
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.loader import MicroBatchMaker, read_entry
from pipeline.trained_lora.worker.noise import make_noise_scheduler
from tests.pipeline.packs_case import pack_everything
from tests.pipeline.trained_lora.project import FEW_MODULES, INFERENCE_STEPS, PROMPTS
from tests.tensor_differences import differing_tensors

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


def test_previews_are_drawn_from_cached_captions_and_do_not_change_training(
    make_project: Callable[..., Project],
) -> None:
    job = make_project(sample_every=2).job()
    job = replace(job, prompts=tuple(replace(prompt, steps=2) for prompt in job.prompts))
    family = load_family(job.base)
    engine = Engine(job, family)
    warnings: list[str] = []
    first = draw_previews(job, family, engine, step=2, warn=warnings.append)
    assert warnings == []
    assert [path.name for path in first] == ["step-00000002-00.png", "step-00000002-01.png"]
    assert engine.denoiser.training
    with Image.open(first[0]) as picture:
        assert picture.size == (96, 32)  # PIL: width, height; the first sample's bucket is 32x96
        assert picture.info[PROMPT_KEY] == job.prompts[0].caption
    again = draw_previews(job, family, engine, step=4, warn=warnings.append)
    pixels = [np.asarray(Image.open(path)) for path in (first[0], again[0])]
    assert np.array_equal(*pixels)
    with torch.no_grad():
        for weight in engine.weights:
            weight.add_(0.3)
    adapted = draw_previews(job, family, engine, step=6, warn=warnings.append)
    assert not np.array_equal(pixels[0], np.asarray(Image.open(adapted[0])))


def test_previews_and_training_read_the_headers_of_packs_once(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_project(sample_every=2, sample_prompts=PROMPTS)
    pack_everything(project.recipe.cache_dir)
    job = project.job()
    family = load_family(job.base)
    engine = Engine(job, family)
    read, headers = LocalFolder.read_range, list[str]()

    def record(folder: LocalFolder, name: str, start: int, end: int) -> bytes:
        headers.extend([name] if start == 0 else [])
        return read(folder, name, start, end)

    monkeypatch.setattr(LocalFolder, "read_range", record)
    MicroBatchMaker(job, family, engine.noise_scheduler).make(0, job.plan()[0].slots()[:1])
    for step in (2, 4):
        assert len(draw_previews(job, family, engine, step=step, warn=print)) == 2
    assert len(headers) == len(set(headers))
    assert {name.split("/")[1] for name in headers} == {"latents", "text"}


def test_R09_a_preview_that_fails_is_a_warning(make_project: Callable[..., Project]) -> None:
    job = make_project(sample_every=2, sample_prompts=PROMPTS).job()
    family = load_family(job.base)
    engine = Engine(job, family)
    Store(job.recipe.cache_dir).path(job.prompts[0].text).unlink()
    warnings: list[str] = []
    assert draw_previews(job, family, engine, step=2, warn=warnings.append) == []
    assert len(warnings) == 1
    assert "step 2" in warnings[0]
    assert engine.denoiser.training


@pytest.mark.slow
def test_previews_are_decoded_in_tiles_and_bfloat16_after_memory_ran_out(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_project(sample_every=2, sample_prompts=PROMPTS).job()
    family = load_family(job.base)
    engine = Engine(job, family)
    load, attempts = family.vae.load, list[tuple[str, Any]]()

    def without_memory_for_float32(dtype: str, device: str) -> Any:
        """Load a VAE whose float32 kind has memory for one picture only."""
        vae = load(dtype, device)
        decoded: list[None] = []

        def count(*_: Any) -> None:
            decoded.append(None)
            if dtype == "float32" and len(decoded) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")

        vae.decoder.register_forward_pre_hook(count)
        attempts.append((dtype, vae))
        return vae

    monkeypatch.setattr(family.vae, "load", without_memory_for_float32)
    warnings: list[str] = []
    files = draw_previews(job, family, engine, step=2, warn=warnings.append)
    assert warnings == []
    assert [path.name for path in files] == ["step-00000002-00.png", "step-00000002-01.png"]
    assert [(dtype, vae.use_tiling) for dtype, vae in attempts] == [("float32", False), ("bfloat16", True)]
    assert [path.name for path in files if np.asarray(Image.open(path)).std() == 0] == [], "of one colour"


@pytest.mark.parametrize("fails", [False, True])
def test_the_vae_is_loaded_once_for_all_previews_and_then_released(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    job = make_project(sample_every=2, sample_prompts=PROMPTS).job()
    family = load_family(job.base)
    engine = Engine(job, family)
    load, loaded = family.vae.load, list[weakref.ref[Any]]()

    def remembered(*arguments: Any) -> Any:
        vae = load(*arguments)
        loaded.append(weakref.ref(vae))
        return vae

    monkeypatch.setattr(family.vae, "load", remembered)
    if fails:
        Store(job.recipe.cache_dir).path(job.prompts[1].text).unlink()
    drawn = draw_previews(job, family, engine, step=2, warn=print)
    assert len(drawn) == (1 if fails else 2)
    assert [vae() for vae in loaded] == [None]


def test_deleting_the_pipeline_releases_its_vae(make_project: Callable[..., Project]) -> None:
    pipeline = load_family(make_project().job().base).drawing.load_pipeline(dtype="float32", device="cpu")
    vae = weakref.ref(pipeline.vae)
    gc.disable()
    try:
        del pipeline
        assert vae() is None
    finally:
        gc.enable()


def test_the_recipe_s_prompts_are_drawn_as_squares(make_project: Callable[..., Project]) -> None:
    job = make_project(sample_every=2, sample_prompts=["a red cat"]).job()
    assert [(prompt.caption, prompt.size_hw) for prompt in job.prompts] == [("a red cat", (64, 64))]


def test_previews_are_decoded_in_float32_although_training_uses_half_precision(
    make_project: Callable[..., Project],
) -> None:
    """SDXL's VAE overflows in float16, which draws a black picture."""
    job = make_project(sample_every=2, sample_prompts=PROMPTS).job()
    family = load_family(job.base)
    pipeline = family.drawing.load_pipeline(dtype="float32", device="cpu")
    dtypes: list[torch.dtype] = []
    pipeline.vae.decoder.mid_block.resnets[0].conv1.register_forward_hook(
        lambda module, inputs, output: dtypes.append(output.dtype)
    )
    text = read_entry(Store(job.recipe.cache_dir), job.prompts[0].text, "a prompt")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        family.drawing.draw(pipeline, text, text, PictureSettings(Size(64, 64), steps=1, seed=0))
    assert dtypes == [torch.float32]


def test_a_quantised_weight_does_not_decide_the_dtype() -> None:
    network = torch.nn.Module()
    network.packed = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    network.bias = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    assert unpacked_weight(network).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "lora",
    [
        {"dora": True},
        {"text_encoders": {}},
        *(pytest.param(lora, marks=pytest.mark.slow) for lora in ({}, {"init": "pissa"}, {"kind": "lokr"})),
    ],
    ids=str,
)
def test_a_lora_scale_changes_the_preview_alone(
    make_project: Callable[..., Project], lora: dict[str, Any]
) -> None:
    """Scale 0 draws the base model, and the adapter is afterwards as before, trainable weights included."""
    prompts = [{"prompt": "a red cat", "steps": 2, "lora_scale": scale} for scale in (0.0, 1.0, -1.0)]
    settings = {"lora": {**FEW_MODULES, **lora}, "sample_prompts": prompts}
    job = make_project(sample_every=2, **settings).job()
    family = load_family(job.base)
    engine = Engine(job, family)
    base, *_ = previews = draw_previews(job, family, engine, step=0, warn=print)
    with torch.no_grad():
        for weight in engine.weights:
            weight.add_(0.3)

    def trained_names() -> list[str]:
        return [
            name
            for network in engine.networks.values()
            for name, weight in network.named_parameters()
            if weight.requires_grad
        ]

    before, state = trained_names(), engine.state(0).adapter
    drawn = draw_previews(job, family, engine, step=2, warn=print)
    assert len(previews) == len(drawn) == 3
    assert trained_names() == before
    assert differing_tensors(engine.state(0).adapter, state) == []
    zero, one, opposite = (np.asarray(Image.open(path)).astype(int) for path in drawn)
    expected = np.asarray(Image.open(base)).astype(int)
    assert np.abs(zero - expected).max() <= (1 if lora.get("init") else 0)
    assert not np.array_equal(one, expected)
    assert not np.array_equal(opposite, one)
    again = draw_previews(job, family, engine, step=4, warn=print)
    assert np.array_equal(np.asarray(Image.open(again[1])), one)


def test_a_preview_states_its_settings_in_text_chunks(make_project: Callable[..., Project]) -> None:
    own = {
        "prompt": "a red cat",
        "negative_prompt": "a dog",
        "steps": 2,
        "seed": 3,
        "height": 32,
        "width": 64,
    }
    job = make_project(sample_every=2, sample_prompts=[own]).job()
    family = load_family(job.base)
    [path] = draw_previews(job, family, Engine(job, family), step=0, warn=print)
    with Image.open(path) as picture:
        assert picture.size == (64, 32)
        stated = {"prompt": "a red cat", "negative_prompt": "a dog", "steps": "2", "seed": "3"}
        assert dict(picture.info) == {**stated, "height": "32", "width": "64"}
    [preview] = read_previews(path.parent)
    assert preview.heading == job.prompts[0].heading


SCHEDULERS: dict[str, dict[str, Any]] = {
    "PNDMScheduler": {"skip_prk_steps": True},
    "EulerDiscreteScheduler": {"timestep_spacing": "leading"},
    "DDIMScheduler": {"clip_sample": False, "set_alpha_to_one": False},
    "UniPCMultistepScheduler": {"timestep_spacing": "linspace"},
    "DDPMScheduler": {"clip_sample": False, "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"},
}
"""Schedulers of base models, with settings that decide how they draw."""


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_R13_pictures_are_drawn_on_the_schedule_of_training(
    make_project: Callable[..., Project], tmp_path: Path, kind: str
) -> None:
    project = make_project(prediction="v_prediction", noise={"zero_terminal_snr": True})
    base = tmp_path / "base"
    shutil.copytree(project.job().base, base, copy_function=os.link)
    index = json.loads((base / "model_index.json").read_text("utf-8"))
    write_text(base / "model_index.json", json.dumps({**index, "scheduler": ["diffusers", kind]}))
    schedule = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
    config = {"_class_name": kind, "prediction_type": "v_prediction", **schedule, **SCHEDULERS[kind]}
    write_text(base / "scheduler" / "scheduler_config.json", json.dumps(config))
    family = load_family(base)
    denoiser = family.denoiser.load("float32", "cpu")
    plain = project.recipe.training.model_copy(update={"noise": NoiseSettings()})

    def scheduler_of(recipe: Recipe) -> Any:
        return load_drawing_pipeline(
            family, recipe, denoiser=denoiser, dtype="float32", device="cpu"
        ).scheduler

    drawing, training = scheduler_of(project.recipe), make_noise_scheduler(family, project.recipe.training)
    assert training.alphas_cumprod[-1] == 0.0
    torch.testing.assert_close(drawing.alphas_cumprod, training.alphas_cumprod, rtol=0, atol=0)
    drawing.set_timesteps(3)
    assert drawing.timesteps[0] == 999
    assert (drawing.config.prediction_type, drawing.config.clip_sample) == ("v_prediction", False)

    # Without the setting, the base model's own scheduler draws.
    own = scheduler_of(project.recipe.model_copy(update={"training": plain}))
    assert type(own).__name__ == kind
    assert {name: own.config[name] for name in SCHEDULERS[kind]} == SCHEDULERS[kind]


# Several schedulers of diffusers convert tensors with an interface that NumPy 2 deprecates.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "is_replaced"),
    [
        ("PNDMScheduler", True),
        ("HeunDiscreteScheduler", True),
        ("LMSDiscreteScheduler", True),
        ("DEISMultistepScheduler", True),
        ("DPMSolverSinglestepScheduler", True),
        ("DDIMScheduler", False),
        ("EulerDiscreteScheduler", False),
        ("UniPCMultistepScheduler", False),
    ],
)
def test_R13_zero_snr_of_a_base_whose_scheduler_ignores_it_is_drawn_and_on_the_card(
    make_project: Callable[..., Project], tmp_path: Path, kind: str, is_replaced: bool
) -> None:
    project = make_project(prediction="v_prediction")
    base = tmp_path / "base"
    shutil.copytree(project.job().base, base, copy_function=os.link)
    index = json.loads((base / "model_index.json").read_text("utf-8"))
    write_text(base / "model_index.json", json.dumps({**index, "scheduler": ["diffusers", kind]}))
    config_file = base / "scheduler" / "scheduler_config.json"

    def family_with(**changes: Any) -> WorkerFamily:
        schedule = {
            "beta_start": 0.00085,
            "beta_end": 0.012,
            "beta_schedule": "scaled_linear",
            "steps_offset": 1,
            "clip_sample": False,
        }
        config = {"_class_name": kind, "prediction_type": "v_prediction", **schedule, **changes}
        write_text(config_file, json.dumps(config))
        return load_family(base)

    family = family_with(rescale_betas_zero_snr=True)
    training = make_noise_scheduler(family, project.recipe.training)
    assert training.alphas_cumprod[-1] == 0.0
    assert family.loses_zero_snr is is_replaced
    denoiser = family.denoiser.load("float32", "cpu")

    def scheduler_of(family: WorkerFamily) -> Any:
        recipe = project.recipe
        pipeline = load_drawing_pipeline(family, recipe, denoiser=denoiser, dtype="float32", device="cpu")
        return pipeline.scheduler

    drawing = scheduler_of(family)
    assert type(drawing).__name__ == ("DDIMScheduler" if is_replaced else kind)
    assert drawing.alphas_cumprod[-1] < 1e-7
    drawing.set_timesteps(3)
    assert not is_replaced or drawing.timesteps[0] == 999

    # The card has the same lines, from the record of the run.
    model = project.recipe.model.model_copy(update={"base": str(base)})
    recipe = project.recipe.model_copy(update={"model": model})
    record = provenance(recipe, RecipeEntries(recipe), {}, frame("trained_lora", []))
    card = model_card(record, steps=6, headings=[], has_sheet=False)
    assert ("DDIMScheduler.from_config" in card) is is_replaced
    assert ("| noise schedule | zero terminal SNR |" in card) is is_replaced

    # A model that predicts noise cannot be drawn from no signal at all.
    for changes in ({}, {"rescale_betas_zero_snr": True, "prediction_type": "epsilon"}):
        other = family_with(**changes)
        assert not other.loses_zero_snr
        assert type(scheduler_of(other)).__name__ == kind


def test_R13_a_preview_of_zero_snr_equals_the_picture_of_the_card_s_code(
    make_project: Callable[..., Project],
) -> None:
    settings = {"sample_every": 2, "sample_prompts": PROMPTS[:1], "noise": {"zero_terminal_snr": True}}
    project = make_project(prediction="v_prediction", **settings)
    job = project.job()
    family = load_family(job.base)
    record = {
        "recipe": shareable(project.recipe),
        "model": {"base": str(job.base)},
        "samples": {"number": 8},
    }
    card = model_card(record, steps=6, headings=[], has_sheet=False)
    code = card.partition("```python\n")[2].partition("```")[0]

    # A fresh adapter changes nothing, so the code is run without its last line, which loads the LoRA.
    names: dict[str, Any] = {}
    exec(code.replace('pipe.load_lora_weights("<this folder>")', ""), names)
    pipe = names["pipe"]
    pipe.set_progress_bar_config(disable=True)

    # The embeddings of this project are random numbers, not those of the text encoder.
    text, empty = (
        read_entry(job.store, entry, "a prompt")["text_embedding"][None]
        for entry in (job.prompts[0].text, job.empty_text)
    )
    drawn = pipe(
        prompt_embeds=text,
        negative_prompt_embeds=empty,
        height=64,
        width=64,
        num_inference_steps=INFERENCE_STEPS,
        guidance_scale=family.spec.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(job.recipe.training.seed),
    ).images[0]
    (file,) = draw_previews(job, family, Engine(job, family), step=2, warn=print)
    difference = np.asarray(Image.open(file)).astype(int) - np.asarray(drawn)
    assert abs(difference).max() <= 1


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_processes_divide_the_previews_and_report_all_failures(make_project: Callable[..., Project]) -> None:
    job = make_project(sample_every=2).changed("two", num_processes=2).job()
    four = [replace(prompt, steps=1) for prompt in (*job.prompts, *job.prompts)]
    job = replace(job, prompts=tuple(four))
    file = job.write()
    LocalLaunch(job.recipe.accelerate)("tests.pipeline.trained_lora.worker.divided_previews", file)
    ranks = [json.loads(file.with_name(f"rank-{rank}.json").read_text()) for rank in (0, 1)]

    assert [rank.pop("drawn") for rank in ranks] == [2, 2]
    assert ranks[0] == ranks[1]
    assert ranks[0]["files"] == [f"step-00000000-{number:02d}.png" for number in (0, 1, 2)]
    (warning,) = ranks[0]["warnings"]
    assert "the second process draws no second picture" in warning
