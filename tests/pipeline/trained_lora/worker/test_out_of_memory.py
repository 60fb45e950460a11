"""Out-of-memory errors advise the settings that the recipe does not use yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from pipeline.trained_lora.worker.out_of_memory import out_of_memory_error

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


@pytest.mark.parametrize(
    ("settings", "not_advised"),
    [
        ({"gradient_checkpointing": True}, "gradient_checkpointing: true"),
        ({"batch_size": 1}, "batch_size"),
        ({"lora": {"rank": 4, "alpha": 2.0, "dora": True}}, "quantize"),
        ({"lora": {"rank": 4, "alpha": 2.0, "init": "pissa"}}, "quantize"),
        ({"lora": {"rank": 4, "alpha": 2.0, "init": "olora"}}, "quantize"),
        ({"offload": 0}, "offload"),
    ],
    ids=str,
)
def test_advice_omits_settings_that_are_already_set_or_impossible(
    make_project: Callable[..., Project], settings: dict[str, Any], not_advised: str
) -> None:
    plain = out_of_memory_error(make_project().recipe, "in step 3", "79.0 of 80.0 GiB used").fix
    assert not_advised in plain
    changed = out_of_memory_error(make_project(**settings).recipe, "in step 3", "")
    assert not_advised not in changed.fix
    assert "resolution" in changed.fix


def test_checkpointing_is_advised_before_packing_which_saves_memory_only_together_with_it(
    make_project: Callable[..., Project],
) -> None:
    recipe = make_project(batch_size=2).changed("pair", num_processes=2).recipe
    fix = out_of_memory_error(recipe, "in step 3", "").fix
    advice = ("gradient_checkpointing: true", "mixed_precision", "batch_size", "shard", "offload", "quantize")
    places = [fix.find(each) for each in advice]
    assert -1 not in places
    assert places == sorted(places), f"the advice must be in the order {', '.join(advice)}: {fix}"


def test_sharding_is_advised_for_several_processes_and_excludes_streaming_and_packing(
    make_project: Callable[..., Project],
) -> None:
    project = make_project()
    alone, pair, sharded, packed = (
        out_of_memory_error(project.changed("other", **settings).recipe, "in step 3", "").fix
        for settings in (
            {},
            {"num_processes": 2},
            {"num_processes": 2, "shard": True},
            {"num_processes": 2, "quantize": "int8"},
        )
    )
    assert "set accelerate.shard: true" in pair
    for advice in (alone, sharded, packed):
        assert "accelerate.shard" not in advice
    assert "offload" in pair
    assert "offload" not in sharded
    assert "quantize" not in sharded
