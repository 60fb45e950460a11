from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from demo.tiny_models import make_tiny_chroma
from pipeline.aspect_buckets.stage import assign_buckets
from pipeline.cache.requests import RecipeEntries
from pipeline.cache.text_requests import caption_variants
from pipeline.errors import TrainingError
from pipeline.models.families import FAMILIES
from pipeline.processes.machines import Machines
from pipeline.recipe import Recipe, TrainingSettings, recipe_from_mapping
from pipeline.recipe.schema import all_keys
from pipeline.storage.tables import SCHEMAS, frame
from pipeline.trained_lora.fingerprint import (
    describe_difference,
    is_run_id,
    log_differences,
    run_facts,
    run_id,
    write_facts,
)
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.samples import TrainingInputs, training_inputs
from pipeline.versions import TRAINING_VERSION
from tests.pipeline.recipe_effects import DECIDES_ROWS, EFFECTS, Values, merged

SIZES_HW = [(40, 48), (60, 200), (110, 130), (200, 64), (96, 96), (140, 90)]
"""Original sizes of the images: one smaller than its bucket, and both orientations."""


@dataclass(frozen=True)
class Ids:
    """Everything that a recipe's settings decide about its cache and its run."""

    latents: tuple[str, ...]
    text: tuple[str, ...]
    run: str


