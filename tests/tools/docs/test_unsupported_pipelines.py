"""Every pipeline of diffusers with a LoRA loader has a family, or a reason why it has none."""

from __future__ import annotations

from collections.abc import Iterable

import diffusers
import pytest
from diffusers import ModularPipeline, loaders

from pipeline.models.families import FAMILIES, FamilySpec
from tools.docs.unsupported_pipelines import (
    pipelines_with_lora,
    pipelines_without_loader,
    unsupported_pipelines,
)


def unexplained(families: Iterable[FamilySpec]) -> set[str]:
    """Return the pipelines with neither a family nor a reason, and the names that diffusers lacks."""
    supported = {name for spec in families for name in spec.pipeline_classes}
    return pipelines_with_lora() ^ (supported | unsupported_pipelines().keys())


def test_every_pipeline_with_a_lora_loader_has_a_family_or_a_reason() -> None:
    assert len(pipelines_with_lora()) > 200
    assert unexplained(FAMILIES) == set(), "add a family, or a reason to pipelines_without_family.toml"
    supported = {name for spec in FAMILIES for name in spec.pipeline_classes}
    assert supported & unsupported_pipelines().keys() == set(), "these have a family and a reason"


@pytest.mark.parametrize("removed", FAMILIES, ids=lambda spec: spec.name)
def test_a_removed_family_is_missed(removed: FamilySpec) -> None:
    rest = [spec for spec in FAMILIES if spec is not removed]
    assert unexplained(rest) == set(removed.pipeline_classes)


def test_every_pipeline_without_a_loader_whose_transformer_accepts_adapters_has_a_reason() -> None:
    assert pipelines_without_loader() == unsupported_pipelines("without_loader").keys()
    assert "HunyuanImagePipeline" in pipelines_without_loader()


def test_every_lora_loader_belongs_to_a_listed_pipeline_modular_ones_included() -> None:
    kinds = {name: getattr(diffusers, name) for name in pipelines_with_lora()}
    mixins = [name for name in dir(loaders) if name.endswith("LoraLoaderMixin")]
    assert len(mixins) > 30
    unused = {
        name
        for name in mixins
        if not any(issubclass(kind, getattr(loaders, name)) for kind in kinds.values())
    }
    assert unused == {"AmusedLoraLoaderMixin"}, "no pipeline has this loader: aMUSEd's do not derive from it"

    modular = {name for name, kind in kinds.items() if issubclass(kind, ModularPipeline)}
    assert {"AnimaModularPipeline", "Flux3ModularPipeline"} <= modular
