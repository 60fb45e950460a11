"""The runs of variants whose caches differ: only new entries are encoded, and the recipe's tables stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from demo.tiny_models.captioners import write_idefics3
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.encoding.workers import CAPTIONS_MODULE, WORKERS
from pipeline.errors import GateClosedError
from pipeline.log import discard
from pipeline.sweep.runs import planner
from pipeline.sweep.variants import variants
from pipeline.trained_lora.stage import plan_run
from pipeline.validated_dataset.edited_captions import edit_captions
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.cached_job import Job, recipe_of


def swept(job: Job, grid: dict[str, Any], **dataset: Any) -> Job:
    (photos,) = job.recipe.datasets
    values = {"name": "photos", "path": str(photos.path), "validation_fraction": 0.4, **dataset}
    root, base = job.recipe.output_dir.parent, job.recipe.model.base
    return Job(recipe_of(root, base, datasets=[values], sweep={"grid": grid}), job.launch)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_variant_encodes_only_what_its_captions_change_and_no_table_of_the_recipe_changes(
    job: Job,
) -> None:
    sweeping = swept(job, {"datasets.photos.captions.prefix": ["", "a picture of "]})
    latents, text = (job.tables.read(asset) for asset in ("vae_latents", "text_embeddings"))
    before, launch = contents(job.recipe.output_dir), InProcessLaunch()
    with planner(sweeping.recipe, latents, text, launch=launch, log=discard) as planned:
        runs = [planned.runs_of(variant)[0] for variant in variants(sweeping.recipe)]
        again = [planned.runs_of(variant)[0] for variant in variants(sweeping.recipe)]
    assert launch.modules == [WORKERS["text"]], "once, for the captions with the prefix"
    assert [run.job.run for run in again] == [run.job.run for run in runs]
    assert contents(job.recipe.output_dir) == before

    plain = sweeping.recipe.model_copy(update={"sweep": None})
    assert runs[0].job.run == plan_run(RecipeEntries(plain), latents, text, log=discard)[0].run
    assert runs[1].job.run != runs[0].job.run
    captions = runs[1].job.inputs.table["captions"].list.first().to_list()
    assert all(caption.startswith("a picture of ") for caption in captions)
    assert runs[1].job.folder.parent == job.recipe.output_dir / "runs", "where a plain run has it"


def test_a_variant_with_a_closed_gate_fails_alone(job: Job) -> None:
    sweeping = swept(job, {"datasets.photos.captions.suffix": [[".txt"], [".missing"]]})
    latents, text = (job.tables.read(asset) for asset in ("vae_latents", "text_embeddings"))
    with planner(sweeping.recipe, latents, text, launch=InProcessLaunch(), log=discard) as planned:
        first, second = variants(sweeping.recipe)
        assert planned.runs_of(first)
        with pytest.raises(GateClosedError, match="captions_present"):
            planned.runs_of(second)


def test_a_variant_reads_captions_that_a_person_has_edited(job: Job) -> None:
    sweeping = swept(job, {"datasets.photos.captions.prefix": ["", "a picture of "]})
    latents, text = (job.tables.read(asset) for asset in ("vae_latents", "text_embeddings"))
    edited = latents["sample_id"][0]
    edit_captions(sweeping.recipe, edited, ["the words of a person"], discard)
    with planner(sweeping.recipe, latents, text, launch=InProcessLaunch(), log=discard) as planned:
        runs = [planned.runs_of(variant)[0] for variant in variants(sweeping.recipe)]
    captions = [run.job.inputs.table.filter(sample_id=edited)["captions"][0].to_list() for run in runs]
    assert captions[1] == ["a picture of the words of a person"]
    assert captions[0] == ["the words of a person"], "also the variant with the recipe's own value"


def test_a_variant_has_the_captions_that_a_model_writes(job: Job, tmp_path: Path) -> None:
    (tmp_path / "captioner").mkdir()
    write_idefics3(tmp_path / "captioner")
    captions = {"from": "model", "model": str(tmp_path / "captioner"), "max_tokens": 4, "when": "always"}
    sweeping = swept(job, {"latents.flip": [False, True]}, captions=captions)
    latents, text = (job.tables.read(asset) for asset in ("vae_latents", "text_embeddings"))
    launch = InProcessLaunch()
    with planner(sweeping.recipe, latents, text, launch=launch, log=discard) as planned:
        runs = [planned.runs_of(variant)[0] for variant in variants(sweeping.recipe)]
    assert launch.modules.count(CAPTIONS_MODULE) == 1, "the variants share the captions"
    written = [run.job.inputs.table.sort("sample_id")["captions"].to_list() for run in runs]
    assert written[0] == written[1] != []
