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
        advice: What a user does first when it fails.
        openable: False for a gate that `checks.allow` does not open, whatever it names.
    """

    name: str
    gate: bool
    description: str
    advice: str
    openable: bool = True

    @property
    def explained(self) -> str:
        """What it looks at and what to do, in Markdown, for the UI."""
        return f"{self.description}\n\nWhen it fails: {self.advice}"


def _gate(name: str, description: str, advice: str) -> CheckSpec:
    return CheckSpec(name, True, description, advice)


def _sure_gate(name: str, description: str, advice: str) -> CheckSpec:
    return CheckSpec(name, True, description, advice, openable=False)


def _warning(name: str, description: str, advice: str) -> CheckSpec:
    return CheckSpec(name, False, description, advice)


PATH_ISOLATION = _sure_gate(
    "path_isolation",
    "No dataset, cache_dir and output_dir share, contain or lead into one another, by any spelling.",
    (
        "Give datasets, cache_dir and output_dir folders beside one another. Links are "
        "followed: the message names both spellings."
    ),
)
"""Runs inside raw_images, before anything is written."""

_FRACTION = _gate(
    "rejected_fraction",
    "Samples are left, and the share of rejected ones is at most checks.max_rejected_fraction.",
    (
        "Repair or remove what rejected.parquet lists, the most frequent reason first, or "
        "raise checks.max_rejected_fraction."
    ),
)
_CONSERVATION = _gate(
    "conservation",
    "What came in is kept or rejected, each sample exactly once.",
    "Report it as a defect of Latentline, with the table.",
)
_ENTRY_BYTES = _sure_gate(
    "file_size_outliers",
    "Each entry has exactly the bytes its shape and dtype ask for.",
    "Run the cache job again: damaged entries are made anew. If it comes back, look at the disk.",
)
_ENTRY_VALUES = _sure_gate(
    "finite_values",
    "Each entry's checksum holds and no value is NaN or infinite.",
    "Run `latentline verify` with `--repair`. If it comes back, look at the disk.",
)

SPECS: dict[str, tuple[CheckSpec, ...]] = {
    "raw_images": (
        _gate(
            "images_found",
            "Each dataset holds at least one image.",
            (
                "Look at the folder and the counts by suffix in the message: a wrong path, folders "
                "that begin with a dot, or a listing with another column."
            ),
        ),
        _gate(
            "names_distinct",
            "No two images differ only in case or in Unicode form.",
            "Rename one of each pair: on another computer they would be one file.",
        ),
        _CONSERVATION,
        _gate(
            "shape_uniformity",
            "Each image's size is readable and its channels are known.",
            "Export the images again, or remove them.",
        ),
        _warning(
            "file_size_outliers",
            "Bytes a pixel far from the rest of the dataset.",
            "Look at them: most often thumbnails, placeholders or uncompressed files.",
        ),
        _warning(
            "oddities",
            "Wrong suffixes, animations, links that lead out, foreign caches, captions without an image.",
            "Nothing must be done; what was repaired on the way is listed by kind.",
        ),
    ),
    "validated_dataset": (
        _gate(
            "captions_present",
            "Each image has a caption that is not empty.",
            (
                "Write the missing captions, or set captions.suffix to the suffix that the message "
                "found beside the images; or allow the gate to train on the others."
            ),
        ),
        _gate(
            "captions_decodable",
            "Each caption file decodes in the recipe's encoding.",
            (
                "Save the files as UTF-8, or set captions.fallback_encoding, to cp1252 for files "
                "from Windows. The message has file, line and byte."
            ),
        ),
        _gate(
            "captions_unshared",
            "No two images share one caption file.",
            "Give each image a caption file of its own: of x.jpg and x.png rename one.",
        ),
        _FRACTION,
        _CONSERVATION,
        _gate(
            "shape_uniformity",
            "The size recorded by the scan is the size that decodes.",
            "Export the images again, or remove them.",
        ),
        _gate(
            "file_size_outliers",
            "No file changed since the scan; bytes rejected.",
            "Wait until nothing writes into the dataset, and run the job again.",
        ),
        _gate(
            "validation_apart",
            "Nothing that is trained on looks like an image held out.",
            (
                "Report it as a defect of Latentline, with the table: the split is made so that this "
                "cannot be."
            ),
        ),
        _warning(
            "look_alikes",
            "Copies that are left out, and images that look alike.",
            (
                "Keep the best of each group, or let them be: training sees such a picture more "
                "often than others. If other pictures are listed, lower checks.near_duplicate_bits. "
                "Copies with the same caption are left out already, unless the dataset says "
                "duplicates: keep_all."
            ),
        ),
        _warning(
            "one_colour",
            "Images of a single colour, which teach nothing.",
            "Look at them and remove them: placeholders, failed downloads, black frames.",
        ),
    ),
    "aspect_buckets": (
        _CONSERVATION,
        _gate(
            "shape_uniformity",
            "One target size in each bucket, divisible by the model's multiple.",
            (
                "Set buckets.step, or the edges in buckets.sizes, to multiples of the number in the "
                "message: the base model cannot divide the others."
            ),
        ),
        _warning(
            "file_size_outliers",
            "Buckets with far fewer samples than the rest.",
            "Fit the sizes to the images: `latentline fit-buckets`.",
        ),
        _gate(
            "batches_possible",
            "Samples are left, and each bucket fills a batch of all processes, where buckets.underfilled "
            "drops what does not.",
            "Set buckets.underfilled to partial or repeat, or lower batch_size or the number of processes.",
        ),
        _warning(
            "underfilled",
            "Buckets with too few samples for one full batch of all processes.",
            "Fewer sizes fill better: `latentline fit-buckets` shows the trade.",
        ),
        _warning(
            "crop_loss",
            "Images that lose more to the crop than buckets.max_crop_loss.",
            (
                "Look at worst_crops.jpg in the asset's metadata; more sizes or a larger "
                "max_aspect_ratio lose less, filters leave such images out."
            ),
        ),
    ),
    "vae_latents": (
        _sure_gate(
            "completeness",
            "Each sample of aspect_buckets has its entry, or was rejected.",
            "Run the cache job again: it makes what is missing.",
        ),
        _sure_gate(
            "shape_uniformity",
            "Each entry's shape is the geometry's, and one shape in each bucket.",
            "Run the cache job again: buckets or model have changed since.",
        ),
        _ENTRY_BYTES,
        _ENTRY_VALUES,
        _FRACTION,
    ),
    "text_embeddings": (
        _sure_gate(
            "completeness",
            "Each sample and the empty caption have their entry.",
            "Run the cache job again: it makes what is missing.",
        ),
        _sure_gate(
            "shape_uniformity",
            "Each entry has the shapes that the encoders' configurations say.",
            "Run the cache job again: the model has changed since.",
        ),
        _ENTRY_BYTES,
        _ENTRY_VALUES,
        _warning(
            "captions_fit",
            "Captions that the encoder cuts, with the part that is cut.",
            "Shorten these captions, or put what matters first: the part in the table is never seen.",
        ),
    ),
    "trained_lora": (
        _gate(
            "loss_finite",
            "Every training loss was a finite number.",
            (
                "Lower the learning rate, or set mixed_precision to bf16 or no; the message names "
                "the samples of the step. The last good LoRA is kept."
            ),
        ),
        _gate(
            "adapter_not_zero",
            "The adapter's delta weights are not all zero.",
            "Train longer or with a higher learning rate: nothing was learnt.",
        ),
        _gate(
            "reload_equals",
            "Each exported file gives back the delta weights that were trained.",
            "Delete the run's folder and train again; if it comes back, report it.",
        ),
        _gate(
            "plan_completed",
            "Training reached the last step of its plan.",
            "Start the job again: it goes on from the last checkpoint.",
        ),
        _gate(
            "shape_uniformity",
            "Ranks and key shapes are as asked, in each layout.",
            "Delete the run's folder and train again; if it comes back, report it.",
        ),
        _gate(
            "file_size_outliers",
            "Each file has the bytes that its keys and ranks ask for.",
            "Delete the run's folder and train again: a file was cut or changed.",
        ),
        _gate(
            "output_changed",
            "The model answers otherwise with the adapter than without it.",
            "Train longer or with a higher learning rate: the LoRA does nothing.",
        ),
        _warning(
            "loss_fell",
            "The last fifth of the losses is below the first.",
            (
                "Normal for a short run. Otherwise raise the learning rate or the rank, or look at "
                "the captions."
            ),
        ),
        _warning(
            "validation_loss",
            "The loss on held-out images ended near its least.",
            (
                "The run went on after it had learnt what generalises: take an earlier checkpoint, "
                "fewer steps, or more images."
            ),
        ),
        _warning(
            "modules_touched",
            "Every module's delta weights are other than zero.",
            "Compare training.lora's targets with the model's modules.",
        ),
    ),
}
"""Of each asset, in order, those that look at its table; `specs_of` gives all."""


def specs_of(asset: str) -> tuple[CheckSpec, ...]:
    """All checks of the asset in order, `path_isolation` of the first one among them."""
    return (PATH_ISOLATION, *SPECS[asset]) if asset == "raw_images" else SPECS[asset]


def _gates(*, openable: bool) -> set[str]:
    all_specs = (spec for asset in SPECS for spec in specs_of(asset))
    return {spec.name for spec in all_specs if spec.gate and spec.openable == openable}


GATES: tuple[str, ...] = tuple(sorted(_gates(openable=True)))
"""The names that `checks.allow` may hold. What cannot be opened stays closed, though named."""

NEVER_OPEN: tuple[str, ...] = tuple(sorted(_gates(openable=False) - {*GATES}))
"""The names that only gates have which cannot be opened."""
