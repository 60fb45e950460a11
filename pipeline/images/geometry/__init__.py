"""The geometry of images: from the original size to bucket, resized size, crop and latent size.

    original (oh, ow) --scale to cover--> resized (rh, rw) --crop--> target (th, tw) --factor--> latent

The encoder, the checks, the sampler and SDXL's micro-conditioning all use this package. An image's geometry
depends only on its own size, the recipe's bucket settings and, for a random crop, its sample id; never on
other images or their order. Sizes are computed in integers, so results are equal on every machine.
"""

from __future__ import annotations

from pipeline.images.geometry.buckets import Buckets, ladder
from pipeline.images.geometry.crops import CropRule
from pipeline.images.geometry.placement import Placed, Placement, SmallRule, placement_of, placements_of
from pipeline.images.geometry.sizes import (
    MAX_BUCKET_EDGE_PX,
    MAX_IMAGE_EDGE_PX,
    Crop,
    Geometry,
    GeometryColumns,
    Ints,
    Size,
    latent_size,
    not_multiples,
)

__all__ = [
    "MAX_BUCKET_EDGE_PX",
    "MAX_IMAGE_EDGE_PX",
    "Buckets",
    "Crop",
    "CropRule",
    "Geometry",
    "GeometryColumns",
    "Ints",
    "Placed",
    "Placement",
    "Size",
    "SmallRule",
    "ladder",
    "latent_size",
    "not_multiples",
    "placement_of",
    "placements_of",
]
