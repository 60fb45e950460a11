"""A training run of Qwen-Image-Edit, whose text encoder sees the references."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as edit_plus
from PIL import Image

from demo.tiny_models import make_tiny_qwen_image_edit
from pipeline.cache.recipe_entries import SEEN, RecipeEntries
from pipeline.cache.worker.tensors import read_torch
from pipeline.errors import DrawingError, LaunchError
from pipeline.models.worker.family import load_family
from pipeline.storage.tables import Tables
from pipeline.text_embeddings.caption_rows import text_rows
from pipeline.trained_lora.inputs import read_inputs
from pipeline.trained_lora.job import TrainingJob, read_job
from pipeline.trained_lora.pictures.prepare import Request, prepare_drawing
from pipeline.trained_lora.run_folder import RunLayout, read_metrics
from pipeline.trained_lora.stage import train_lora
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.loader import MicroBatchMaker
from pipeline.trained_lora.worker.loop import StopRequest, train
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.cached_job import Job, recipe_of
from tests.pipeline.trained_lora.runs import RecordingReport, outcome, run_until

QUIET: dict[str, Any] = {"log": lambda _: None}


def trained(
    root: Path,
    photos: Path,
    launch: InProcessLaunch,
    *,
    meanwhile: Callable[[Job], None] = lambda _: None,
    **training: Any,
) -> tuple[Job, TrainingJob]:
    """Train on two photographs, each with its negative as its reference.

    `meanwhile` is called between caching and training.
    """
    for path in photos.glob("*"):
        if path.stem not in ("cat", "coffee"):
            path.unlink()
    (root / "negative").mkdir()
    for path in photos.glob("*.png"):
        with Image.open(path) as image:
            Image.fromarray(255 - np.asarray(image)).save(root / "negative" / path.name)
    make_tiny_qwen_image_edit(root / "base")
    references = [{"path": str(root / "negative"), "resolution": 64}]
    recipe = recipe_of(
        root,
        root / "base",
        datasets=[{"name": "photos", "path": str(photos), "references": references}],
        buckets={"resolution": 64, "step": 32},
        latents={"dtype": "float32", "posterior": "mean"},
        text={"dtype": "float32", "compute_dtype": "float32", "caption_dropout": 0.5},
        accelerate={"mixed_precision": "no"},
        checks={"max_rejected_fraction": 0.5},
        training={
            "steps": 2,
            "batch_size": 2,
            "learning_rate": 1e-1,
            "sample_every": 2,
            "lora": {"rank": 4, "alpha": 2.0},
            **training,
        },
    )
    job = Job(recipe, launch)
    job.run()
    meanwhile(job)
    tables = (job.tables.read(name) for name in ("vae_latents", "text_embeddings"))
    train_lora(recipe, *tables, launch=launch, **QUIET)
    return job, read_job(launch.job_files[-1])


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> InProcessLaunch:
    monkeypatch.setattr(edit_plus, "VAE_IMAGE_SIZE", 96 * 96)  # a megapixel in previews takes long on a CPU
    return InProcessLaunch()


@pytest.mark.slow
def test_a_run_trains_on_captions_with_references_and_its_lora_changes_the_pipelines_picture(
    tmp_path: Path, photos: Path, launch: InProcessLaunch
) -> None:
    prompt = {"prompt": "a cat", "references": [str(tmp_path / "negative" / "cat.png")], "steps": 1}
    cache, job = trained(tmp_path, photos, launch, sample_prompts=[prompt])
    family = load_family(job.base)
    item = job.inputs[0]
    assert item.empty_text is not None
    assert item.empty_text.key != job.empty_text.key
    assert read_inputs(job.folder / "inputs.parquet")[0].empty_text == item.empty_text

    # Dropped captions are the empty one with the references of the sample.
    engine = Engine(job, family)
    maker = MicroBatchMaker(job, family, engine.noise_scheduler)
    slot = next(iter(job.plan())).micro_batches[0][0][0]
    for dropped, entry in ((True, item.empty_text), (False, item.variants[0].entry)):
        its = replace(slot, variant_id=item.variant_id, drop_caption=dropped)
        micro = maker.make(0, (its,))
        stored = read_torch(maker._store, entry)["text_embedding"]
        assert torch.equal(micro.conditions["text_embedding"][0], stored)
        assert len(micro.conditions["references"]) == 1

    # The prompt and the empty negative prompt of a preview see its references.
    (preview,) = job.prompts
    assert preview.negative is not None
    assert preview.negative.caption == ""
    assert preview.heading == "a cat (steps: 1, references: cat.png)"
    tables = cache.tables.read("text_embeddings")
    empty_of_cat = tables.row(0, named=True)
    assert empty_of_cat["sample_id"] == "photos/cat.png"
    assert preview.negative.text.key == empty_of_cat["key"]

    pipe: Any = QwenImageEditPlusPipeline.from_pretrained(job.base, processor=None)
    pipe.register_modules(processor=family.text.load_tokenizer("processor"))
    pipe.set_progress_bar_config(disable=True)

    def edited() -> np.ndarray[Any, Any]:
        generator = torch.Generator().manual_seed(job.recipe.training.seed)
        image = Image.open(tmp_path / "negative" / "cat.png").convert("RGB")
        height, width = preview.size_hw
        arguments = {"height": height, "width": width, "num_inference_steps": 1, "negative_prompt": ""}
        return pipe([image], "a cat", **arguments, generator=generator, output_type="np").images[0]

    drawn = sorted((job.folder / "samples").glob("*.png"))
    plain = edited()
    np.testing.assert_allclose(np.asarray(Image.open(drawn[0])) / 255, plain, atol=0.6 / 255)
    pipe.load_lora_weights(job.recipe.output_dir / "lora")
    adapted = edited()
    np.testing.assert_allclose(np.asarray(Image.open(drawn[-1])) / 255, adapted, atol=2 / 255)
    assert np.abs(adapted - plain).max() > 0.01

    check_requests(job, tmp_path)


def check_requests(job: TrainingJob, root: Path) -> None:
    """`latentline sample` encodes its prompts with the references of the request."""
    files = [root / "negative" / name for name in ("cat.png", "coffee.png")]
    (preview,) = job.prompts
    own, other = (prepare_drawing(job.recipe, Request(references=(file,))).prompts[0] for file in files)
    assert own == preview
    assert other.text.key != preview.text.key
    given = prepare_drawing(job.recipe, Request(prompts=("a cat",), references=(files[0],))).prompts[0]
    assert (given.text, given.negative, given.references) == (preview.text, preview.negative, (files[0],))
    with pytest.raises(DrawingError, match="requires a reference image for each picture") as missing:
        prepare_drawing(job.recipe, Request(prompts=("a cat",)))
    assert missing.value.fix == "add --reference before.png"


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path, photos: Path, launch: InProcessLaunch) -> None:
    _, complete = trained(tmp_path, photos, launch, steps=5, checkpoint_every=2, sample_every=0)
    job = replace(complete, run="killed")
    arguments = (job.write(), 3, torch.get_num_threads())
    child = multiprocessing.get_context("forkserver").Process(target=train_killed, args=arguments)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    layout = RunLayout(job.folder)
    assert not layout.result.exists()
    assert len(read_metrics(layout.metrics, 5)) == 3

    assert run_until(job)[0]
    assert outcome(job) == outcome(complete)
    assert json.loads(layout.result.read_text(encoding="utf-8"))["resumed_from"] == 2


def train_killed(job_file: Path, steps: int, threads: int) -> None:
    """Train in this process, which ends itself after some steps."""
    torch.set_num_threads(threads)  # results depend on it
    report = RecordingReport(stop_after=steps, act=partial(os.kill, os.getpid(), signal.SIGKILL))
    train(read_job(job_file), report, StopRequest())


class OrderOnly(InProcessLaunch):
    """A launch that encodes, but refuses to train."""

    def _train(self, job_file: Path) -> None:
        raise LaunchError("not trained", where=str(job_file), fix="")


def ordered(root: Path, photos: Path, **arguments: Any) -> TrainingJob:
    """Return the job of `trained`, without training."""
    launch = OrderOnly()
    with pytest.raises(LaunchError, match="not trained"):
        trained(root, photos, launch, **arguments)
    return read_job(launch.job_files[-1])


def test_samples_whose_caption_was_rejected_are_not_trained_on(tmp_path: Path, photos: Path) -> None:
    def change_a_reference(job: Job) -> None:
        entries = RecipeEntries(job.recipe)
        row = text_rows(entries, job.tables.read("validated_dataset")).row(-1, named=True)
        assert row["sample_id"] == "photos/coffee.png"
        entries.store.path(entries.text_spec(row["caption"], images=row[SEEN])).unlink()
        (tmp_path / "negative" / "coffee.png").write_bytes(b"changed")
        job.cache()

    job = ordered(tmp_path, photos, meanwhile=change_a_reference, batch_size=1, sample_every=0)
    assert len(Tables(job.recipe.output_dir).read("vae_latents")) == 2
    assert {item.sample_id for item in job.inputs} == {"photos/cat.png"}


def test_default_previews_have_the_references_of_their_samples(tmp_path: Path, photos: Path) -> None:
    job = ordered(tmp_path, photos)
    by_caption = {item.variants[0].caption: item for item in job.inputs}
    assert len(job.prompts) == 2
    for prompt in job.prompts:
        item = by_caption[prompt.caption]
        assert prompt.text == item.variants[0].entry
        assert prompt.negative is not None
        assert prompt.negative.text == item.empty_text
        assert [path.name for path in prompt.references] == [Path(item.sample_id).name]
