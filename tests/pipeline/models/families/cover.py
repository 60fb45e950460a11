"""The families whose complete jobs run by default, because together they use every shared part.

All other families run theirs in `make test-full`: their own parts are compared with diffusers there.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.models.families import FAMILIES, FamilySpec
from pipeline.models.worker.family import part_class


def shared_parts(spec: FamilySpec) -> set[str]:
    """Return the classes and choices of a family that other families may have too."""
    declared = [type(part) for part in (spec.latents, spec.text, spec.noise, spec.lora)]
    paths = (
        spec.latents.codec,
        spec.text.conditioner,
        spec.noise.process,
        spec.denoiser_call,
        spec.drawing,
    )
    ancestors = {kind for part in (*declared, *map(part_class, paths)) for kind in part.__mro__}
    classes = {
        f"{kind.__module__}.{kind.__name__}"
        for kind in ancestors
        if kind.__module__.startswith("pipeline.models.") and not is_of_one_family(kind)
    }
    choices = {f"denoiser {spec.denoiser_name}", f"text padding {spec.text.padding}"}
    return classes | choices | ({"references"} if spec.references is not None else set())


def is_of_one_family(kind: type) -> bool:
    """Return whether a class is in the file of a family, next to the declaration or on the torch side."""
    package, _, module = kind.__module__.rpartition(".")
    return package.endswith(".families") and module != "family"


def cover(families: Sequence[FamilySpec] = FAMILIES) -> list[FamilySpec]:
    """Return few families that use every shared part of all: each adds more missing parts than any other."""
    missing = set[str]().union(*map(shared_parts, families))
    chosen: list[FamilySpec] = []
    while missing:
        best = max(families, key=lambda spec: len(missing & shared_parts(spec)))
        chosen.append(best)
        missing -= shared_parts(best)
    return chosen