class Samples:
    """Rows of validated_dataset, and the keys and run ids that recipes give them. Nothing is encoded."""

    def __init__(self, folder: Path, base: Path, other_base: Path) -> None:
        self.paths = {
            "@folder@": str(folder),
            "@other_base@": str(other_base),
            "@lora_file@": str(folder / "lora.safetensors"),
        }
        (folder / "lora.safetensors").write_bytes(b"weights")
        self.values = {
            "datasets": [{"name": "photos", "path": str(folder / "photos")}],
            "cache_dir": str(folder / "cache"),
            "output_dir": str(folder / "out"),
            "model": {"base": str(base)},
            "buckets": {"resolution": 64, "step": 32},
            "training": {"steps": 1000},
        }
        rows = [
            {
                "sample_id": f"photos/{number}.png",
                "dataset": "photos",
                "path": f"{number}.png",
                "content_hash": hashlib.sha256(bytes([number])).hexdigest(),
                "duplicate_group": hashlib.sha256(bytes([number])).hexdigest(),
                "height": height,
                "width": width,
                "caption": f"photograph {number}",
                "more_captions": json.dumps([f"picture {number}"]),
            }
            for number, (height, width) in enumerate(SIZES_HW)
        ]
        columns = SCHEMAS["validated_dataset"].items()
        blank = {name: "" if kind == pl.String else 0 for name, kind in columns}
        self.validated = frame("validated_dataset", [blank | row for row in rows])

    def recipe(self, values: Values) -> Recipe:
        """Return the recipe with some other values; `resolutions` and `sizes` replace the resolution."""
        text = json.dumps(merged(self.values, values))
        for name, path in self.paths.items():
            text = text.replace(name, path)
        return recipe_from_mapping("demo", json.loads(text))

    def tables(self, entries: RecipeEntries, validated: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return the columns of vae_latents and text_embeddings that decide keys and run ids."""
        buckets = assign_buckets(entries.recipe, validated, log=lambda line: None).table
        text = caption_variants(validated).with_columns(text_length=pl.lit(77))
        return entries.latent_requests(buckets), text

    def ids(self, values: Values, validated: pl.DataFrame | None = None) -> Ids:
        """Return the keys and the run id of a recipe with these values."""
        entries = RecipeEntries(self.recipe(values))
        latents, text = self.tables(entries, self.validated if validated is None else validated)
        facts = run_facts(entries.recipe, entries, training_inputs(entries.recipe, entries, latents, text))
        return Ids(tuple(latents["key"]), tuple(entries.text_keys(text["caption"])), run_id(facts))

    @cached_property
    def unchanged(self) -> Ids:
        """Keys and run id of the recipe without other values."""
        return self.ids({})


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory, tiny_sd: Path, tiny_sdxl: Path) -> Samples:
    return Samples(tmp_path_factory.mktemp("samples"), tiny_sd, tiny_sdxl)


def test_L04_every_key_of_a_recipe_has_a_stated_effect() -> None:
    sections = {key for key in all_keys() if any(other.startswith(f"{key}.") for other in all_keys())}
    keys = set(all_keys()) - sections
    stated = {*EFFECTS, *DECIDES_ROWS}
    assert keys - stated == set(), "add these keys to tests/pipeline/recipe_effects.py"
    assert stated - keys == set(), "these keys no longer exist"
    assert set(EFFECTS) & DECIDES_ROWS == set(), "these keys are listed twice"


@pytest.mark.parametrize("key", EFFECTS)
def test_L04_R11_a_setting_changes_exactly_the_keys_and_the_run_id_that_it_decides(
    samples: Samples, key: str
) -> None:
    effect = EFFECTS[key]
    context = effect.context or {}
    before = samples.ids(context) if context else samples.unchanged
    after = samples.ids(merged(context, effect.change))
    changed = {name for name in ("latents", "text", "run") if getattr(before, name) != getattr(after, name)}
    expected = {name for name in ("latents", "text", "run") if getattr(effect, name)}
    assert changed == expected, f"{key}: {effect.change} changes {changed}, expected {expected}"


def test_R11_a_run_has_the_facts_of_earlier_versions(samples: Samples) -> None:
    """A fact that is missing or new makes all runs start again, so a change here must be intended."""
    entries = RecipeEntries(samples.recipe({}))
    inputs = training_inputs(entries.recipe, entries, *samples.tables(entries, samples.validated))
    facts = run_facts(entries.recipe, entries, inputs)
    sections = {"samples", "model", "plan", "loss", "noise", "optimizer", "schedule", "lora"}
    values = {"version", "empty_text", "mixed_precision", "quantize", "compile"}
    assert facts.keys() == sections | values
    plan = {"seed", "batch_size", "gradient_accumulation", "num_processes", "caption_dropout", "underfilled"}
    expected = {
        "samples": {"number", "latents", "text", "repeats"},
        "model": {"family", "denoiser"},
        "plan": plan,
        "optimizer": {"kind", "arguments", "learning_rate", "max_grad_norm", "ema_decay"},
        "schedule": {"kind", "warmup_steps"},
    }
    assert {name: set(facts[name]) for name in expected} == expected
    assert {"prediction", "timesteps", "density"} <= facts["loss"].keys()
    assert {"start_from", "family_targets"} <= facts["lora"].keys()


def test_R11_the_steps_do_not_change_the_run_id_of_a_constant_rate(samples: Samples) -> None:
    assert samples.ids({"training": {"steps": 50}}).run == samples.unchanged.run


def test_R11_another_version_of_the_training_code_changes_the_run_id(
    samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = samples.unchanged.run
    monkeypatch.setattr("pipeline.trained_lora.fingerprint.TRAINING_VERSION", TRAINING_VERSION + 1)
    assert samples.ids({}).run != before


def test_R11_the_machines_of_a_training_do_not_change_the_run_id(
    samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = {"accelerate": {"num_processes": 4}}
    alone = samples.ids(change).run
    assert alone != samples.unchanged.run
    variables = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "5", "SLURM_NNODES": "2"}
    for name, value in {**variables, **Machines(2, 1, "127.0.0.1", 5).environment()}.items():
        monkeypatch.setenv(name, value)
    assert samples.ids(change).run == alone


PLAIN_FACTS: dict[str, Any] = {
    "version": 1,
    "samples": {"number": 6, "latents": "hash", "text": "hash", "repeats": "hash"},
    "empty_text": "hash",
    "model": {"family": "Stable Diffusion 1.x and 2.x", "denoiser": "hash"},
    "plan": {
        "seed": 42,
        "batch_size": 1,
        "gradient_accumulation": 1,
        "num_processes": 1,
        "caption_dropout": 0.1,
        "underfilled": "partial",
    },
    "loss": {
        "kind": "mse",
        "delta": 0.1,
        "weighting": "none",
        "gamma": 5.0,
        "prediction": "epsilon",
        "timesteps": {
            "density": "auto",
            "location": 0.0,
            "scale": 1.0,
            "mode_scale": 1.29,
            "min": 0.0,
            "max": 1.0,
            "shift": None,
        },
        "density": "uniform",
    },
    "noise": {"offset": 0.0, "input_perturbation": 0.0, "zero_terminal_snr": False},
    "optimizer": {
        "kind": "adamw",
        "arguments": {},
        "learning_rate": 0.0001,
        "max_grad_norm": 1.0,
        "ema_decay": None,
    },
    "schedule": {"kind": "constant", "warmup_steps": 0},
    "lora": {
        "rank": 16,
        "alpha": 16.0,
        "kind": "lora",
        "dropout": 0.0,
        "targets": "family",
        "modules": [],
        "conv_rank": None,
        "conv_alpha": None,
        "ranks": [],
        "dora": False,
        "rslora": False,
        "init": "kaiming",
        "start_from": None,
        "family_targets": ["to_q", "to_k", "to_v", "to_out.0"],
    },
    "mixed_precision": "no",
    "quantize": "none",
    "compile": False,
}
"""Facts of a recipe of defaults, as of 2026-11-25, with "hash" for each SHA-256."""

RICH_RECIPE: Values = {
    "datasets": [
        {
            "name": "photos",
            "path": "@folder@/photos",
            "weight": 2.0,
            "loss_weight": 0.5,
            "mask": {"path": "@folder@/masks", "unmasked_weight": 0.2, "prior_weight": 0.1},
        },
        {"name": "class", "path": "@folder@/class", "role": "prior", "weight": 1.0},
    ],
    "text": {"caption_dropout": 0.0},
    "training": {
        "exhausted": "repeat",
        "loss": {"prior_weight": 0.5},
        "lr_scheduler": "cosine",
        "optimizer_arguments": {"weight_decay": 0.5},
        "lora": {
            "targets": "blocks",
            "save_dtype": "float16",
            "loraplus_ratio": 16.0,
            "start_from": "@lora_file@",
        },
    },
}

RICH_FACTS: dict[str, Any] = {
    "samples.number": 12,
    "samples.masks": "hash",
    "empty_text": None,
    "plan.caption_dropout": 0.0,
    "plan.weights.photos": 2.0,
    "plan.weights.class": 1.0,
    "plan.exhausted": "repeat",
    "loss.prior.datasets": ["class"],
    "loss.prior.target": "images",
    "loss.prior.weight": 0.5,
    "loss.dataset_weights.photos": 0.5,
    "loss.masks.photos.unmasked_weight": 0.2,
    "loss.masks.photos.normalise": True,
    "loss.masks.photos.prior_weight": 0.1,
    "optimizer.arguments.weight_decay": 0.5,
    "schedule.kind": "cosine",
    "schedule.steps": 1000,
    "schedule.cycles": 1,
    "schedule.power": 1.0,
    "schedule.decay_steps": 0,
    "lora.targets": "blocks",
    "lora.loraplus_ratio": 16.0,
    "lora.save_dtype": "float16",
    "lora.start_from": "hash",
    "lora.family_targets": None,
}
"""Facts of `RICH_RECIPE` that differ from those of defaults."""


def facts_of(samples: Samples, values: Values, validated: pl.DataFrame) -> dict[str, Any]:
    entries = RecipeEntries(samples.recipe(values))
    inputs = training_inputs(entries.recipe, entries, *samples.tables(entries, validated))
    return run_facts(entries.recipe, entries, inputs)


def without_hashes(facts: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the facts by dotted name, with "hash" for each SHA-256."""
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, dict) and value:
            flat |= without_hashes(value, f"{prefix}{name}.")
        else:
            is_hash = isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value)
            flat[f"{prefix}{name}"] = "hash" if is_hash else value
    return flat


