"""The complete job of one family, compared with diffusers at each step.

A family's test file defines a `Case` with the expected values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.aspect_buckets.stage import assign_buckets
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.worker.tensors import read_torch
from pipeline.images.decode import load_pixels
from pipeline.images.geometry import Geometry, Size
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.models.worker.inference import PictureSettings
from pipeline.models.worker.vae import channels_last
from pipeline.raw_images.stage import scan
from pipeline.recipe import recipe_from_mapping
from pipeline.storage.tables import Tables
from pipeline.text_embeddings.stage import cache_text
from pipeline.trained_lora.export.lora_files import read_lora_file
from pipeline.trained_lora.job import read_job
from pipeline.trained_lora.stage import train_lora
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.loader import MicroBatchMaker
from pipeline.trained_lora.worker.micro_input import MicroInput
from pipeline.vae_latents.stage import cache_latents
from pipeline.validated_dataset.stage import validate
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.models.families.case import Case
from tests.tensor_differences import differing_tensors

ENDS = ("lora_down.weight", "lora_up.weight", "alpha")
TOLERANCE = {"rtol": 0.0, "atol": 1e-5}


def check_case(case: Case, folder: Path, photos: Path) -> None:
    """Run the complete job in `folder`, and fail where it differs from diffusers."""
    base = folder / "base"
    case.make(base)
    recipe = recipe_from_mapping("demo", settings(folder, photos, base) | case.sections(folder, photos))
    tables, launch = Tables(recipe.output_dir), InProcessLaunch()
    entries, job = complete_job(recipe, tables, launch)
    family = load_family(base)
    pipe = case.pipeline(base)
    pipe.set_progress_bar_config(disable=True)
    channels_last(pipe.vae)  # `test_vae.py` compares with the usual order
    for row in tables.read("vae_latents").to_dicts():
        check_latent(case, row, photos, entries, pipe)
    check_decoding(case, tables.read("vae_latents").row(0, named=True), entries, family, pipe)
    for caption in [*tables.read("text_embeddings")["caption"], ""]:
        check_text(case, caption, entries, family, pipe)
    check_cut(family)
    check_step(case, job, family, pipe)
    check_lengths(job, family)
    check_drawing(case, family, pipe)
    check_preview_settings(case, family, pipe)
    warnings = json.loads((job.folder / "result.json").read_text())["warnings"]
    # Some cases train with a high learning rate, so that two steps change the pictures.
    others = [warning for warning in warnings if not warning.startswith("training.learning_rate")]
    assert ["distilled" in warning for warning in others] == [True] * (family.distillation is not None)
    drawn_at_0_and_2 = 2 * len(job.prompts)
    assert len(list((job.folder / "samples").glob("*.png"))) == drawn_at_0_and_2 > 0
    check_files(case, recipe.output_dir / "lora", pipe, family)


def settings(folder: Path, photos: Path, base: Path) -> dict[str, Any]:
    return {
        "datasets": [{"name": "photos", "path": photos}],
        "cache_dir": folder / "cache",
        "output_dir": folder / "output",
        "model": {"base": str(base)},
        "buckets": {"resolution": 64, "step": 32},
        "latents": {"dtype": "float32", "posterior": "mean"},
        "text": {"dtype": "float32", "compute_dtype": "float32", "caption_dropout": 0.0},
        "accelerate": {"mixed_precision": "no"},
        "training": {
            "steps": 2,
            "batch_size": 2,
            "learning_rate": 1e-1,
            "sample_every": 2,
            "seed": 7,
            "sample_prompts": [{"prompt": "a cat", "steps": 2}],
            "lora": {"rank": 4, "alpha": 2.0},
        },
    }


def complete_job(recipe: Any, tables: Tables, launch: InProcessLaunch) -> tuple[RecipeEntries, Any]:
    def write_table(asset: str, result: Any) -> Any:
        tables.write(asset, result.table)
        tables.write_rejected(asset, result.rejected)
        return result.table

    log = launch.info
    raw = write_table("raw_images", scan(recipe, tables, log=log))
    valid = write_table("validated_dataset", validate(recipe, raw, tables, log=log))
    buckets = write_table("aspect_buckets", assign_buckets(recipe, valid, log=log))
    latents = write_table("vae_latents", cache_latents(recipe, buckets, tables, launch=launch, log=log))
    text = write_table("text_embeddings", cache_text(recipe, valid, tables, launch=launch, log=log))
    assert len(latents) == len(text) == 5
    train_lora(recipe, latents, text, launch=launch, log=log)
    return RecipeEntries(recipe), read_job(launch.job_files[-1])


def check_latent(case: Case, row: dict[str, Any], photos: Path, entries: RecipeEntries, pipe: Any) -> None:
    file = photos / row["path"]
    image = load_pixels(file, Geometry.from_row(row), (255, 255, 255), content_hash=row["content_hash"])
    pixels = case.pixels(pipe, image)
    pixels = pixels.contiguous(memory_format=torch.channels_last)
    assert tuple(pixels.shape[2:]) == image.shape[:2]
    with torch.no_grad():
        expected = case.latent(pipe, pixels)
    stored = read_torch(entries.store, entries.latent_spec(row))["latent"]
    assert stored.std() > 0.1
    # Rounding grows with the values: the latents of random VAEs have standard deviations of up to 10.
    torch.testing.assert_close(stored, expected[0], rtol=0.0, atol=1e-4 * float(expected.std()))


def check_decoding(
    case: Case, row: dict[str, Any], entries: RecipeEntries, family: WorkerFamily, pipe: Any
) -> None:
    """A stored latent decodes to the picture of a pipeline whose last step ends in that latent."""
    latent = read_torch(entries.store, entries.latent_spec(row))["latent"][None]
    height, width = Geometry.from_row(row).target_size

    def replaced(pipe: Any, step: int, time: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        tokens = arguments["latents"]
        if tokens.ndim == 4:
            edge = round((latent.shape[1] / tokens.shape[1]) ** 0.5)  # of a patch, in the stored latent only
            return {"latents": torch.nn.functional.pixel_shuffle(latent, edge)}
        if tokens.ndim == 5 and tokens.shape[1] == 1:  # frames, and channels last
            return {"latents": latent.movedim(1, -1)[:, None]}
        if tokens.ndim == 5:  # channels, and frames
            return {"latents": latent[:, :, None]}
        edge = round((tokens.shape[2] / latent.shape[1]) ** 0.5)  # of a patch, packed channels first
        return {"latents": torch.nn.functional.unfold(latent, edge, stride=edge).transpose(1, 2)}

    size = {"height": height, "width": width, "num_inference_steps": 1}
    arguments = {**size, **case.drawing, "callback_on_step_end": replaced, "output_type": "pt"}
    expected = pipe(prompt="a cat", **arguments, return_dict=False)[0]
    decoded = family.vae.decode(family.vae.load("float32", "cpu"), latent)
    assert decoded.shape == (1, 3, height, width)
    assert decoded.std() > 0.01
    torch.testing.assert_close((decoded / 2 + 0.5).clamp(0, 1), expected[:, :3], **TOLERANCE)  # no alpha
    raw = family.vae.denormalise(latent)
    torch.testing.assert_close(family.vae.normalise(raw), latent, **TOLERANCE)


def check_text(case: Case, caption: str, entries: RecipeEntries, family: WorkerFamily, pipe: Any) -> None:
    stored = read_torch(entries.store, case.text_spec(entries, caption))
    with torch.no_grad():
        expected = case.embed(pipe, caption)
    if family.spec.text.padding == "masked":
        length = int(expected["text_mask"].sum())
        assert len(stored["text_embedding"]) == length < family.max_length()
        expected |= {name: expected[name][:, :length] for name in ("text_embedding", "text_mask")}
    conditions = family.text.stack([stored])
    lengths = conditions.pop("text_lengths", (len(stored["text_embedding"]),))
    assert lengths == (len(stored["text_embedding"]),)
    assert set(conditions) == set(expected)
    for name, tensor in conditions.items():
        torch.testing.assert_close(tensor, expected[name].float(), **TOLERANCE)


def check_cut(family: WorkerFamily) -> None:
    """Changing the part reported as cut changes nothing; changing the word before it does."""
    encoders = family.text.load("float32", "cpu")
    caption = "cat " * (family.max_length() + 20)
    encoded = family.text.encode_caption(encoders, caption)
    cut = encoded.cut_from
    assert cut is not None
    write_table, cut_part = caption[:cut], caption[cut:]
    assert 0 < encoded.num_cut <= encoded.num_tokens - cut_part.count("cat") // 2
    before, word, rest = write_table.rpartition("cat")
    for other, same in (
        (write_table + cut_part.replace("cat", "cup"), True),
        (before + "cup" + rest + cut_part, False),
    ):
        assert word == "cat"
        assert len(other) == len(caption)
        tensors = family.text.encode_caption(encoders, other).tensors
        assert (differing_tensors(tensors, encoded.tensors) == []) == same, f"{other} instead of {caption}"


def check_drawing(case: Case, family: WorkerFamily, pipe: Any) -> None:
    """A preview equals the picture of the complete pipeline."""
    encoders = family.text.load("float32", "cpu")
    text = family.text.encode_caption(encoders, "a cat", case.seen).tensors
    empty = family.text.encode_caption(encoders, "", case.seen_in_negative).tensors
    pipeline = family.drawing.load_pipeline(dtype="float32", device="cpu")
    settings = PictureSettings(Size(64, 64), steps=2, seed=1)
    images = [each.image for each in case.seen]
    preview = family.drawing.draw(pipeline, text, empty, settings, references=images)
    expected = draw_picture(
        case, pipe, **case.guidance_arguments(family.spec.guidance_scale), **case.previewing
    )
    np.testing.assert_allclose(np.asarray(preview) / 255, expected, atol=0.6 / 255)


def check_preview_settings(case: Case, family: WorkerFamily, pipe: Any) -> None:
    """A preview with its own settings equals the picture of the complete pipeline with these arguments."""
    encoders = family.text.load("float32", "cpu")
    images = [each.image for each in case.seen]
    text = family.text.encode_caption(encoders, "a cat", case.seen).tensors
    empty, negative = (
        family.text.encode_caption(encoders, caption, case.seen_in_negative).tensors
        for caption in ("", "a dog, a dog")
    )
    arguments = {**case.previewing, "height": 64, "width": 96, "num_inference_steps": 3}
    if family.no_negative_prompts:
        negative = None
    else:
        arguments |= case.negative_prompt(pipe, "a dog, a dog")
    pipeline = family.drawing.load_pipeline(dtype="float32", device="cpu")
    settings = PictureSettings(Size(64, 96), steps=3, seed=1, guidance_scale=3.0)
    drawn = {"negative_text": negative, "references": images}
    preview = family.drawing.draw(pipeline, text, empty, settings, **drawn)
    expected = draw_picture(case, pipe, **case.guidance_arguments(3.0), **arguments)
    np.testing.assert_allclose(np.asarray(preview) / 255, expected, atol=0.6 / 255)
    if negative is not None:
        plain = family.drawing.draw(pipeline, text, empty, settings, references=images)
        assert not np.array_equal(np.asarray(preview), np.asarray(plain))


def check_step(case: Case, job: Any, family: WorkerFamily, pipe: Any) -> None:
    """A fresh adapter has delta weights of zero, so the base model is the oracle."""
    engine = Engine(job, family)
    maker = MicroBatchMaker(job, family, engine.noise_scheduler)
    micro = maker.make(0, next(iter(job.plan())).micro_batches[0][0]).to(engine.accelerator.device)
    with torch.no_grad():
        noisy = case.noisy(pipe, micro)
        expected = case.predict(pipe, noisy, micro)
        predicted = family.denoiser.predict(engine.denoiser, noisy, micro.timesteps, micro.conditions)
        losses = engine.objective.losses(micro, engine.denoiser)
    assert predicted.shape == micro.latent.shape
    assert predicted.std() > 1e-3
    torch.testing.assert_close(predicted, expected, **TOLERANCE)
    by_hand = ((expected - case.target(micro)) ** 2).mean(dim=(1, 2, 3))
    torch.testing.assert_close(losses, by_hand, **TOLERANCE)
    check_checkpointing(family, engine, micro)


def check_lengths(job: Any, family: WorkerFamily) -> None:
    """Captions of different lengths in one batch get the predictions that each gets alone."""
    engine = Engine(job, family)
    maker = MicroBatchMaker(job, family, engine.noise_scheduler)
    one = next(iter(job.plan())).micro_batches[0][0][0]
    micro = maker.make(0, (one,) * 3).to(engine.accelerator.device)
    encoders = family.text.load("float32", "cpu")
    texts = [family.text.encode_caption(encoders, words).tensors for words in ("a cat", "", "a cat " * 40)]
    lengths = {len(text["text_embedding"]) for text in texts}
    assert (len(lengths) == 1) == (family.spec.text.padding == "stored")
    sizes = {name: micro.conditions[name] for name in ("original_size_hw", "crop_top_left", "target_size_hw")}
    with torch.no_grad():
        together = family.denoiser.predict(
            engine.denoiser, micro.latent, micro.timesteps, family.text.stack(texts) | sizes
        )
        for at, text in enumerate(texts):
            conditions_alone = family.text.stack([text]) | {
                name: size[at : at + 1] for name, size in sizes.items()
            }
            its = slice(at, at + 1)
            prediction = family.denoiser.predict(
                engine.denoiser, micro.latent[its], micro.timesteps[its], conditions_alone
            )
            torch.testing.assert_close(together[its], prediction, **TOLERANCE)


def check_checkpointing(family: WorkerFamily, engine: Engine, micro: MicroInput) -> None:
    """Recomputed activations give bit-identical gradients."""
    gradient_sets: list[list[torch.Tensor]] = []
    for checkpointing in (False, True):
        if checkpointing:
            family.denoiser.recompute_activations(engine.denoiser)
        engine.objective.losses(micro, engine.denoiser).sum().backward()
        gradient_sets.append([weight.grad for weight in engine.weights if weight.grad is not None])
        for weight in engine.weights:
            weight.grad = None
    assert len(gradient_sets[0]) == len(gradient_sets[1]) > 0
    assert differing_tensors(gradient_sets[1], gradient_sets[0]) == []
    assert any(bool(gradient.any()) for gradient in gradient_sets[0]), "all gradients are 0"


def check_files(case: Case, lora: Path, pipe: Any, family: WorkerFamily) -> None:
    plain = draw_picture(case, pipe)
    diffusers_tensors = read_lora_file(lora / "pytorch_lora_weights.safetensors").tensors
    golden = golden_keys(case, pipe, family.spec.denoiser_name)
    assert set(diffusers_tensors) == golden
    modules = {key.split(".", 1)[1].rsplit(".lora_", 1)[0] for key in golden}
    comfyui = read_lora_file(lora / "demo_comfyui.safetensors").tensors
    assert set(comfyui) == {f"{key}.{end}" for key in case.comfyui_keys(modules) for end in ENDS}
    kohya = read_lora_file(lora / "demo_kohya.safetensors").tensors
    assert set(kohya) == {f"{key}.{end}" for key in case.kohya_keys() for end in ENDS}
    pipe.load_lora_weights(lora)
    adapted = draw_picture(case, pipe)
    pipe.unload_lora_weights()
    assert np.abs(adapted - plain).max() > 0.01
    if family.kohya_loads():
        pipe.load_lora_weights(lora, weight_name="demo_kohya.safetensors")
        second_picture = draw_picture(case, pipe)
        pipe.unload_lora_weights()
        np.testing.assert_allclose(second_picture, adapted, atol=1e-4)


def golden_keys(case: Case, pipe: Any, component: str) -> set[str]:
    """Return the keys of diffusers' layout from peft's and diffusers' own saving functions."""
    from peft import LoraConfig, get_peft_model_state_dict
    from peft.tuners.lora import LoraLayer

    denoiser = getattr(pipe, component)
    denoiser.add_adapter(LoraConfig(r=1, target_modules=case.targets), adapter_name="golden")
    assert any(isinstance(module, LoraLayer) for module in denoiser.modules()), (
        f"{case.targets} match no layer"
    )
    state = get_peft_model_state_dict(denoiser, adapter_name="golden")
    keys = set(case.pipeline_class.pack_weights(state, component))
    denoiser.unload_lora()
    return keys


def draw_picture(case: Case, pipe: Any, **options: Any) -> np.ndarray[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    size = {"height": 64, "width": 64, "num_inference_steps": 2}
    arguments = {**size, **case.drawing, **options}
    return pipe(prompt="a cat", **arguments, generator=generator, output_type="np", return_dict=False)[0][0]
