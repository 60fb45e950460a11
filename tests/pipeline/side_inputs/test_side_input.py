"""Each description of a side input matches what the recipe, the tables and the checks declare."""

from __future__ import annotations

import json

import polars as pl
import pytest

from pipeline.images.formats import ImageError
from pipeline.recipe.check_specs import specs_of
from pipeline.recipe.datasets import SIDE_INPUT_KEYS, DatasetSettings, side_input_sections
from pipeline.side_inputs import MASKS, REFERENCES, SIDE_INPUTS, SideInput
from pipeline.side_inputs.side_input import RECORDED
from pipeline.storage.needed_columns import SIDE_INPUT_HASHES
from pipeline.storage.tables import SIDE_INPUT_COLUMNS

EACH = pytest.mark.parametrize("side_input", SIDE_INPUTS, ids=lambda each: each.plural)


def test_the_descriptions_are_those_of_the_recipe_and_of_the_tables() -> None:
    assert [each.recipe_key for each in SIDE_INPUTS] == list(SIDE_INPUT_KEYS)
    assert [each.plural for each in SIDE_INPUTS] == list(SIDE_INPUT_COLUMNS)
    assert tuple(each.hash_column for each in SIDE_INPUTS) == SIDE_INPUT_HASHES


@EACH
def test_the_columns_of_a_side_input_are_in_its_tables(side_input: SideInput) -> None:
    columns = SIDE_INPUT_COLUMNS[side_input.plural]
    assert side_input.hash_column in columns["validated_dataset"]
    assert columns["validated_dataset"].items() <= columns["aspect_buckets"].items()
    assert {side_input.hash_column, side_input.keys_column} <= columns["vae_latents"].keys()


@EACH
def test_the_checks_of_a_side_input_are_gates(side_input: SideInput) -> None:
    gates = {spec.name for spec in specs_of("validated_dataset") if spec.gate}
    assert {f"{side_input.plural}_{check}" for check in ("present", "usable", "matched")} <= gates


@EACH
def test_a_file_error_names_the_file_and_has_the_prefix_once(side_input: SideInput) -> None:
    error = side_input.error(ImageError("truncated", "it ends early", fix="copy it again"), "a.png")
    assert error.reason == f"{side_input.name}_truncated"
    assert error.detail == f"the {side_input.name} a.png: it ends early"
    assert side_input.error(error, "a.png").reason == error.reason


@EACH
def test_a_table_without_the_columns_records_no_entries(side_input: SideInput) -> None:
    for table in (None, pl.DataFrame({"sample_id": ["photos/a.png"]})):
        recorded = side_input.recorded(table)
        assert recorded.is_empty()
        assert RECORDED.items() <= dict(recorded.schema).items()


def test_a_dataset_lists_its_side_inputs_with_their_keys() -> None:
    sections = {
        "mask": {"path": "/masks"},
        "references": [{"path": "/before"}, {"path": "/style", "suffix": "-s"}],
    }
    dataset = DatasetSettings.model_validate_json(
        json.dumps({"name": "photos", "path": "/photos", **sections})
    )
    keys = [(each.kind, each.key) for each in dataset.side_inputs]
    assert keys == [("mask", "mask"), ("references", "references[0]"), ("references", "references[1]")]
    assert [str(root) for root in dataset.side_input_roots("references")] == ["/before", "/style"]
    assert [len(each.sections(dataset)) for each in (MASKS, REFERENCES)] == [1, 2]

    paths = [(key, section["path"]) for key, section in side_input_sections(sections)]
    expected = [(("mask",), "/masks"), (("references", 0), "/before"), (("references", 1), "/style")]
    assert paths == expected
    assert list(side_input_sections({"mask": None, "references": []})) == []


def test_references_state_decoding_rules_only_where_they_apply() -> None:
    """The column of all other references, and so their keys, are those of 0.3.0."""
    files = [
        {"path": "a.png", "hash": "aa", "height": 8, "width": 9, "decoding": None},
        {"path": "b.tif", "hash": "bb", "height": 8, "width": 9, "decoding": "white_is_zero"},
    ]
    images = json.loads(REFERENCES.columns({}, files)["reference_images"])
    assert images == [{name: files[0][name] for name in ("path", "hash", "height", "width")}, files[1]]