def test_R11_the_facts_of_a_run_are_those_of_earlier_versions(samples: Samples) -> None:
    """A fact that is new or missing would start every run again."""
    plain = facts_of(samples, {}, samples.validated)
    assert without_hashes(plain) == without_hashes(PLAIN_FACTS)

    hashes = pl.col("content_hash").str.reverse()
    masked = samples.validated.with_columns(mask_path="path", mask_hash=hashes, mask_mean=pl.lit(0.5))
    prior = samples.validated.with_columns(
        dataset=pl.lit("class"), sample_id=pl.col("sample_id").str.replace("photos", "class")
    )
    both = pl.concat([masked, prior], how="diagonal")
    rich = without_hashes(facts_of(samples, RICH_RECIPE, both))
    assert rich == {
        **without_hashes(
            {
                **PLAIN_FACTS,
                "optimizer": {
                    **PLAIN_FACTS["optimizer"],
                    "arguments": RICH_RECIPE["training"]["optimizer_arguments"],
                },
            }
        ),
        **RICH_FACTS,
    }


def test_the_samples_of_a_run_are_hashed_with_their_buckets_and_entries(samples: Samples) -> None:
    entries = RecipeEntries(samples.recipe({"datasets": {"repeats": 3}}))
    inputs = training_inputs(entries.recipe, entries, *samples.tables(entries, samples.validated))

    def digest(rows: list[list[Any]]) -> str:
        return hashlib.sha256("".join(json.dumps(row) + "\n" for row in rows).encode()).hexdigest()

    assert run_facts(entries.recipe, entries, inputs)["samples"] == {
        "number": len(inputs),
        "latents": digest([[i.variant_id, i.bucket, *(view.entry.key for view in i.views)] for i in inputs]),
        "text": digest([[i.variant_id, *(variant.entry.key for variant in i.variants)] for i in inputs]),
        "repeats": digest([[i.variant_id, 3] for i in inputs]),
    }


