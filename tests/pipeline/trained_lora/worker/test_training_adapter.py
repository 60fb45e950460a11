"""A training adapter acts in training steps alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from PIL import Image
from safetensors.torch import load_file, save_file

from demo.tiny_models import make_tiny_flux, make_tiny_krea2, make_tiny_z_image
from pipeline.cache.store import Store
from pipeline.errors import TrainingError
from pipeline.models.worker.family import load_family
from pipeline.models.worker.loading import pipeline_class
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.plan.steps import Slot
from pipeline.trained_lora.run_folder import ADAPTER_FILE, RunLayout
from pipeline.trained_lora.worker.before_training import require_adapter_effect
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.export.read_back import loaded_weights
from pipeline.trained_lora.worker.loader import MicroBatchMaker, read_entry
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.trained_lora.runs import run, run_folders, run_until
from tests.pipeline.trained_lora.text_encoder_project import project_of as text_encoders_project
from tests.tensor_differences import differing_tensors

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"rslora": True},
    "loha": {"kind": "loha"},
    "lokr": {"kind": "lokr"},
    "oft": {"kind": "oft", "rank": 16, "alpha": 16.0},
    "dora": {"dora": True},
    "pissa": {"init": "pissa"},
}

PREFIXES = {
    "Z-Image": ["transformer", "diffusion_model"],
    "FLUX.1": ["transformer"],
    "Krea 2": ["transformer"],
}


def write_adapter(base: Path, file: Path, *, targets: tuple[str, ...] = ("to_q", "to_v", "conv1")) -> Path:
    """Write a random LoRA with an alpha that differs from the rank, by diffusers alone."""
    unet = UNet2DConditionModel.from_pretrained(base, subfolder="unet")
    unet.add_adapter(LoraConfig(r=2, lora_alpha=6, target_modules=list(targets)))
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in unet.parameters():
            if weight.requires_grad:
                weight.copy_(0.1 * torch.randn(weight.shape, generator=random))
    metadata = unet.peft_config["default"].to_dict()
    StableDiffusionPipeline.save_lora_weights(
        file.parent,
        unet_lora_layers=get_peft_model_state_dict(unet),
        unet_lora_adapter_metadata={
            name: sorted(value) if isinstance(value, set) else value for name, value in metadata.items()
        },
        weight_name=file.name,
    )
    return file


def fused_base(base: Path, file: Path, folder: Path) -> Path:
    """Write the base model with the adapter in its weights, by diffusers alone."""
    pipe = StableDiffusionPipeline.from_pretrained(base, safety_checker=None)
    pipe.load_lora_weights(file.parent, weight_name=file.name)
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture
def adapter_file(tmp_path: Path, tiny_bases: dict[str, Path]) -> Path:
    (tmp_path / "adapter").mkdir()
    return write_adapter(tiny_bases["epsilon"], tmp_path / "adapter" / "adapter.safetensors")


def engine_of(job: TrainingJob, scale: float = 0.1) -> Engine:
    """Return an engine with random weights in its trained adapter, which depend on their order alone."""
    engine = Engine(job, load_family(job.base))
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in engine.weights:
            weight.add_(scale * torch.randn(weight.shape, generator=random))
    return engine


def input_of(engine: Engine, job: TrainingJob) -> MicroInput:
    maker = MicroBatchMaker(job, load_family(job.base), engine.noise_scheduler)
    slot = Slot(job.inputs[0].variant_id, 0, epoch=0, occurrence=0, drop_caption=False)
    return maker.make_fixed((slot,), [0.5]).to(engine.accelerator.device)


def trained_and_evaluated(engine: Engine, micro: MicroInput) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses as a training step and as an evaluation computes them."""
    with torch.no_grad():
        trained = engine.objective.losses(micro, engine.denoiser)
    with engine.objective.evaluation():
        return trained, engine.objective.losses(micro, engine.denoiser)


