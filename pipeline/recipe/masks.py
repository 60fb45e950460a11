"""The section `mask` of a dataset: which places of its images the loss counts, and how much."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from pipeline.recipe.settings import Settings, Violation
from pipeline.recipe.validators import FolderAddress


class MaskSettings(Settings):
    """Masks of a dataset's images: grey images with weights of the loss as values, white for 1.

    Exactly one of `path`, `from` and `column` is required.
    """

    path: FolderAddress | None = Field(
        default=None,
        description="Folder of the masks, paired with the images by relative path without suffix: the mask "
        "of people/anna.jpg is people/anna.png. A mask has the size of its image, after EXIF orientation. "
        "Relative to the project root, or an address as for `datasets[].path`. If it is inside the "
        "dataset's folder, its files do not count as images.",
    )
    from_: Literal["alpha"] | None = Field(
        default=None,
        alias="from",
        description="alpha: the opacity of the image itself is its mask. `latents.background` decides what "
        "transparent pixels look like.",
    )
    column: str | None = Field(
        default=None,
        min_length=1,
        description="Column of the manifest with the paths of the masks, relative to `datasets[].images`.",
    )
    suffix: str = Field(
        default="",
        pattern=r"^[^/\\*?]*$",
        description="End of the masks' file names before the dot, such as -masklabel: the mask of anna.jpg "
        "is anna-masklabel.png. Only with `path`, which may then be the dataset's own folder.",
    )
    unmasked_weight: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Smallest weight of a position. 0 ignores what black covers; 0.1 also learns a little of "
        "the surroundings.",
    )
    prior_weight: float = Field(
        default=0.0,
        ge=0.0,
        description="Weight of a second loss where the mask is dark: the distance from the prediction of the "
        "base model without the adapter, which keeps surroundings as the model would draw them. 0 leaves it "
        "out. A batch with such an image takes one more forward pass.",
    )
    normalise: bool = Field(
        default=True,
        description="Divide the weights of an image by their mean, so that an image with a small mask counts "
        "as much as one with a large mask.",
    )

    def violations(self) -> Iterator[Violation]:
        """See `Settings.violations`."""
        sources = {"path": self.path, "from": self.from_, "column": self.column}
        used = [name for name, value in sources.items() if value is not None]
        if len(used) != 1:
            what = f"mask must have one of path, from and column, got {' and '.join(used) or 'none'}"
            yield Violation("", what, "write mask: {path: data/masks}, or mask: {from: alpha}", (*sources,))
        elif self.suffix and self.path is None:
            what = f"suffix requires path, got {used[0]}: {sources[used[0]]}"
            yield Violation("suffix", what, "remove suffix", ("suffix", *sources))
