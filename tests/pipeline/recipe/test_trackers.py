from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.recipe import TrainingSettings


def settings(**training: Any) -> TrainingSettings:
    return TrainingSettings.model_validate(training)


def test_arguments_of_a_tracker_are_those_of_the_recipe() -> None:
    address = {"mlflow": {"tracking_uri": "http://localhost:5000", "tags": {"team": "plants"}}}
    assert settings(trackers=("mlflow",), tracker_arguments=address).tracker_arguments == address


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mlflow": {}}, "tracker_arguments has mlflow, which trackers does not name"),
        ({"comet_ml": {"api_key": "s3cr3t"}}, "remove it, and set COMET_API_KEY instead"),
        (
            {"comet_ml": {"api_key": "s3cr3t"}},
            "tracker_arguments.comet_ml.api_key must not contain credentials",
        ),
        ({"comet_ml": {"url": "https://me:s3cr3t@host"}}, "but has an address with a user or password"),
    ],
)
def test_unused_arguments_and_credentials_are_mistakes(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        settings(trackers=("comet_ml",), tracker_arguments=arguments)
    details = error.value.errors(include_input=False)
    assert message in str(details)
    assert "s3cr3t" not in str(details)
