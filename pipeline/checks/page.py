"""docs/checks.md: every check, what it means when it fails, and what to do.

`python -m pipeline.checks.page` writes it anew.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.atomic import write_text
from pipeline.checks.names import PATH_ISOLATION, SPECS, CheckSpec
from pipeline.recipe import project_root

_TOP = """\
# Checks: what each one means, and what to do

Each asset is checked when it is made. A **gate** that fails stops everything downstream and the job ends
with exit status 1; a **warning** is shown and stops nothing. In the UI a check lists what it found, at most
50 rows with numbers; the log says the same in a sentence. What was rejected stands in
`output_dir/tables/rejected.parquet` with reason and fix.

`checks.allow: [captions_present]` in the recipe opens a gate knowingly: it then warns. Only
`path_isolation` cannot be opened. Training, started alone, asks the gates of both caches itself.

This page is written by `python -m pipeline.checks.page`.
"""

ADVICE: dict[tuple[str, str], str] = {
    (
        "raw_images",
        "path_isolation",
    ): "Give datasets, cache_dir and output_dir folders beside one another. Links are "
    "followed: the message names both spellings.",
    (
        "raw_images",
        "images_found",
    ): "Look at the folder and the counts by suffix in the message: a wrong path, folders "
    "that begin with a dot, or a listing with another column.",
    ("raw_images", "names_distinct"): "Rename one of each pair: on another computer they would be one file.",
    ("raw_images", "conservation"): "Report it as a defect of Latentline, with the table.",
    ("raw_images", "shape_uniformity"): "Export the images again, or remove them.",
    (
        "raw_images",
        "file_size_outliers",
    ): "Look at them: most often thumbnails, placeholders or uncompressed files.",
    ("raw_images", "oddities"): "Nothing must be done; what was repaired on the way is listed by kind.",
    (
        "validated_dataset",
        "captions_present",
    ): "Write the missing captions, or set captions.suffix to the suffix "
    "that the message found beside the images; or allow the gate to train on the others.",
    (
        "validated_dataset",
        "captions_decodable",
    ): "Save the files as UTF-8, or set captions.fallback_encoding, to "
    "cp1252 for files from Windows. The message has file, line and byte.",
    (
        "validated_dataset",
        "validation_apart",
    ): "Report it as a defect of Latentline, with the table: the split is made so that this cannot be.",
    (
        "validated_dataset",
        "look_alikes",
    ): "Keep the best of each group, or let them be: training sees such a picture more often than others. If "
    "other pictures are listed, lower checks.near_duplicate_bits. Copies with the same caption are left out "
    "already, unless the dataset says duplicates: keep_all.",
    (
        "validated_dataset",
        "one_colour",
    ): "Look at them and remove them: placeholders, failed downloads, black frames.",
    (
        "validated_dataset",
        "captions_unshared",
    ): "Give each image a caption file of its own: of x.jpg and x.png rename one.",
    (
        "validated_dataset",
        "rejected_fraction",
    ): "Repair or remove what rejected.parquet lists, the most frequent "
    "reason first, or raise checks.max_rejected_fraction.",
    ("validated_dataset", "conservation"): "Report it as a defect of Latentline, with the table.",
    ("validated_dataset", "shape_uniformity"): "Export the images again, or remove them.",
    (
        "validated_dataset",
        "file_size_outliers",
    ): "Wait until nothing writes into the dataset, and run the job again.",
    ("aspect_buckets", "conservation"): "Report it as a defect of Latentline, with the table.",
    (
        "aspect_buckets",
        "shape_uniformity",
    ): "Set buckets.step, or the edges in buckets.sizes, to multiples of the "
    "number in the message: the base model cannot divide the others.",
    ("aspect_buckets", "file_size_outliers"): "Fit the sizes to the images: `latentline fit-buckets`.",
    (
        "aspect_buckets",
        "batches_possible",
    ): "Set buckets.underfilled to partial or repeat, or lower batch_size or the number of processes.",
    ("aspect_buckets", "underfilled"): "Fewer sizes fill better: `latentline fit-buckets` shows the trade.",
    (
        "aspect_buckets",
        "crop_loss",
    ): "Look at worst_crops.jpg in the asset's metadata; more sizes or a larger "
    "max_aspect_ratio lose less, filters leave such images out.",
    ("vae_latents", "completeness"): "Run the cache job again: it makes what is missing.",
    ("vae_latents", "shape_uniformity"): "Run the cache job again: buckets or model have changed since.",
    (
        "vae_latents",
        "file_size_outliers",
    ): "Run the cache job again: damaged entries are made anew. If it comes back, look at the disk.",
    (
        "vae_latents",
        "finite_values",
    ): "Run `latentline verify` with `--repair`. If it comes back, look at the disk.",
    (
        "vae_latents",
        "rejected_fraction",
    ): "Repair or remove what rejected.parquet lists, the most frequent reason "
    "first, or raise checks.max_rejected_fraction.",
    ("text_embeddings", "completeness"): "Run the cache job again: it makes what is missing.",
    ("text_embeddings", "shape_uniformity"): "Run the cache job again: the model has changed since.",
    (
        "text_embeddings",
        "file_size_outliers",
    ): "Run the cache job again: damaged entries are made anew. If it comes back, look at the disk.",
    (
        "text_embeddings",
        "finite_values",
    ): "Run `latentline verify` with `--repair`. If it comes back, look at the disk.",
    (
        "text_embeddings",
        "captions_fit",
    ): "Shorten these captions, or put what matters first: the part in the table is never seen.",
    (
        "trained_lora",
        "loss_finite",
    ): "Lower the learning rate, or set mixed_precision to bf16 or no; the message "
    "names the samples of the step. The last good LoRA is kept.",
    ("trained_lora", "adapter_not_zero"): "Train longer or with a higher learning rate: nothing was learnt.",
    (
        "trained_lora",
        "reload_equals",
    ): "Delete the run's folder and train again; if it comes back, report it.",
    ("trained_lora", "plan_completed"): "Start the job again: it goes on from the last checkpoint.",
    (
        "trained_lora",
        "shape_uniformity",
    ): "Delete the run's folder and train again; if it comes back, report it.",
    (
        "trained_lora",
        "file_size_outliers",
    ): "Delete the run's folder and train again: a file was cut or changed.",
    ("trained_lora", "output_changed"): "Train longer or with a higher learning rate: the LoRA does nothing.",
    (
        "trained_lora",
        "loss_fell",
    ): "Normal for a short run. Otherwise raise the learning rate or the rank, or look at the captions.",
    (
        "trained_lora",
        "validation_loss",
    ): "The run went on after it had learnt what generalises: take an earlier "
    "checkpoint, fewer steps, or more images.",
    ("trained_lora", "modules_touched"): "Compare training.lora's targets with the model's modules.",
}
"""By asset and check: what a user does when it fails."""


def page_text() -> str:
    """The page, in Markdown; the same for the same checks."""
    parts = [_TOP]
    for asset, specs in SPECS.items():
        shown = (PATH_ISOLATION, *specs) if asset == "raw_images" else specs
        parts.append(f"## {asset}\n\n| check | | passes when, or shows | what to do |\n|---|---|---|---|")
        parts += [_row(asset, spec) for spec in shown]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def page_path() -> Path:
    """Where the page lies."""
    return project_root() / "docs" / "checks.md"


def _row(asset: str, spec: CheckSpec) -> str:
    kind = "**gate**" if spec.gate else "warning"
    return f"| `{spec.name}` | {kind} | {spec.description} | {ADVICE[asset, spec.name]} |"


if __name__ == "__main__":
    write_text(page_path(), page_text())