@pytest.mark.parametrize("kind", ["lora", "rslora", "loha", "lokr", "oft"])
def test_training_predicts_as_with_the_adapter_in_the_base_weights(
    make_project: Callable[..., Project], tmp_path: Path, adapter_file: Path, kind: str
) -> None:
    job = make_project(lora={"rank": 4, "alpha": 2.0, **KINDS[kind]}).job()
    fused = replace(job, base=fused_base(job.base, adapter_file, tmp_path / "fused"))
    engine, oracle = engine_of(replace(job, training_adapter=adapter_file)), engine_of(fused)
    assert engine.training_adapter.num_modules == len(load_file(adapter_file)) / 2 == 24
    micro = input_of(engine, job)
    trained, _ = trained_and_evaluated(engine, micro)
    expected, _ = trained_and_evaluated(oracle, micro)
    torch.testing.assert_close(trained, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_is_bit_equal_to_that_without_the_adapter_and_training_is_not(
    make_project: Callable[..., Project], adapter_file: Path, kind: str
) -> None:
    job = make_project(lora={"rank": 4, "alpha": 2.0, **KINDS[kind]}).job()
    engine, plain = engine_of(replace(job, training_adapter=adapter_file)), engine_of(job)
    micro = input_of(engine, job)
    trained, evaluated = trained_and_evaluated(engine, micro)
    _, expected = trained_and_evaluated(plain, micro)
    assert torch.equal(evaluated, expected)
    assert not torch.allclose(trained, expected, rtol=1e-3)
    assert engine.state(0).adapter.keys() == plain.state(0).adapter.keys()


def test_the_adapter_works_with_packed_weights(
    make_project: Callable[..., Project], tmp_path: Path, adapter_file: Path
) -> None:
    job = make_project(quantize="int8").job()
    fused = replace(make_project().job(), base=fused_base(job.base, adapter_file, tmp_path / "fused"))
    engine, plain = engine_of(replace(job, training_adapter=adapter_file)), engine_of(job)
    micro = input_of(engine, job)
    trained, evaluated = trained_and_evaluated(engine, micro)
    _, expected = trained_and_evaluated(plain, micro)
    assert torch.equal(evaluated, expected)
    unpacked, _ = trained_and_evaluated(engine_of(fused), micro)
    assert (trained - unpacked).abs() < 0.2 * (trained - evaluated).abs()


@pytest.mark.slow
def test_files_and_previews_of_a_run_do_not_contain_the_adapter_and_resume_is_exact(
    make_project: Callable[..., Project], adapter_file: Path
) -> None:
    project = make_project(steps=4, sample_every=4, sample_prompts=["a cat"], gradient_accumulation=1)
    job = replace(project.job(), training_adapter=adapter_file)
    assert run_until(job)[0]
    resumed = replace(project.changed("resumed").job(), training_adapter=adapter_file)
    assert not run_until(resumed, stop_after=2)[0]
    assert run_until(resumed)[0]
    without = project.changed("without").job()
    assert run_until(without)[0]
    assert exported(resumed).keys() == exported(job).keys() == exported(without).keys()
    assert differing_tensors(exported(job), exported(resumed)) == []
    assert differing_tensors(exported(job), exported(without)), "the training adapter must have an effect"

    layout = RunLayout(job.folder)
    assert json.loads(layout.result.read_text())["warnings"] == []
    state = load_file(next(layout.checkpoints.glob("step-*4")) / ADAPTER_FILE)
    assert {f"unet.{name}" for name in state} == exported(job).keys()
    assert differing_tensors({f"unet.{name}": weight for name, weight in state.items()}, exported(job)) == []

    drawn = np.asarray(Image.open(next(layout.previews.glob("step-00000004-*.png"))))
    np.testing.assert_allclose(drawn / 255, drawn_by_diffusers(job, layout.exported), atol=0.6 / 255)


def exported(job: TrainingJob) -> dict[str, torch.Tensor]:
    return load_file(RunLayout(job.folder).exported / "pytorch_lora_weights.safetensors")


def drawn_by_diffusers(job: TrainingJob, lora: Path) -> np.ndarray[Any, Any]:
    """Return the run's first preview as diffusers draws it with the exported file alone."""
    pipe = StableDiffusionPipeline.from_pretrained(job.base, safety_checker=None)
    pipe.set_progress_bar_config(disable=True)
    pipe.load_lora_weights(lora)
    store, prompt = Store(job.recipe.cache_dir), job.prompts[0]
    text, empty = (
        read_entry(store, entry, "a test")["text_embedding"][None].float()
        for entry in (prompt.text, job.empty_text)
    )
    height, width = prompt.size_hw
    return pipe(
        prompt_embeds=text,
        negative_prompt_embeds=empty,
        height=height,
        width=width,
        num_inference_steps=prompt.steps,
        guidance_scale=7.5,
        generator=torch.Generator().manual_seed(job.recipe.training.seed),
        output_type="np",
    ).images[0]


@pytest.mark.parametrize("kind", ["zero", "dora", "other", "text"])
def test_E05_an_adapter_without_an_effect_is_an_error_before_training(
    make_project: Callable[..., Project], adapter_file: Path, kind: str
) -> None:
    tensors = load_file(adapter_file)
    changed = {
        "zero": {name: 0.0 * tensor for name, tensor in tensors.items()},
        "dora": {**tensors, "unet.conv_in.lora_magnitude_vector": torch.ones(4)},
        "other": {"transformer.layer.lora_A.weight": torch.ones(2, 3)},
    }
    if kind == "text":
        adapter_file.write_text("no LoRA")
    else:
        save_file(changed[kind], adapter_file)
    job = replace(make_project().job(), training_adapter=adapter_file)

    def prepare() -> None:
        engine = Engine(job, load_family(job.base))
        require_adapter_effect(engine, input_of(engine, job), job.training_adapter)

    with pytest.raises(TrainingError, match="the training adapter cannot be used") as excinfo:
        prepare()
    assert "model.training_adapter" in excinfo.value.where


@pytest.mark.slow
def test_a_training_adapter_is_tested_and_used_together_with_trained_text_encoders(
    make_project: Callable[..., Project], adapter_file: Path
) -> None:
    """The test needs text embeddings of the trained encoders, because the cache's are not read."""
    project = text_encoders_project(make_project, steps=1)
    assert run_until(replace(project.job(), training_adapter=adapter_file))[0]

    zeros = {name: 0.0 * tensor for name, tensor in load_file(adapter_file).items()}
    save_file(zeros, adapter_file)
    without_effect = replace(project.changed("zeros").job(), training_adapter=adapter_file)
    with pytest.raises(TrainingError, match="it does not change the model's prediction"):
        run_until(without_effect)


def test_the_hash_of_the_adapter_is_in_the_run_id_and_the_provenance(
    make_project: Callable[..., Project], adapter_file: Path
) -> None:
    project = make_project(steps=1)
    facts: list[dict[str, Any]] = []
    for adapter in (None, str(adapter_file)):
        model = project.recipe.model.model_copy(update={"training_adapter": adapter})
        project.recipe = project.recipe.model_copy(update={"model": model})
        assert run(project, InProcessLaunch()).report["launched"]
        record = json.loads((project.recipe.output_dir / "lora" / "provenance.json").read_text())
        facts.append(record["facts"]["model"])
    assert len(run_folders(project)) == 2
    digest = hashlib.sha256(adapter_file.read_bytes()).hexdigest()
    assert record["model"]["training_adapter"] == {"name": "adapter.safetensors", "sha256": digest}
    assert record["recipe"]["model"]["training_adapter"] == "adapter.safetensors"
    assert facts[1] == {**facts[0], "training_adapter": digest}


@pytest.mark.parametrize(
    ("make", "targets"),
    [
        (make_tiny_z_image, ["attention.to_q", "attention.to_out.0", "feed_forward.w2"]),
        (make_tiny_flux, ["attn.to_q", "ff.net.2"]),
        (make_tiny_krea2, ["attn.to_q", "ff.up"]),
    ],
)
def test_adapters_of_transformers_are_read_under_the_prefixes_of_their_publishers(
    tmp_path: Path, make: Callable[[Path], None], targets: list[str]
) -> None:
    """Files for Z-Image have ComfyUI's prefix and no alpha."""
    make(tmp_path / "base")
    family = load_family(tmp_path / "base")
    denoiser: Any = family.denoiser.load("float32", "cpu")
    denoiser.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=targets, init_lora_weights=False))
    state = get_peft_model_state_dict(denoiser)
    denoiser.unload_lora()
    loaded: list[Any] = []
    for prefix in PREFIXES[family.spec.name]:
        file = tmp_path / f"{prefix}.safetensors"
        save_file({f"{prefix}.{name}": tensor.contiguous() for name, tensor in state.items()}, file)
        loaded.append(
            loaded_weights(file, pipeline_class(family), {"": denoiser}, {}, denoiser_name="transformer")
        )
    for weights in loaded:
        assert {f"{name}.lora_A.weight" for name in weights} == {name for name in state if "lora_A" in name}
        loaded_factors = {f"{name}.lora_A.weight": each.down for name, each in weights.items()}
        assert differing_tensors(loaded_factors, {name: state[name] for name in loaded_factors}) == []
        assert {each.scale for each in weights.values()} == {1.0}
