"""Loading the components of a base model with diffusers and transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

if TYPE_CHECKING:
    from torch import nn

    from pipeline.models.families import Family


def keep_quiet() -> None:
    """Silence the progress bars and hints of diffusers and transformers in this process."""
    for logging in (diffusers_logging, transformers_logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()


def component_class(family: Family, role: str) -> Any:
    """Return the class that `family.components` names for a component."""
    return family.class_of(role)


def pipeline_class(family: Family) -> Any:
    """Return the family's pipeline class of diffusers."""
    return family.pipeline_class()


def load_component(family: Family, role: str, dtype: str, device: str) -> nn.Module:
    """Return a network of `family.components`, frozen and in evaluation mode."""
    return family.load_component(role, dtype, device)
