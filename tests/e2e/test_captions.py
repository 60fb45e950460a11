"""Captions of a model in a complete job: what training draws, and what the LoRA's files say about them."""

from __future__ import annotations

import json
from pathlib import Path

from demo.tiny_models.captioners import write_idefics3
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.captions.model import resolve_model
from pipeline.log import discard
from pipeline.storage.tables import Tables
from pipeline.trained_lora.export.lora_files import read_provenance
from pipeline.trained_lora.job import JOB_FILE, read_job
from pipeline.validated_dataset.edited_captions import edit_captions
from pipeline.versions import CAPTIONER_VERSION
from tests.e2e.workspace import Workspace

PROMPT = "What does it show?"


def test_training_draws_texts_of_the_file_and_of_the_model_and_the_lora_names_both(
    fresh: Workspace, tmp_path: Path
) -> None:
    write_idefics3(tmp_path / "captioner")
    captions = {"from": "model", "model": str(tmp_path / "captioner"), "prompt": PROMPT, "max_tokens": 4}
    recipe = fresh.recipe(
        datasets=[{"name": "photos", "path": str(fresh.data), "captions": {**captions, "as": "column"}}],
        training={
            "steps": 36,  # 12 epochs
            "batch_size": 2,
            "sample_every": 0,
            "lora": {"rank": 2, "alpha": 2.0, "modules": ["mid_block.*.to_q"]},
        },
    )
    (fresh.data / "photo4.txt").unlink()
    edit_captions(recipe, "photos/photo3.png", ["the words of a person"], discard)
    assert fresh.execute("train").success

    # The texts that the run has drawn, by image; the dice of 12 epochs miss one of them in 1 of 700 runs.
    run = fresh.report("trained_lora")["run"]
    job = read_job(fresh.out / "runs" / run / JOB_FILE)
    texts = dict(job.inputs.table.select("sample_id", "captions").iter_rows())
    of_model = dict(Tables(fresh.out).read("captions").select("sample_id", "caption").iter_rows())
    assert sorted(of_model) == [f"photos/photo{number}.png" for number in (0, 1, 2, 4)]
    drawn: dict[str, set[str]] = {}
    for step in job.plan():
        for slot in step.slots():
            drawn.setdefault(slot.variant_id, set()).add(texts[slot.variant_id][slot.variant])
    for number in range(3):
        name = f"photos/photo{number}.png"
        assert drawn[name] == {f"a photograph of cat {number}", of_model[name]}
    assert drawn["photos/photo3.png"] == {"the words of a person"}
    assert drawn["photos/photo4.png"] == {of_model["photos/photo4.png"]}

    record = json.loads((fresh.out / "lora" / "provenance.json").read_text("utf-8"))
    settings = recipe.datasets[0].captions
    assert record["captions"] == [
        {
            "model": "captioner",
            "revision": None,
            "fingerprint": resolve_model(RecipeEntries(recipe, log=discard), settings).fingerprint,
            "version": CAPTIONER_VERSION,
            "datasets": ["photos"],
            "prompt": PROMPT,
            "dtype": "float32",
            "quantize": None,
            "images": {"model": 4, "files": 3, "edits": 1},
        }
    ]
    assert read_provenance(fresh.out / "lora")["captions"] == record["captions"]
    card = (fresh.out / "lora" / "README.md").read_text("utf-8")
    assert "| captions of photos | 4 by captioner, 3 from files, 1 edited by a person |\n" in card