def test_a_run_id_is_the_beginning_of_a_hash_of_canonical_json() -> None:
    name = run_id({"b": [1, 2], "a": None})
    assert name == hashlib.sha256(b'{"a":null,"b":[1,2]}').hexdigest()[:16]
    assert is_run_id(name)
    for other in (name[:-1], f"{name}0", name.upper(), "lora", f"{name}\n"):
        assert not is_run_id(other), other


def test_a_new_run_is_compared_with_the_most_recent_other_one(tmp_path: Path) -> None:
    for number, run in enumerate(["aa", "cc", "bb", "new"]):
        layout = RunLayout(tmp_path / run)
        layout.folder.mkdir()
        write_facts(layout, {"plan": {"seed": number, "name": "x" * 31, "hash": run * 16}})
        os.utime(layout.facts, ns=(0, 10**9 * {"aa": 2, "cc": 3, "bb": 1, "new": 4}[run]))
    lines: list[str] = []
    log_differences(
        tmp_path, "new", {"plan": {"seed": 3, "name": "y" * 31, "hash": "d" * 32}}, log=lines.append
    )
    assert lines == [
        "run new is new; it differs from cc in "
        f"plan.hash cccccccc... -> dddddddd...; plan.name {'x' * 31} -> {'y' * 31}; plan.seed 1 -> 3"
    ]


def test_a_lora_to_start_from_that_is_missing_is_an_error_that_names_the_key(samples: Samples) -> None:
    values: Values = {"training": {"lora": {"start_from": "@folder@/missing.safetensors"}}}
    with pytest.raises(TrainingError) as excinfo:
        samples.ids(values)
    assert excinfo.value.where.startswith("training.lora.start_from: ")


FACTS_OF_ROWS: dict[str, Callable[[pl.DataFrame], pl.DataFrame]] = {
    "content": lambda table: _with_first(table, "content_hash", "f" * 64),
    "caption": lambda table: _with_first(table, "caption", "another caption"),
    "second caption": lambda table: _with_first(table, "more_captions", '["another caption"]'),
    "one more caption": lambda table: _with_first(table, "more_captions", '["picture 0", "photo 0"]'),
    "size": lambda table: _with_first(table, "width", 128),
    "name": lambda table: _with_first(table, "sample_id", "photos/0.jpg"),
    "missing sample": lambda table: table.tail(-1),
    "exchanged captions": lambda table: table.with_columns(pl.col("caption").reverse()),
    "exchanged contents": lambda table: table.with_columns(pl.col("content_hash").reverse()),
}
"""Changes of validated_dataset that change what is trained."""


def _with_first(table: pl.DataFrame, column: str, value: object) -> pl.DataFrame:
    is_first = pl.int_range(pl.len()) == 0
    changed = pl.when(is_first).then(pl.lit(value)).otherwise(column).cast(table.schema[column])
    return table.with_columns(changed.alias(column))


@pytest.mark.parametrize("name", FACTS_OF_ROWS)
def test_R11_every_fact_of_a_sample_that_is_trained_changes_the_run_id(samples: Samples, name: str) -> None:
    changed = FACTS_OF_ROWS[name](samples.validated)
    assert samples.ids({}, changed).run != samples.unchanged.run, f"another {name} keeps the run id"


def test_R11_the_order_of_rows_keeps_the_run_id(samples: Samples) -> None:
    entries = RecipeEntries(samples.recipe({}))
    latents, text = samples.tables(entries, samples.validated)
    facts = [
        run_facts(entries.recipe, entries, training_inputs(entries.recipe, entries, *tables))
        for tables in [(latents, text), (latents.reverse(), text.reverse())]
    ]
    assert describe_difference(*facts) == [], "rows in reverse order give another run"


