"""Adapters, optimizers and losses teach the demo's base model a shape that it does not know.

The score counts new pictures with the right shape, colour and background, see demo/score.py. `make demo`
trains one cell of the table, and these slow tests all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from demo.experiments import changed_demo, shuffle_captions, teach
from demo.learned import MAX_LOST, Learned
from pipeline.recipe import load_recipe

Teach: TypeAlias = Callable[..., Learned]

ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"dora": True},
    "rslora": {"rslora": True, "alpha": 4.0},
    "pissa": {"init": "pissa"},
    "loha": {"kind": "loha"},
    "lokr": {"kind": "lokr"},
}
"""Changes of `training.lora`."""

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adafactor": {"optimizer": "adafactor", "learning_rate": 0.2},
    "lion": {"optimizer": "lion", "learning_rate": 5e-4},
}
"""Changes of `training`. Adafactor's rate is relative to a weight's size, and most weights start at 0."""

RATES = {
    ("pissa", "adafactor"): 0.02,
    ("pissa", "lion"): 1e-4,
    ("loha", "adafactor"): 0.3,
    ("loha", "lion"): 2e-3,
    ("lokr", "lion"): 2e-3,
}
"""Learning rates of cells that learn too little at the optimizer's. PiSSA's weights do not start at 0."""

SETTINGS: dict[str, dict[str, Any]] = {
    "min_snr": {"training": {"loss": {"weighting": "min_snr"}}},
    "caption dropout": {"text": {"caption_dropout": 0.3}},
    "int8": {"training": {"quantize": "int8"}},
    "bf16": {"accelerate": {"mixed_precision": "bf16"}},
}
"""Changes of the recipe."""

MIN_CONCEPT = 0.3
"""Minimum score of the concept. It is 0 for the base model, and for a LoRA trained with shuffled captions."""

SLOW_CPU = pytest.mark.timeout(1_200)
"""A cell takes one to two minutes alone, more beside other tests, and bf16 more on a CPU without it."""


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache that all lessons share, since they encode the same pictures."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def lesson(tmp_path: Path, cache: Path) -> Teach:
    """Return a function that trains with changed settings and returns the scores."""

    def run(*, shuffled: bool = False, **sections: Any) -> Learned:
        training = {"sample_every": 0, **sections.pop("training", {})}
        recipe = changed_demo(tmp_path, cache_dir=str(cache), training=training, **sections)
        if shuffled:
            shuffle_captions(tmp_path / "pictures")
        return teach(recipe)

    return run


def has_learned(learned: Learned) -> bool:
    return learned.concept_before == 0 and learned.concept_after >= MIN_CONCEPT and learned.lost <= MAX_LOST


def cell(adapter: str, optimizer: str) -> dict[str, Any]:
    """Return the changes of `training` for a cell of the table."""
    changes = {**OPTIMIZERS[optimizer], "lora": ADAPTERS[adapter]}
    if (adapter, optimizer) in RATES:
        changes["learning_rate"] = RATES[adapter, optimizer]
    return changes


@pytest.mark.slow
@SLOW_CPU
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_each_adapter_and_optimizer_teaches_the_concept(lesson: Teach, adapter: str, optimizer: str) -> None:
    learned = lesson(training=cell(adapter, optimizer))
    assert has_learned(learned), learned.summary()


@pytest.mark.slow
@SLOW_CPU
@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_teaches_the_concept(lesson: Teach, name: str) -> None:
    learned = lesson(**SETTINGS[name])
    assert has_learned(learned), learned.summary()


@pytest.mark.slow
@SLOW_CPU
def test_a_lora_of_shuffled_captions_does_not_teach_the_concept(lesson: Teach) -> None:
    learned = lesson(shuffled=True)
    assert learned.concept_after <= MIN_CONCEPT / 3, learned.summary()


@pytest.mark.slow
@SLOW_CPU
def test_a_training_that_is_continued_teaches_the_concept(tmp_path: Path, cache: Path) -> None:
    training = {"steps": 150, "lr_scheduler": "constant", "learning_rate": 2e-3, "sample_every": 0}
    recipe = changed_demo(tmp_path, cache_dir=str(cache), training=training)
    teach(recipe)
    text = recipe.source.read_text("utf-8")
    recipe.source.write_text(text.replace('"steps": 150', '"steps": 400'), encoding="utf-8")

    learned = teach(load_recipe(recipe.source))
    assert has_learned(learned), learned.summary()
    assert len(list((recipe.output_dir / "runs").iterdir())) == 1
