"""The experiment trackers a recipe can name; imports none of them.

The names are accelerate 1.15's. `pipeline/trained_lora/worker/trackers.py` starts them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, JsonValue

from pipeline.recipe.credentials import credentials_in
from pipeline.recipe.settings import Violation
from pipeline.recipe.yaml_document import dotted

TrackerName = Literal[
    "tensorboard", "wandb", "mlflow", "trackio", "comet_ml", "aim", "swanlab", "clearml", "dvclive"
]


class ArgumentsByTracker(dict[TrackerName, dict[str, JsonValue]]):
    """Arguments of each tracker; hashable, because recipes are keys of caches."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride] - nothing changes it
        return hash(json.dumps(self, sort_keys=True))


TrackerArguments = Annotated[dict[TrackerName, dict[str, JsonValue]], AfterValidator(ArgumentsByTracker)]

LOGIN = {
    "wandb": "WANDB_API_KEY",
    "mlflow": "MLFLOW_TRACKING_URI, MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
    "trackio": "HF_TOKEN",
    "comet_ml": "COMET_API_KEY",
    "swanlab": "SWANLAB_API_KEY",
    "clearml": "CLEARML_API_ACCESS_KEY and CLEARML_API_SECRET_KEY",
}
"""Environment variables with the login of each tracker that may need one."""


def tracker_violations(
    names: tuple[TrackerName, ...], arguments: Mapping[TrackerName, Mapping[str, JsonValue]]
) -> Iterator[Violation]:
    """Yield a violation for arguments of a tracker that is not used, and for arguments with credentials."""
    for name in arguments:
        if name not in names:
            what = f"tracker_arguments has {name}, which trackers does not name"
            fix = f"add {name} to training.trackers, or remove its arguments"
            yield Violation(f"tracker_arguments.{name}", what, fix, ("trackers", "tracker_arguments"))
    yield from _credential_violations(arguments)


def _credential_violations(arguments: Mapping[TrackerName, Mapping[str, JsonValue]]) -> Iterator[Violation]:
    # Recipes are committed, and each LoRA file contains its recipe.
    for path, what in credentials_in(arguments, ("tracker_arguments",)):
        login = LOGIN.get(str(path[1]), "an environment variable of the tracker")
        key = dotted(path)
        yield Violation(
            key, f"{key} must not contain credentials, but has {what}", f"remove it, and set {login} instead"
        )
