"""LoRA settings that contradict each other, and the key that is reported."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.recipe.errors import Mistake, find_mistakes
from pipeline.recipe.yaml_document import dotted

SMALLEST = {"datasets": [{"name": "p", "path": "p"}], "output_dir": "o", "model": {"base": "a/b"}}


def mistakes_of(lora: dict[str, Any], **training: Any) -> list[Mistake]:
    return find_mistakes({**SMALLEST, "training": {"lora": lora, **training}})


@pytest.mark.parametrize(
    ("lora", "key", "what"),
    [
        (
            {"targets": "blocks", "modules": ["*"]},
            "training.lora.targets",
            "cannot be combined with modules",
        ),
        ({"modules": ["a b"]}, "training.lora.modules[0]", "must be a dotted path with * or ?"),
        ({"dropout": 1.0}, "training.lora.dropout", "less than"),
        ({"kind": "loha", "dora": True}, "training.lora.dora", "requires kind: lora, got kind: loha"),
        ({"kind": "lokr", "dropout": 0.1}, "training.lora.dropout", "requires kind: lora, got kind: lokr"),
        (
            {"init": "pissa", "dora": True},
            "training.lora.dora",
            "requires init: kaiming or gaussian, got init: pissa",
        ),
        ({"lokr_factor": 4}, "training.lora.lokr_factor", "requires kind: lokr, got kind: lora"),
        (
            {"rank_dropout": 0.1, "dora": True},
            "training.lora.rank_dropout",
            "cannot be combined with dora: true",
        ),
        ({"module_dropout": 0.1, "init": "pissa"}, "training.lora.module_dropout", "requires init: kaiming"),
        ({"kind": "loha", "rank_dropout": 0.1}, "training.lora.rank_dropout", "requires kind: lora"),
        ({"scale_weight_norms": 1.0, "dora": True}, "training.lora.scale_weight_norms", "cannot be combined"),
        (
            {"scale_weight_norms": 1.0, "kind": "lokr"},
            "training.lora.scale_weight_norms",
            "requires kind: lora",
        ),
        ({"scale_weight_norms": 1.0, "init": "olora"}, "training.lora.scale_weight_norms", "requires init"),
        ({"timestep_ranks": {}, "dora": True}, "training.lora.timestep_ranks", "cannot be combined"),
        ({"timestep_ranks": {}, "kind": "loha"}, "training.lora.timestep_ranks", "requires kind: lora"),
        ({"timestep_ranks": {}, "init": "pissa"}, "training.lora.timestep_ranks", "requires init: kaiming"),
        (
            {"timestep_ranks": {"min_rank": 16}},
            "training.lora.timestep_ranks.min_rank",
            "must be below rank 16, got 16",
        ),
        ({"native_file": True}, "training.lora.native_file", "requires kind: loha or lokr, got kind: lora"),
        ({"oft_block_size": 8}, "training.lora.oft_block_size", "requires kind: oft, got kind: lora"),
        (
            {"kind": "oft", "rank": 8},
            "training.lora.rank",
            "requires kind: lora, loha or lokr, got kind: oft",
        ),
        ({"kind": "oft", "conv_rank": 8}, "training.lora.conv_rank", "requires kind: lora, loha or lokr"),
        ({"kind": "oft", "text_encoders": {}}, "training.lora.text_encoders", "requires kind: lora, loha"),
        ({"kind": "oft", "start_from": "a.safetensors"}, "training.lora.start_from", "requires kind: lora"),
        ({"conv_alpha": 1.0}, "training.lora.conv_alpha", "conv_alpha requires conv_rank"),
        (
            {"learning_rates": [{"modules": "*", "learning_rate": 1e-3}] * 2},
            "training.lora.learning_rates[1].modules",
            "duplicate pattern *",
        ),
        ({"kind": "loha", "loraplus_ratio": 16.0}, "training.lora.loraplus_ratio", "requires kind: lora"),
        ({"init": "pissa", "save_dtype": "float16"}, "training.lora.save_dtype", "requires init: kaiming"),
        (
            {"ranks": [{"modules": "*", "rank": 1}, {"modules": "*", "rank": 2}]},
            "training.lora.ranks[1].modules",
            "duplicate pattern *",
        ),
    ],
)
def test_contradicting_settings_are_refused(lora: dict[str, Any], key: str, what: str) -> None:
    mistakes = mistakes_of(lora)
    assert [dotted(each.path) for each in mistakes] == [key]
    assert what in mistakes[0].what


@pytest.mark.parametrize(
    ("lora", "key"),
    [
        ({"text_encoders": {"learning_rate": 1e-5}}, "text_encoders.learning_rate"),
        ({"learning_rates": [{"modules": "*", "learning_rate": 1e-5}]}, "learning_rates"),
        ({"loraplus_ratio": 16.0}, "loraplus_ratio"),
    ],
    ids=str,
)
def test_prodigy_does_not_allow_separate_learning_rates(lora: dict[str, Any], key: str) -> None:
    mistakes = mistakes_of(lora, optimizer="prodigy", learning_rate=1.0)
    assert [dotted(each.path) for each in mistakes] == [f"training.lora.{key}"]
    assert "prodigy estimates one step size" in mistakes[0].what


@pytest.mark.parametrize(
    ("training", "what"),
    [
        ({"ema_decay": 0.99}, "cannot be combined with ema_decay: 0.99"),
        ({"optimizer": "schedule_free"}, "cannot be combined with optimizer: schedule_free"),
    ],
)
def test_a_limit_of_norms_excludes_averaged_weights(training: dict[str, Any], what: str) -> None:
    assert mistakes_of({}, **training) == []
    mistakes = mistakes_of({"scale_weight_norms": 1.0}, **training)
    assert [dotted(each.path) for each in mistakes] == ["training.lora.scale_weight_norms"]
    assert what in mistakes[0].what


def test_rotations_exclude_optimizers_that_average_weights_themselves() -> None:
    assert mistakes_of({"kind": "oft"}, ema_decay=0.99) == []
    mistakes = mistakes_of({"kind": "oft"}, optimizer="schedule_free")
    assert [dotted(each.path) for each in mistakes] == ["training.optimizer"]
    assert "lora.kind: oft cannot be combined with optimizer: schedule_free" in mistakes[0].what


def test_compiled_blocks_exclude_ranks_by_timestep() -> None:
    mistakes = mistakes_of({"timestep_ranks": {}}, compile=True)
    assert [dotted(each.path) for each in mistakes] == ["training.compile"]
