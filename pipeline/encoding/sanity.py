"""What the first few jobs say of the VAE and of its latents' dtype: a wrong one stops all in seconds."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.encoding.jobs import Job
from pipeline.encoding.outcome import Failure, Outcome
from pipeline.errors import ModelError

VALUES_REASONS = ("latent_not_finite", "latent_overflow")
"""Of failures that the VAE, or the dtype of its latents, may be guilty of and not the image."""

_DAMAGED = "the VAE's weights are damaged, or are not those of its config.json: fetch the base model again"


def suspicious(outcomes: Sequence[Outcome]) -> bool:
    """Whether the VAE had something to answer to, and no answer was of use."""
    answers = [outcome for outcome in outcomes if not _is_the_images_affair(outcome)]
    return bool(answers) and all(isinstance(answer, Failure) for answer in answers)


def wrong_model(probes: Sequence[Job], failure: Failure, where: str) -> ModelError:
    """What stops the stage when the VAE fails on a plain picture too, with `failure`."""
    names = ", ".join(job.name for job in probes)
    return ModelError(
        f"the VAE gives no usable latent, not even of a plain picture: {failure.detail} (first: {names})",
        where=where,
        fix=failure.fix if failure.reason == "latent_overflow" else _DAMAGED,
    )


def _is_the_images_affair(outcome: Outcome) -> bool:
    """It was there already, or could not be read: the VAE has seen nothing."""
    return outcome == "present" or (isinstance(outcome, Failure) and outcome.reason not in VALUES_REASONS)
