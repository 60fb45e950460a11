"""The checks by asset: their names, whether they close a gate, and what they look at.

Read when definitions load, so nothing heavy is imported here. The order is that of `checks.<asset>.run`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckSpec:
    """One check of one asset.

    Attributes:
        name: Unique within the asset; what `checks.allow` names.
        gate: True where a failure stops everything downstream; a warning otherwise.
        description: What it looks at, in a sentence for the UI.
    """

    name: str
    gate: bool
    description: str


PATH_ISOLATION = CheckSpec(
    "path_isolation",
    True,
    "No dataset, cache_dir and output_dir share, contain or lead into one another, by any spelling.",
)
"""Runs inside raw_images, before anything is written; it cannot be allowed."""

_FRACTION = CheckSpec(
    "rejected_fraction", True, "The share of rejected samples is at most checks.max_rejected_fraction."
)
_CONSERVATION = CheckSpec("conservation", True, "What came in is kept or rejected, each sample exactly once.")

SPECS: dict[str, tuple[CheckSpec, ...]] = {
    "raw_images": (
        CheckSpec("images_found", True, "Each dataset holds at least one image."),
        CheckSpec("names_distinct", True, "No two images differ only in case or in Unicode form."),
        _CONSERVATION,
        CheckSpec("shape_uniformity", True, "Each image's size is readable and its channels are known."),
        CheckSpec("file_size_outliers", False, "Bytes a pixel far from the rest of the dataset."),
        CheckSpec(
            "oddities",
            False,
            "Wrong suffixes, animations, links that lead out, foreign caches, captions without an image.",
        ),
    ),
    "validated_dataset": (
        CheckSpec("captions_present", True, "Each image has a caption that is not empty."),
        CheckSpec("captions_decodable", True, "Each caption file decodes in the recipe's encoding."),
        CheckSpec("captions_unshared", True, "No two images share one caption file."),
        _FRACTION,
        _CONSERVATION,
        CheckSpec("shape_uniformity", True, "The size recorded by the scan is the size that decodes."),
        CheckSpec("file_size_outliers", True, "No file changed since the scan; bytes rejected."),
        CheckSpec("validation_apart", True, "Nothing that is trained on looks like an image held out."),
        CheckSpec("look_alikes", False, "Copies that are left out, and images that look alike."),
        CheckSpec("one_colour", False, "Images of a single colour, which teach nothing."),
    ),
    "aspect_buckets": (
        _CONSERVATION,
        CheckSpec(
            "shape_uniformity", True, "One target size in each bucket, divisible by the model's multiple."
        ),
        CheckSpec("file_size_outliers", False, "Buckets with far fewer samples than the rest."),
        CheckSpec(
            "batches_possible",
            True,
            "Each bucket fills a batch of all processes, where buckets.underfilled drops what does not.",
        ),
        CheckSpec("underfilled", False, "Buckets with too few samples for one full batch of all processes."),
        CheckSpec("crop_loss", False, "Images that lose more to the crop than buckets.max_crop_loss."),
    ),
    "vae_latents": (
        CheckSpec("completeness", True, "Each sample of aspect_buckets has its entry, or was rejected."),
        CheckSpec(
            "shape_uniformity", True, "Each entry's shape is the geometry's, and one shape in each bucket."
        ),
        CheckSpec(
            "file_size_outliers", True, "Each entry has exactly the bytes its shape and dtype ask for."
        ),
        CheckSpec("finite_values", True, "Each entry's checksum holds and no value is NaN or infinite."),
        _FRACTION,
    ),
    "text_embeddings": (
        CheckSpec("completeness", True, "Each sample and the empty caption have their entry."),
        CheckSpec(
            "shape_uniformity", True, "Each entry has the shapes that the encoders' configurations say."
        ),
        CheckSpec(
            "file_size_outliers", True, "Each entry has exactly the bytes its shape and dtype ask for."
        ),
        CheckSpec("finite_values", True, "Each entry's checksum holds and no value is NaN or infinite."),
        CheckSpec("captions_fit", False, "Captions that the encoder cuts, with the part that is cut."),
    ),
    "trained_lora": (
        CheckSpec("loss_finite", True, "Every training loss was a finite number."),
        CheckSpec("adapter_not_zero", True, "The adapter's delta weights are not all zero."),
        CheckSpec(
            "reload_equals", True, "Each exported file gives back the delta weights that were trained."
        ),
        CheckSpec("plan_completed", True, "Training reached the last step of its plan."),
        CheckSpec("shape_uniformity", True, "Ranks and key shapes are as asked, in each layout."),
        CheckSpec("file_size_outliers", True, "Each file has the bytes that its keys and ranks ask for."),
        CheckSpec("output_changed", True, "The model answers otherwise with the adapter than without it."),
        CheckSpec("loss_fell", False, "The last fifth of the losses is below the first."),
        CheckSpec("validation_loss", False, "The loss on held-out images ended near its least."),
        CheckSpec("modules_touched", False, "Every module's delta weights are other than zero."),
    ),
}
"""Of each asset, in order."""

GATES: tuple[str, ...] = tuple(sorted({spec.name for specs in SPECS.values() for spec in specs if spec.gate}))
"""The names that `checks.allow` may hold."""
