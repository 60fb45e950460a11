"""Unsupported objectives are rejected; supported ones equal the papers' formulas."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from torch.nn.functional import huber_loss

from demo.tiny_models import TINY
from pipeline.errors import TrainingError
from pipeline.images.geometry import Size
from pipeline.models.worker.family import load_family
from pipeline.recipe import TrainingSettings
from pipeline.trained_lora.supported_settings import (
    require_objective,
    require_replaceable_shift,
    require_text_encoders,
    require_trackers,
    training_warnings,
)
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.loader import MicroBatchMaker
from pipeline.trained_lora.worker.noise import make_noise_scheduler
from tests.command_line import latentline
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.trained_lora.project import project_in
from tests.pipeline.trained_lora.runs import run
from tests.pipeline.trained_lora.worker.engine_steps import engine_of, one_step
from tests.tiny_models import TinyModel

if TYPE_CHECKING:
    from pipeline.models.families import Prediction
    from tests.pipeline.trained_lora.project import Project


@pytest.mark.parametrize(
    ("training", "prediction", "key"),
    [
        ({"noise": {"zero_terminal_snr": True}}, "epsilon", "training.noise.zero_terminal_snr"),
        ({"noise": {"zero_terminal_snr": True}}, "flow", "training.noise.zero_terminal_snr"),
        ({"noise": {"offset": 0.1}}, "flow", "training.noise.offset"),
        ({"loss": {"weighting": "min_snr"}}, "flow", "training.loss.weighting"),
        ({"timesteps": {"shift": 3.0}}, "epsilon", "training.timesteps.shift"),
    ],
    ids=str,
)
def test_a_setting_that_does_not_apply_to_the_model_is_an_error_that_names_its_key(
    training: dict[str, Any], prediction: Prediction, key: str
) -> None:
    settings = TrainingSettings.model_validate(training)
    with pytest.raises(TrainingError) as excinfo:
        require_objective(settings, prediction)
    assert excinfo.value.where == key


@pytest.mark.parametrize(
    ("kind", "training", "key"),
    [
        (
            "Stable Diffusion 1.x and 2.x",
            {"noise": {"zero_terminal_snr": True}},
            "training.noise.zero_terminal_snr",
        ),
        ("Stable Diffusion XL", {"timesteps": {"shift": 3.0}}, "training.timesteps.shift"),
        ("FLUX.1 dev", {"noise": {"offset": 0.1}}, "training.noise.offset"),
        ("Z-Image", {"loss": {"weighting": "debiased"}}, "training.loss.weighting"),
        ("Sana", {"lora": {"text_encoders": {}}}, "training.lora.text_encoders"),
        ("Lumina Image 2", {"lora": {"kind": "oft"}}, "training.lora.kind"),
        ("Lumina Image 2", {"lora": {"kind": "lokr", "native_file": True}}, "training.lora.native_file"),
        ("Ideogram 4", {"timesteps": {"shift": 3.0}}, "training.timesteps.shift"),
    ],
)
def test_validate_names_each_setting_that_the_base_model_does_not_support(
    tmp_path: Path, tiny_model: TinyModel, kind: str, training: dict[str, Any], key: str
) -> None:
    (tmp_path / "photos").mkdir()
    values: dict[str, Any] = {
        "datasets": [{"name": "photos", "path": str(tmp_path / "photos")}],
        "cache_dir": str(tmp_path / "cache"),
        "output_dir": str(tmp_path / "out"),
        "model": {"base": str(tiny_model(kind))},
    }
    file = tmp_path / "flowers.yaml"
    file.write_text(json.dumps(values))
    completed = latentline("validate", str(file))
    assert completed.returncode == 0, completed.stderr
    file.write_text(json.dumps({**values, "training": training}))
    completed = latentline("validate", str(file))
    assert completed.returncode == 1
    assert completed.stderr.startswith("TrainingError: ")
    assert f"where: {key}\n" in completed.stderr


def test_guidance_of_the_recipe_reaches_the_denoiser_of_a_distilled_model(
    tmp_path: Path, tiny_model: TinyModel
) -> None:
    scales = list[float]()
    for guidance in (1.0, 3.5):
        folder = tmp_path / str(guidance)
        bases = {"flux": tiny_model("FLUX.1 dev")}
        job = project_in(folder, bases, prediction="flux", steps=1, guidance=guidance).job()
        engine = engine_of(job)
        engine.denoiser.register_forward_pre_hook(
            lambda _module, _arguments, named: scales.extend(named["guidance"].tolist()), with_kwargs=True
        )
        num_before = len(scales)
        one_step(engine, job, 0)
        assert set(scales[num_before:]) == {guidance}


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "flow"])
def test_default_settings_are_valid_for_every_model(prediction: Prediction) -> None:
    require_objective(TrainingSettings(), prediction)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize(
    "training",
    [
        {"loss": {"weighting": "min_snr", "gamma": 3.0}},
        {"loss": {"weighting": "soft_min_snr"}},
        {"loss": {"weighting": "debiased"}},
        {"loss": {"kind": "huber", "delta": 0.2}},
        {"noise": {"offset": 0.2, "input_perturbation": 0.3}},
    ],
    ids=str,
)
def test_batch_losses_equal_the_papers_formulas_computed_with_diffusers(
    make_project: Callable[..., Project], prediction: str, training: dict[str, Any]
) -> None:
    job = make_project(prediction=prediction, gradient_accumulation=1, **training).job()
    family = load_family(job.base)
    engine = Engine(job, family)
    maker = MicroBatchMaker(job, family, engine.noise_scheduler)
    micro = maker.make(0, job.plan()[0].micro_batches[0][0]).to(engine.accelerator.device)
    with torch.no_grad():
        losses = engine.objective.losses(micro, engine.denoiser)

        unet = UNet2DConditionModel.from_pretrained(job.base / "unet")
        alphas = DDPMScheduler.from_pretrained(job.base / "scheduler").alphas_cumprod[micro.timesteps]
        signal = alphas.view(-1, 1, 1, 1)
        noisy = signal.sqrt() * micro.latent + (1 - signal).sqrt() * micro.input_noise
        velocity = signal.sqrt() * micro.noise - (1 - signal).sqrt() * micro.latent
        target = micro.noise if prediction == "epsilon" else velocity
        prediction_out = unet(noisy, micro.timesteps, micro.conditions["text_embedding"]).sample

    loss = training.get("loss", {})
    errors = (prediction_out - target) ** 2
    if loss.get("kind") == "huber":
        errors = huber_loss(prediction_out, target, delta=0.2, reduction="none")
    snr = alphas / (1 - alphas)
    to_latent = {"epsilon": snr, "v_prediction": snr + 1}[prediction]
    weights = {
        None: torch.ones_like(snr),
        "min_snr": torch.minimum(snr, torch.full_like(snr, 3.0)) / to_latent,
        "soft_min_snr": (5 * snr / (snr + 5)) / to_latent,
        "debiased": snr.sqrt() / to_latent,
    }[loss.get("weighting")]
    torch.testing.assert_close(losses, errors.mean(dim=(1, 2, 3)) * weights, rtol=1e-5, atol=1e-6)


# diffusers' Chroma imports a class from a deprecated path; its ChatGLM calls a deprecated function of torch.
@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_shift_is_an_error_for_exactly_the_families_in_which_it_has_no_effect(
    tiny_model: TinyModel,
) -> None:
    """Compares the timesteps with and without a shift, for every family that uses flow matching."""
    shifted = TrainingSettings.model_validate({"timesteps": {"shift": 9.0}})
    ignored: list[str] = []
    for name in TINY:
        family = load_family(tiny_model(name))
        require_replaceable_shift(TrainingSettings(), family)
        if family.prediction_type() != "flow":
            continue

        levels, shape = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64), family.latent_shape(Size(64, 64))
        default, changed = (
            family.noise.timesteps(make_noise_scheduler(family, settings), levels, shape)
            for settings in (TrainingSettings(), shifted)
        )
        if not torch.equal(default, changed):
            require_replaceable_shift(shifted, family)
            continue
        ignored.append(family.spec.name)
        with pytest.raises(TrainingError, match=f"9.0 is not available for {family.spec.name}") as e:
            require_replaceable_shift(shifted, family)
        assert e.value.where == "training.timesteps.shift"
    assert ignored == ["Ideogram 4"]


def test_a_run_with_a_shift_that_the_family_ignores_is_not_launched(
    make_project: Callable[..., Project], tiny_bases: dict[str, Path], tmp_path: Path
) -> None:
    TINY["Ideogram 4"](tmp_path / "ideogram")
    tiny_bases["ideogram"] = tmp_path / "ideogram"
    launch = InProcessLaunch()
    project = make_project(prediction="ideogram", steps=1, timesteps={"shift": 3.0})
    with pytest.raises(TrainingError, match=r"timesteps\.shift 3\.0 is not available for Ideogram 4"):
        run(project, launch)
    assert launch.job_files == []


def test_text_encoders_are_trained_only_if_the_recipe_says_so_and_the_family_can(
    tiny_bases: dict[str, Path],
) -> None:
    families = {name: load_family(tiny_bases[name]) for name in ("sdxl", "klein")}
    trained = TrainingSettings.model_validate({"lora": {"text_encoders": {}}})
    require_text_encoders(trained, families["sdxl"])
    for family in families.values():
        require_text_encoders(TrainingSettings(), family)
    with pytest.raises(TrainingError, match=r"text encoders of FLUX\.2 klein cannot be trained"):
        require_text_encoders(trained, families["klein"])


def test_a_tracker_whose_package_is_missing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TrainingSettings(steps=1, trackers=("wandb",))
    if find_spec("wandb") is None:
        with pytest.raises(TrainingError, match="not installed: wandb"):
            require_trackers(settings)
    require_trackers(TrainingSettings(steps=1))

    (tmp_path / "wandb.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    require_trackers(settings)


@pytest.mark.parametrize(
    ("optimizer", "rate", "is_warned"),
    [
        ("adamw", 1.0, True),
        ("lion", 0.1, True),
        ("adamw", 1e-2, False),
        ("prodigy", 1.0, False),
        ("torch.optim.SGD", 1.0, False),
    ],
)
def test_a_learning_rate_that_only_prodigy_can_use_is_warned_about(
    make_project: Callable[..., Project], optimizer: str, rate: float, is_warned: bool
) -> None:
    project = make_project(optimizer=optimizer, learning_rate=rate)
    warnings = training_warnings(project.recipe, load_family(project.job().base))
    assert [f"training.learning_rate: {rate:g} is for" in text for text in warnings] == [True] * is_warned
