"""Training text encoders: embeddings, one step, resuming, a complete run, and supported families."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import DDPMScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline
from peft import LoraConfig

from demo.tiny_models import TINY
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.errors import TrainingError
from pipeline.models.worker.family import load_family
from pipeline.recipe import LoraSettings
from pipeline.reporting.findings import CheckContext
from pipeline.storage.tables import Tables
from pipeline.trained_lora import checks as trained_lora
from pipeline.trained_lora.export.lora_files import layout_file, read_lora_file
from pipeline.trained_lora.fingerprint import run_facts
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.stage import train_lora
from pipeline.trained_lora.worker.adapter.lora import adapter_state, collect
from pipeline.trained_lora.worker.checkpoint import checkpoint_path, load_checkpoint, save_checkpoint
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.loader import MicroBatchMaker
from pipeline.trained_lora.worker.micro_input import MicroInput
from pipeline.trained_lora.worker.validation import Validation
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.trained_lora.project import ALL_MODULES
from tests.pipeline.trained_lora.rank_server import RankServer
from tests.pipeline.trained_lora.runs import run_until
from tests.pipeline.trained_lora.text_encoder_project import (
    ATTENTION,
    project_of,
    settings,
    with_large_weights,
)
from tests.pipeline.trained_lora.worker.engine_steps import engine_of, inputs_of, one_step
from tests.tensor_differences import differing_tensors

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

# diffusers' Euler scheduler converts a tensor in a way that numpy 2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.mark.slow
def test_without_the_key_training_loads_no_text_encoder_and_no_vae(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_project(steps=2).job()
    family = load_family(job.base)

    def loads(*_: Any) -> Any:
        pytest.fail("a VAE or a text encoder was loaded")

    for part, name in ((family.vae, "load"), (family.text, "load"), (family.drawing, "load_pipeline")):
        monkeypatch.setattr(type(part), name, loads)
    assert run_until(job)[0]
    with pytest.raises(pytest.fail.Exception, match="was loaded"):
        engine_of(replace(job, recipe=project_of(make_project).recipe))


@pytest.mark.parametrize("prediction", ["epsilon", "sdxl"])
def test_with_zero_adapters_the_denoiser_gets_the_embeddings_that_the_cache_would_hold(
    make_project: Callable[..., Project], prediction: str
) -> None:
    job = project_of(make_project, prediction, dropout=0.5).job()
    engine, family = engine_of(job), load_family(job.base)
    assert engine.text is not None
    plain = family.text.load("float32", "cpu")
    micros = [micro for step in range(6) for _, micro in inputs_of(job, engine, job.plan()[step])]
    assert {"text_embedding", "pooled_text_embedding"}.isdisjoint(micros[0].conditions), "no cache is read"
    captions = {caption for micro in micros for caption in micro.captions}
    assert "" in captions
    assert len(captions) > 4
    for micro in micros[:3]:
        embedded = engine.text.embed(micro.captions)
        for number, caption in enumerate(micro.captions):
            expected = family.text.encode_caption(plain, caption).tensors
            assert set(embedded) == set(expected) == set(family.text_shapes())
            for name, tensor in expected.items():
                assert embedded[name].requires_grad
                torch.testing.assert_close(embedded[name][number].detach(), tensor, rtol=0, atol=1e-5)


@pytest.mark.parametrize("prediction", ["epsilon", "sdxl"])
def test_one_step_equals_an_independent_step_with_diffusers(
    make_project: Callable[..., Project], prediction: str
) -> None:
    text = {"rank": 2, "alpha": 3.0, "learning_rate": 2e-3, "targets": "blocks"}
    few_steps = {"gradient_accumulation": 1, "steps": 3, "max_grad_norm": 0.05, "dropout": 0.5}
    project = project_of(make_project, prediction, text, ALL_MODULES, **few_steps)
    job = project.job()
    engine = with_large_weights(engine_of(job))
    ((_, micro),) = inputs_of(job, engine, job.plan()[0])
    before = collect(engine.networks, adapter_state)
    outcome = one_step(engine, job, 0)

    xl = prediction == "sdxl"
    pipe: Any = (StableDiffusionXLPipeline if xl else StableDiffusionPipeline).from_pretrained(job.base)
    encoders = [pipe.text_encoder, pipe.text_encoder_2] if xl else [pipe.text_encoder]
    pipe.unet.requires_grad_(False)
    pipe.unet.add_adapter(LoraConfig(r=4, lora_alpha=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    layers = [*ATTENTION, "mlp.fc1", "mlp.fc2"]
    for encoder in encoders:
        encoder.requires_grad_(False)
        encoder.add_adapter(LoraConfig(r=2, lora_alpha=3, target_modules=layers))
    groups = [trainable(pipe.unet, "")]
    groups += [
        trainable(encoder, f"text_encoder{end}.") for encoder, end in zip(encoders, ("", "_2"), strict=False)
    ]
    weights = {name: weight for group in groups for name, weight in group.items()}
    idle = {name for name in weights if name not in before}
    assert idle == {name for name in weights if xl and name.startswith("text_encoder.encoder.layers.1.")}
    with torch.no_grad():
        for name in before:
            weights[name].copy_(before[name])
    loss = loss_by_hand(pipe, micro, xl=xl)
    loss.backward()
    used = [weight for name, weight in weights.items() if name in before]
    norm = torch.nn.utils.clip_grad_norm_(used, 0.05)
    rates = [
        {"params": [*groups[0].values()]},
        {"params": [w for g in groups[1:] for w in g.values()], "lr": 2e-3},
    ]
    torch.optim.AdamW(rates, lr=1e-2).step()

    assert outcome.loss == pytest.approx(loss.item(), rel=1e-5)
    assert outcome.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    after = collect(engine.networks, adapter_state)
    for name, weight in after.items():
        torch.testing.assert_close(weight, weights[name].data, rtol=1e-4, atol=1e-6)
        moved = float((weight - before[name]).abs().max())
        assert 0 < moved < (3e-3 if name.startswith("text_encoder") else 2e-2)


def trainable(network: Any, prefix: str) -> dict[str, torch.nn.Parameter]:
    return {
        prefix + name.replace(".default.", "."): weight
        for name, weight in network.named_parameters()
        if weight.requires_grad
    }


def loss_by_hand(pipe: Any, micro: MicroInput, *, xl: bool) -> torch.Tensor:
    """Return the loss by the papers' formulas, with captions encoded as in transformers' documentation."""
    embeddings: list[torch.Tensor] = []
    pooled = None
    pairs = [(pipe.tokenizer, pipe.text_encoder)]
    pairs += [(pipe.tokenizer_2, pipe.text_encoder_2)] if xl else []
    for tokenizer, encoder in pairs:
        ids = tokenizer(list(micro.captions), padding="max_length", max_length=77, truncation=True).input_ids
        answer = encoder(torch.tensor(ids), output_hidden_states=True)
        embeddings.append(answer.hidden_states[-2] if xl else answer.last_hidden_state)
        pooled = answer.text_embeds if "text_embeds" in answer else pooled
    added = None
    if xl:
        names = ("original_size_hw", "crop_top_left", "target_size_hw")
        ids = torch.cat([micro.conditions[name] for name in names], dim=1).float()
        added = {"text_embeds": pooled, "time_ids": ids}
    ddpm = DDPMScheduler.from_config(pipe.scheduler.config)
    signal = ddpm.alphas_cumprod[micro.timesteps.long()].view(-1, 1, 1, 1)
    noisy = signal.sqrt() * micro.latent + (1 - signal).sqrt() * micro.noise
    text = torch.cat(embeddings, dim=-1)
    answer = pipe.unet(noisy, micro.timesteps, text, added_cond_kwargs=added).sample
    return ((answer - micro.noise) ** 2).mean()


@pytest.mark.slow
def test_R01_an_interrupted_run_resumes_bit_for_bit(
    make_project: Callable[..., Project], tmp_path: Path
) -> None:
    project = project_of(
        make_project, "sdxl", {"learning_rate": 1e-3}, steps=4, gradient_accumulation=1, ema_decay=0.9
    )
    job = project.job()
    uninterrupted = engine_of(job)
    checkpoint = None
    for step in range(4):
        one_step(uninterrupted, job, step)
        if step == 1:
            checkpoint = save_checkpoint(tmp_path / "checkpoints", job.run, uninterrupted.state(2))
    assert checkpoint is not None
    resumed = engine_of(job)
    resumed.restore(load_checkpoint(checkpoint, job.run))
    for step in (2, 3):
        with resumed.result_weights():
            assert resumed.embed_caption("a cat") is not None, "evaluating the result changes nothing"
        one_step(resumed, job, step)
    with uninterrupted.result_weights(), resumed.result_weights():
        same_bits(uninterrupted, resumed)
    same_bits(uninterrupted, resumed)
    fresh = collect(engine_of(job).networks, adapter_state)
    moved = {
        name.split(".")[0]
        for name, weight in same_bits(uninterrupted, resumed).items()
        if not torch.equal(weight, fresh[name])
    }
    assert {"text_encoder", "text_encoder_2"} < moved


def same_bits(one: Engine, other: Engine) -> dict[str, torch.Tensor]:
    left, right = (collect(each.networks, adapter_state) for each in (one, other))
    assert set(left) == set(right)
    assert differing_tensors(left, right) == []
    return left


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_R03_R04_two_processes_train_text_encoders_to_the_same_weights(
    make_project: Callable[..., Project], rank_server: RankServer
) -> None:
    text = {"learning_rate": 5e-4}
    settings = {"batch_size": 4, "learning_rate": 1e-3, "steps": 3, "sizes": {"64x64": 5, "32x96": 5}}
    project = project_of(make_project, "sdxl", text, dropout=0.5, **settings)
    alone = project.changed("alone").job()
    pair = project.changed("pair", num_processes=2, batch_size=2).job()
    assert [step.slots() for step in alone.plan()] == [step.slots() for step in pair.plan()]
    shares = [share for step in pair.plan() for micro in step.micro_batches for share in micro]
    assert any(slot.weight == 0 for share in shares for slot in share), "no rank is ever without a sample"
    rank_server.train(pair)
    assert run_until(alone)[0]
    expected, actual = (
        load_checkpoint(checkpoint_path(RunLayout(job.folder).checkpoints, 3), job.run).adapter
        for job in (alone, pair)
    )
    assert {"text_encoder", "text_encoder_2"} < {name.split(".")[0] for name in actual}
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight, rtol=1e-2, atol=1e-5)


def test_a_complete_run_passes_its_gates(make_project: Callable[..., Project]) -> None:
    text = {"rank": 2, "learning_rate": 1e-2}
    drawn = {"sample_every": 2, "sample_prompts": [{"prompt": "a cat", "steps": 2}]}
    project = project_of(make_project, "sdxl", text, steps=2, gradient_accumulation=1, **drawn)
    log: list[str] = []
    result = train_lora(
        project.recipe, project.latents, project.text, launch=InProcessLaunch(), log=log.append
    )
    assert result.report["warnings"] == []
    tables = Tables(project.recipe.output_dir)
    tables.write("trained_lora", result.table)
    findings = trained_lora.run(CheckContext(project.recipe, tables))
    assert [finding.summary for finding in findings if not finding.passed] == []
    layout = RunLayout(project.recipe.output_dir / "runs" / result.report["run"])
    assert len(list(layout.previews.glob("*.png"))) == 2
    modules = json.loads(layout.finished.read_text())["modules"]
    assert {each["diffusers"].split(".")[0] for each in modules} == {"unet", "text_encoder", "text_encoder_2"}
    header = read_lora_file(project.recipe.output_dir / "lora" / layout_file("kohya", "demo")).metadata
    assert json.loads(header["ss_network_args"]) == {"text_encoders": {"alpha": 1.0, "dim": 2}}
    assert header["ss_text_encoder_lr"] == "0.01"


def test_previews_and_validation_use_the_trained_text_encoders(
    make_project: Callable[..., Project],
) -> None:
    job = project_of(make_project).job()
    engine, family = engine_of(job), load_family(job.base)
    validation = Validation(job, family, job.inputs[:1])
    losses = [validation.loss(engine).mean]
    with engine.objective.evaluation():
        before = engine.embed_caption("a cat")
        with_large_weights(engine)
        after = engine.embed_caption("a cat")
    for weight in (weight for weight in engine.denoiser.parameters() if weight.requires_grad):
        weight.data.zero_()
    losses.append(validation.loss(engine).mean)
    assert losses[0] != losses[1]
    assert before is not None
    assert after is not None
    assert (after["text_embedding"] - before["text_embedding"]).abs().max() > 0.05
    micro = MicroBatchMaker(job, family, engine.noise_scheduler).make_fixed(job.plan()[0].slots()[:1], [0.5])
    assert engine.objective.output_change(micro) > 0
    assert [name for name, network in engine.networks.items() if not network.training] == []


def test_text_encoder_settings_change_the_run_and_their_absence_does_not(
    make_project: Callable[..., Project],
) -> None:
    project = make_project()

    def facts(lora: LoraSettings) -> Any:
        changed = project.changed("facts", lora=lora)
        return run_facts(changed.recipe, RecipeEntries(changed.recipe), changed.job().inputs)

    assert "text_encoders" not in facts(LoraSettings())["lora"]
    usual, changes = facts(settings()), [{"learning_rate": 1e-5}, {"targets": "blocks"}, {"rank": 3}]
    assert [each for each in changes if facts(settings(**each)) == usual] == [], "changes without effect"


def test_a_family_without_trainable_text_encoders_is_an_error_before_launch(
    make_project: Callable[..., Project], tiny_bases: dict[str, Path], tmp_path: Path
) -> None:
    TINY["FLUX.2 klein"](tmp_path / "klein")
    tiny_bases["klein"] = tmp_path / "klein"
    project = project_of(make_project, "klein", modules=ALL_MODULES)

    def launch(module: str, job_file: Path) -> None:
        pytest.fail("the training process was launched")

    with pytest.raises(TrainingError, match=r"text encoders of FLUX\.2 klein cannot be trained") as excinfo:
        train_lora(project.recipe, project.latents, project.text, launch=launch, log=print)
    assert excinfo.value.where == "training.lora.text_encoders"
    assert "Stable Diffusion XL" in excinfo.value.fix
    assert "FLUX.2" not in excinfo.value.fix
