"""Words of other trainers: each leads to a key that there is, and none is a key of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.recipe import recipe_from_mapping
from pipeline.recipe.keys import all_keys
from pipeline.recipe.mistakes import find_mistakes
from pipeline.recipe.other_trainers import ALL, Term
from tools.docs import coming_from_page as coming_from

TERMS = [term for terms in ALL.values() for term in terms]


@pytest.mark.parametrize("term", TERMS, ids=lambda term: f"{term.trainer} {term.theirs}")
def test_a_word_of_another_trainer_leads_to_a_key_or_says_why_there_is_none(term: Term) -> None:
    assert term.note if term.ours is None else term.ours in all_keys()
    assert term.theirs not in {key.rpartition(".")[2] for key in all_keys()}, "it is a word of a recipe too"


def test_two_trainers_with_one_word_mean_one_key() -> None:
    found: dict[str, set[str | None]] = {}
    for term in TERMS:
        found.setdefault(term.theirs, set()).add(term.ours)
    assert [word for word, meant in found.items() if len(meant) > 1] == []


@pytest.mark.parametrize(
    ("place", "key", "fix"),
    [
        (
            "training",
            "network_dim",
            "write it as training.lora.rank, which is what sd-scripts calls network_dim",
        ),
        ("training", "max_train_steps", "write it as training.steps"),
        ("latents", "cache_latents", "remove it; latents and text embeddings are always kept in cache_dir"),
        ("model", "is_flux", "remove it; the family is read from"),
        (
            "training",
            "snr_gamma",
            "write it as training.loss.gamma, which is what SimpleTuner calls snr_gamma; ",
        ),
    ],
)
def test_a_recipe_with_such_a_word_is_told_the_key(place: str, key: str, fix: str) -> None:
    smallest = {"datasets": [{"name": "p", "path": "p"}], "output_dir": "o", "model": {"base": "a/b"}}
    section = {**smallest.get(place, {}), key: 1}  # type: ignore[dict-item]
    (mistake,) = find_mistakes({**smallest, place: section})
    assert mistake.what == f"unknown key {key}"
    assert mistake.fix.startswith(fix)


def test_the_recipe_on_the_page_is_one(tmp_path: Path) -> None:
    (shown,) = [block.split("```")[0] for block in coming_from.page_text().split("```yaml\n")[1:]]
    rest = {"output_dir": str(tmp_path / "out"), "model": {"base": "a/b"}}
    recipe = recipe_from_mapping("page", {**yaml.safe_load(shown), **rest})
    assert [dataset.repeats for dataset in recipe.datasets] == [10, 1]
