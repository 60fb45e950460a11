"""The section `references` of a dataset: images that an editing model sees next to the noisy image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import Field

from pipeline.recipe.settings import Settings, Violation
from pipeline.recipe.validators import FolderAddress


class ReferenceSettings(Settings):
    """A reference image for each image of the dataset, such as the picture before an edit.

    Exactly one of `path` and `column` is required.
    """

    path: FolderAddress | None = Field(
        default=None,
        description="Folder of the references, paired with the images by relative path without suffix: "
        "the reference of people/anna.jpg is people/anna.png or people/anna.jpg. Its size may differ from "
        "the size of its image. Relative to the project root, or an address as for `datasets[].path`. If it "
        "is inside the dataset's folder, its files do not count as images.",
    )
    column: str | None = Field(
        default=None,
        min_length=1,
        description="Column of the manifest with the paths of the references, relative to "
        "`datasets[].images`. Several images may name the same reference.",
    )
    suffix: str = Field(
        default="",
        pattern=r"^[^/\\*?]*$",
        description="End of the references' file names before the dot, such as -before: the reference of "
        "anna.jpg is anna-before.png. Only with `path`, which may then be the dataset's own folder.",
    )
    resolution: int | None = Field(
        default=None,
        ge=16,
        le=16_384,
        description="Largest size of a reference, in pixels: one with more than resolution squared pixels is "
        "scaled down to that area. Its aspect ratio stays the same, apart from rounding. null means the size "
        "that the base model's pipeline in diffusers uses, as it does in previews in any case.",
    )

    @property
    def source(self) -> str:
        """What `path` or `column` names, for messages."""
        return str(self.path) if self.path is not None else f"the column {self.column!r}"

    def violations(self) -> Iterator[Violation]:
        """See `Settings.violations`."""
        if (self.path is None) == (self.column is None):
            got = "none" if self.path is None else "path and column"
            what = f"a reference must have one of path and column, got {got}"
            fix = "write references: [{path: data/before}], or [{column: before}] with a manifest"
            yield Violation("", what, fix, ("path", "column"))
        elif self.suffix and self.path is None:
            what = f"suffix requires path, got column: {self.column}"
            yield Violation("suffix", what, "remove suffix", ("suffix", "path", "column"))


def reference_violations(references: Sequence[ReferenceSettings]) -> Iterator[Violation]:
    """Yield a violation for each reference that reads the same files as an earlier one."""
    earlier: dict[tuple[object, ...], int] = {}
    for index, reference in enumerate(references):
        files = (reference.path, reference.column, reference.suffix)
        first = earlier.setdefault(files, index)
        if first != index:
            what = f"references[{index}] reads the same files as references[{first}]: {reference.source}"
            fix = "remove one of the two, or give one another path, column or suffix"
            yield Violation(f"references[{index}]", what, fix, ("references",))
