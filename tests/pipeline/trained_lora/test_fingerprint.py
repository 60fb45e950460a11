from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from demo.tiny_models import make_tiny_chroma
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.errors import TrainingError
from pipeline.models.families import FAMILIES
from pipeline.processes.machines import Machines
from pipeline.recipe import TrainingSettings
from pipeline.recipe.schema import all_keys
from pipeline.trained_lora.differences import describe_difference
from pipeline.trained_lora.fingerprint import DERIVED_KEYS, IRRELEVANT_KEYS, is_run_id, run_facts, run_id
from pipeline.trained_lora.identities import by_content
from pipeline.trained_lora.inputs import TrainingInputs, training_inputs
from pipeline.trained_lora.recipe_facts import ALWAYS_PRESENT, RECIPE_FACTS
from pipeline.versions import TRAINING_VERSION
from tests.pipeline.recipe_effects import DECIDES_ROWS, EFFECTS, Values, merged
from tests.pipeline.trained_lora.fingerprint_case import Samples, samples
from tests.tiny_models import TinyModel

__all__ = ["samples"]


def test_L04_every_key_of_a_recipe_has_a_stated_effect() -> None:
    sections = {key for key in all_keys() if any(other.startswith(f"{key}.") for other in all_keys())}
    keys = set(all_keys()) - sections
    stated = {*EFFECTS, *DECIDES_ROWS}
    assert keys - stated == set(), "add these keys to tests/pipeline/recipe_effects.py"
    assert stated - keys == set(), "these keys no longer exist"
    assert set(EFFECTS) & DECIDES_ROWS == set(), "these keys are listed twice"


def test_R11_every_key_of_the_training_is_a_fact_or_declared_as_derived_or_irrelevant() -> None:
    keys = [key for key in all_keys() if key.startswith("training.")]
    leaves = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
    declared = [*(fact.key for fact in RECIPE_FACTS), *DERIVED_KEYS, *IRRELEVANT_KEYS]
    for key in leaves:
        places = [each for each in declared if key == each or key.startswith(f"{each}.")]
        assert len(places) == 1, f"{key} must be in one table of fingerprint.py, got {places}"
    assert set(declared) <= set(all_keys()), "these keys no longer exist"


def test_R11_a_key_that_0_2_0_lacks_is_no_fact_at_its_default(samples: Samples) -> None:
    later = [fact for fact in RECIPE_FACTS if fact.since != "0.2.0"]
    assert later
    values = samples.recipe({}).model_dump(mode="json")
    for fact in later:
        assert fact.default is not ALWAYS_PRESENT, f"{fact.key} would change the ids of all runs of 0.2.0"
        default: Any = values
        for name in fact.key.split("."):
            default = default[name]
        assert fact.default == default, f"{fact.key} has another default in the recipe"


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


def test_R11_references_decide_the_run_id_and_a_column_without_any_does_not(samples: Samples) -> None:
    entries = RecipeEntries(samples.recipe({}))
    plain = training_inputs(entries.recipe, entries, *samples.tables(entries, samples.validated)).table

    def run(*keys: str) -> str:
        """Return the id of a run whose first input has references, one list of keys per view."""
        lists = [[list(keys)] if keys else None, *[None] * (len(plain) - 1)]
        column = pl.Series("references", lists, pl.List(pl.List(pl.String)))
        return run_id(run_facts(entries.recipe, entries, TrainingInputs(plain.with_columns(column))))

    assert run() == run_id(run_facts(entries.recipe, entries, TrainingInputs(plain)))
    ids = [run(), run("a"), run("b"), run("a", "b"), run("b", "a")]
    assert len(set(ids)) == len(ids), ids


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


def test_shared_casts_are_a_fact_of_new_runs_in_mixed_precision_only(samples: Samples) -> None:
    facts: dict[tuple[str, bool], Any] = {}
    for precision in ("bf16", "no"):
        entries = RecipeEntries(samples.recipe({"accelerate": {"mixed_precision": precision}}))
        latents, text = samples.tables(entries, samples.validated)
        named = training_inputs(entries.recipe, entries, latents, text)
        for inputs in (named, by_content(named, entries.recipe, latents)):
            found = run_facts(entries.recipe, entries, inputs).get("shared_casts")
            facts[precision, inputs.is_by_content] = found
    expected = {("bf16", True): True, ("bf16", False): None, ("no", True): None, ("no", False): None}
    assert facts == expected


def test_nf4_has_another_name_in_run_ids_than_before_its_scales_were_quantized() -> None:
    names = {kind: TrainingSettings.model_validate({"quantize": kind}).packing for kind in ("nf4", "none")}
    assert names == {"nf4": "nf4_double", "none": "none"}


def test_R11_the_default_treatment_of_exhausted_datasets_never_shares_an_id_with_another_plan(
    samples: Samples,
) -> None:
    folder = samples.paths["@folder@"]
    both: Values = {
        "datasets": [
            {"name": name, "path": f"{folder}/{name}", "weight": weight}
            for name, weight in (("photos", 3.0), ("studio", 1.0))
        ]
    }
    second = samples.validated.with_columns(
        dataset=pl.lit("studio"), sample_id=pl.col("sample_id").str.replace("photos", "studio")
    )
    table = pl.concat([samples.validated, second])
    runs = {
        exhausted: samples.ids({**both, "training": {"exhausted": exhausted}}, table).run
        for exhausted in (None, "leave", "end_epoch", "repeat")
    }
    assert runs[None] == runs["repeat"]
    assert len({runs["leave"], runs["end_epoch"], runs["repeat"]}) == 3


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


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")  # in diffusers' Chroma
@pytest.mark.parametrize("kind", ["FLUX.1 dev", "Stable Diffusion 3 and 3.5", "Chroma", "Sana"])
def test_R11_the_shift_of_a_recipe_changes_the_run_id_of_a_flow_matching_model(
    tmp_path: Path, tiny_model: TinyModel, tiny_sd: Path, kind: str
) -> None:
    """The id had the shift of the base model's schedule instead, so that a run was taken for another."""
    samples = Samples(tmp_path, tiny_model(kind), tiny_sd)
    shifts = (None, 1.7, 2.5)
    runs = {samples.ids({"training": {"timesteps": {"shift": shift}}}).run for shift in shifts}
    assert len(runs) == len(shifts)