def test_R11_empty_captions_with_references_decide_the_run_id_only_if_dropout_trains_them(
    samples: Samples,
) -> None:
    def run(dropout: float, key: str) -> str:
        entries = RecipeEntries(samples.recipe({"text": {"caption_dropout": dropout}}))
        inputs = training_inputs(entries.recipe, entries, *samples.tables(entries, samples.validated))
        inputs = TrainingInputs(inputs.table.with_columns(empty_text=pl.lit(key)))
        return run_id(run_facts(entries.recipe, entries, inputs))

    assert run(0.2, "of one image") != run(0.2, "of another image")
    assert run(0.0, "of one image") == run(0.0, "of another image")


def test_a_difference_lists_each_changed_fact_with_both_values() -> None:
    before = {"plan": {"seed": 1, "batch_size": 2}, "samples": {"latents": "a" * 64}}
    after = {"plan": {"seed": 3, "batch_size": 2}, "samples": {"latents": "b" * 64}}
    assert describe_difference(before, after) == [
        "plan.seed 1 -> 3",
        "samples.latents aaaaaaaa... -> bbbbbbbb...",
    ]


def test_a_first_run_logs_no_differences(tmp_path: Any) -> None:
    log_differences(tmp_path, "run", {}, log=pytest.fail)


def test_the_masks_of_samples_decide_the_run_id_and_not_the_keys_of_latents(samples: Samples) -> None:
    values = {"datasets": {"mask": {"path": "@folder@/masks"}}}
    hashes = pl.col("content_hash").str.reverse()
    masked = samples.validated.with_columns(mask_path=pl.col("path"), mask_hash=hashes, mask_mean=pl.lit(0.5))
    redrawn = _with_first(masked, "mask_hash", "e" * 64)
    ids = [samples.ids(values, table) for table in (masked, redrawn)]
    assert ids[0].run != ids[1].run
    assert ids[0].latents == ids[1].latents == samples.unchanged.latents
    assert samples.ids({}, masked) == samples.unchanged


def test_the_run_id_holds_resolved_values_instead_of_auto_and_int8(samples: Samples) -> None:
    stated = samples.ids({"accelerate": {"mixed_precision": "no"}})
    assert samples.ids({"accelerate": {"mixed_precision": "auto"}}) == samples.unchanged == stated

    int8 = samples.ids({"training": {"quantize": "int8"}})
    assert int8 == samples.ids({"training": {"quantize": "int8_torchao"}})
    assert int8.run != samples.unchanged.run


def test_nf4_has_another_name_in_run_ids_than_before_its_scales_were_quantized() -> None:
    names = {kind: TrainingSettings.model_validate({"quantize": kind}).packing for kind in ("nf4", "none")}
    assert names == {"nf4": "nf4_double", "none": "none"}


@pytest.mark.parametrize("kind", ["folder", "damaged"])
def test_a_new_run_is_announced_even_if_the_earlier_record_cannot_be_read(tmp_path: Path, kind: str) -> None:
    record = tmp_path / "earlier" / "run.json"
    record.parent.mkdir()
    if kind == "folder":
        record.mkdir()
    else:
        record.write_text("{")
    lines: list[str] = []
    log_differences(tmp_path, "later", {}, log=lines.append)
    (line,) = lines
    assert line.startswith("run later is new; how it differs from earlier is unknown")


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")  # in diffusers' Chroma
def test_the_version_of_an_objective_is_in_the_run_id_of_its_family_only(
    tmp_path: Path, tiny_sd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_chroma(tmp_path / "chroma")
    samples = Samples(tmp_path, tmp_path / "chroma", tiny_sd)
    second = samples.ids({})
    unversioned = [replace(spec, objective=1) for spec in FAMILIES]
    assert [spec.name for spec in FAMILIES if spec.objective != 1] == [
        "FLUX.2 klein",
        "FLUX.2 dev",
        "Z-Image",
        "Chroma",
        "Lumina Image 2",
    ]
    monkeypatch.setattr("pipeline.models.families.FAMILIES", unversioned)
    first = samples.ids({})
    assert first.run != second.run
    assert (first.latents, first.text) == (second.latents, second.text)
