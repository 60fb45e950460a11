"""The one geometry: from an image's original size to its bucket, its resized size, its crop and its latent.

    original (oh, ow) --scale to cover--> resized (rh, rw) --crop--> target (th, tw) --factor--> latent

Encoder, checks, sampler and micro-conditioning all ask it. An image's geometry depends on its own size, the
recipe's rules and, for a random crop, its own name; never on other images or their order. Sizes are computed
in integers, so the answer is the same on every machine, and one image takes the same code as a million.
"""

from __future__ import annotations

from pipeline.images.geometry.buckets import Buckets, ladder
from pipeline.images.geometry.placement import CropRule, Placed, Placement, SmallRule
from pipeline.images.geometry.rules import placement_of
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
    require_multiple,
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
    "require_multiple",
]
