"""Settings of other trainers: each is mapped to an existing key, and none is a recipe key itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.recipe import recipe_from_mapping
from pipeline.recipe.errors import find_mistakes
from pipeline.recipe.other_trainers import Term, terms_by_trainer
from pipeline.recipe.schema import all_keys
from tools.docs import coming_from_page as coming_from

TERMS = [term for terms in terms_by_trainer().values() for term in terms]


@pytest.mark.parametrize("term", TERMS, ids=lambda term: f"{term.trainer} {term.theirs}")
def test_a_setting_of_another_trainer_has_a_key_or_a_reason_why_not(term: Term) -> None:
    assert term.note if term.ours is None else term.ours in all_keys()
    assert term.theirs not in {key.rpartition(".")[2] for key in all_keys()}, "it is a recipe key too"


def test_a_name_that_two_trainers_use_is_mapped_to_one_key() -> None:
    keys: dict[str, set[str | None]] = {}
    for term in TERMS:
        keys.setdefault(term.theirs, set()).add(term.ours)
    assert [name for name, ours in keys.items() if len(ours) > 1] == []


@pytest.mark.parametrize(
    ("place", "key", "fix"),
    [
        (
            "training",
            "network_dim",
            "write training.lora.rank, the equivalent of network_dim in sd-scripts",
        ),
        ("training", "max_train_steps", "write training.steps"),
        ("latents", "cache_latents", "remove it; latents and text embeddings are always cached in cache_dir"),
        ("model", "is_flux", "remove it; the model family is detected from"),
        (
            "training",
            "snr_gamma",
            "write training.loss.gamma, the equivalent of snr_gamma in SimpleTuner (",
        ),
    ],
)
def test_a_recipe_with_the_name_of_another_trainer_gets_the_key_as_fix(
    place: str, key: str, fix: str
) -> None:
    smallest = {"datasets": [{"name": "p", "path": "p"}], "output_dir": "o", "model": {"base": "a/b"}}
    section = {**smallest.get(place, {}), key: 1}  # type: ignore[dict-item]
    (mistake,) = find_mistakes({**smallest, place: section})
    assert mistake.what == f"unknown key {key}"
    assert mistake.fix.startswith(fix)


def test_the_recipe_on_the_page_is_valid(tmp_path: Path) -> None:
    (example,) = [block.split("```")[0] for block in coming_from.page_text().split("```yaml\n")[1:]]
    rest = {"output_dir": str(tmp_path / "out"), "model": {"base": "a/b"}}
    recipe = recipe_from_mapping("page", {**yaml.safe_load(example), **rest})
    assert [dataset.repeats for dataset in recipe.datasets] == [10, 1]
