"""The pictures of an evaluation as cache entries: their keys, and the jobs of missing ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import polars as pl

from pipeline.cache.entry_format import PICTURE
from pipeline.cache.recipe_entries import STATS, with_recorded
from pipeline.cache.store import EntrySpec, TensorSpec
from pipeline.encoding.fill import EntryRequests, Row
from pipeline.encoding.jobs import Job
from pipeline.evaluation.prepare import Evaluation
from pipeline.models.fingerprints import canonical_hash
from pipeline.storage.regular_files import file_sha256
from pipeline.trained_lora.previews import number_text
from pipeline.trained_lora.prompts import Prompt
from pipeline.versions import PICTURES_VERSION

DRAWING = "drawing"
"""Key of the drawing job in the settings of an encoding of pictures."""

COLUMNS: dict[str, Any] = {
    "step": pl.Int64,
    "strength": pl.Float64,
    "prompt": pl.String,
    "role": pl.String,
    "concept": pl.String,
    "seed": pl.Int64,
    "key": pl.String,
    "lora": pl.Int64,
    "number": pl.Int64,
    "height": pl.Int64,
    "width": pl.Int64,
    "inputs": pl.String,
}
"""Columns of the table of pictures, one row per picture.

`step` is 0 and `strength` 0.0 for the base model's pictures, which come first. `lora` and `number` are the
indices of LoRA and prompt in the drawing job. `inputs` has the main inputs of the key as JSON.
"""

_STATED_INPUTS = ("lora", "strength", "denoiser", "text", "seed")
"""Inputs of a picture's key that its entry states; all of them could be too long for its header."""

_COST_PX = 4096
"""Number of pixels that a denoising step computes per unit of cost."""


def picture_table(evaluation: Evaluation) -> pl.DataFrame:
    """Return one row per picture: the base model's, then by step, strength, prompt and seed."""
    job = evaluation.job
    common = _common_inputs(evaluation)
    hashes = [file_sha256(lora.file) for lora in job.loras]
    prompts = [_prompt_inputs(prompt) for prompt in job.prompts]

    rows: list[tuple[Any, ...]] = []

    def add(step: int, strength: float, lora: int, lora_hash: str | None) -> None:
        for number, prompt in enumerate(job.prompts):
            role_prompt, seed = evaluation.prompt_of(number)
            inputs = {**common, **prompts[number], "lora": lora_hash, "strength": strength}
            names = (prompt.caption, role_prompt.role, role_prompt.concept, seed)
            key = canonical_hash({"pictures": inputs})
            stated = json.dumps({name: inputs[name] for name in _STATED_INPUTS})
            rows.append((step, strength, *names, key, lora, number, *prompt.size_hw, stated))

    # Without a LoRA, all steps and runs share a picture.
    add(0, 0.0, 0, None)
    for index, (lora, lora_hash) in enumerate(zip(job.loras, hashes, strict=True)):
        for strength in job.strengths:
            add(lora.step or 0, strength, index, lora_hash)
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


def picture_requests(
    evaluation: Evaluation, pictures: pl.DataFrame, previous: pl.DataFrame | None
) -> EntryRequests:
    """Return the requests of all pictures; `previous` has the recorded stats of entries by key."""
    # Two prompts may be equal, and so may the LoRAs of two steps.
    rows = pictures.unique("key", keep="first", maintain_order=True)
    prompts = [evaluation.job.prompts[number] for number in rows["number"]]
    costs = [drawing_cost(prompt.size_hw, prompt.steps) for prompt in prompts]
    num_bytes = EntrySpec("pictures", "", {}).file_bytes + 3 * pl.col("height") * pl.col("width")
    rows = with_recorded(rows, previous, STATS).with_columns(
        num_bytes=num_bytes,
        about_bytes=num_bytes,
        cost=pl.Series(costs, dtype=pl.Int64),
        name=pl.Series([_name(row) for row in rows.iter_rows(named=True)], dtype=pl.String),
    )
    return EntryRequests(
        kind="pictures",
        rows=rows,
        settings={DRAWING: evaluation.job.to_json()},
        spec=picture_spec,
        job=_job,
        facts={},
    )


def drawing_cost(size_hw: tuple[int, int], steps: int) -> int:
    """Return the cost of drawing a picture, proportional to its pixels and denoising steps."""
    return max(1, size_hw[0] * size_hw[1] * steps // _COST_PX)


def picture_spec(row: Row) -> EntrySpec:
    """Return the entry of a row of pictures."""
    tensor = TensorSpec("uint8", (row["height"], row["width"], 3))
    return EntrySpec("pictures", row["key"], {PICTURE: tensor})


def _job(row: Row) -> Job:
    work = {name: row[name] for name in ("lora", "strength", "number")}
    return Job(picture_spec(row), {"inputs": json.loads(row["inputs"])}, work, row["name"], row["cost"])


def _name(row: Mapping[str, Any]) -> str:
    lora = "the base model" if not row["step"] else f"step {row['step']:,}"
    strength = "" if row["strength"] in (0.0, 1.0) else f" at strength {number_text(row['strength'])}"
    return f"{row['prompt'][:60]!r}, seed {row['seed']}, {lora}{strength}"


def _common_inputs(evaluation: Evaluation) -> dict[str, Any]:
    """Return everything that decides all pictures of a run."""
    entries, recipe = evaluation.entries, evaluation.entries.recipe
    training = recipe.training
    return {
        "version": PICTURES_VERSION,
        "family": entries.family.spec.name,
        "denoiser": entries.fingerprint("denoiser"),
        "vae": entries.fingerprint("latents"),
        "empty_text": evaluation.job.empty_text.key,
        # Trained text encoders encode the prompts again, in another precision than the cache.
        "trained_text": training.lora.text_encoders is not None,
        "mixed_precision": entries.family.mixed_precision(recipe.accelerate.mixed_precision),
        "quantize": training.packing,
        "zero_terminal_snr": training.noise.zero_terminal_snr,
        "background": list(recipe.latents.background),
    }


def _prompt_inputs(prompt: Prompt) -> dict[str, Any]:
    """Return everything that decides the pictures of a prompt and seed."""
    # The key of its text embeddings stands for caption, text encoders and dtypes.
    return {
        "text": prompt.text.key,
        "negative": None if prompt.negative is None else prompt.negative.text.key,
        "size": list(prompt.size_hw),
        "steps": prompt.steps,
        "guidance_scale": prompt.guidance_scale,
        "seed": prompt.seed,
        "references": [file_sha256(path) for path in prompt.references],
    }
