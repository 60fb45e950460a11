"""Settings of a LoRA that contradict each other, and the key that is told."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.recipe.locate import dotted
from pipeline.recipe.mistakes import Mistake, find_mistakes

SMALLEST = {"datasets": [{"name": "p", "path": "p"}], "output_dir": "o", "model": {"base": "a/b"}}


def mistakes_of(lora: dict[str, Any], **training: Any) -> list[Mistake]:
    return find_mistakes({**SMALLEST, "training": {"lora": lora, **training}})


@pytest.mark.parametrize(
    ("lora", "key", "said"),
    [
        ({"targets": "blocks", "modules": ["*"]}, "training.lora.targets", "has no effect beside modules"),
        ({"modules": ["a b"]}, "training.lora.modules[0]", "is no pattern of module paths"),
        ({"dropout": 1.0}, "training.lora.dropout", "less than"),
        ({"kind": "loha", "dora": True}, "training.lora.dora", "is not for kind: loha"),
        ({"kind": "lokr", "dropout": 0.1}, "training.lora.dropout", "is not for kind: lokr"),
        ({"init": "pissa", "dora": True}, "training.lora.dora", "is not for init: pissa"),
        ({"lokr_factor": 4}, "training.lora.lokr_factor", "has no effect with kind: lora"),
        ({"conv_alpha": 1.0}, "training.lora.conv_alpha", "has no effect without conv_rank"),
        (
            {"ranks": [{"modules": "*", "rank": 1}, {"modules": "*", "rank": 2}]},
            "training.lora.ranks[1].modules",
            "stands there before",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(lora: dict[str, Any], key: str, said: str) -> None:
    found = mistakes_of(lora)
    assert [dotted(each.path) for each in found] == [key]
    assert said in found[0].what


def test_prodigy_takes_no_rate_of_the_text_encoders_own() -> None:
    found = mistakes_of({"text_encoders": {"learning_rate": 1e-5}}, optimizer="prodigy", learning_rate=1.0)
    assert [dotted(each.path) for each in found] == ["training.lora.text_encoders.learning_rate"]
    assert "prodigy finds one step size" in found[0].what
