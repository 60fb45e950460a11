"""The checks of each asset: name, gate or warning, description and advice.

A check is implemented under the same name in `pipeline/<asset>/checks.py`.
"""

from __future__ import annotations

# Definitions load this module, so it imports nothing heavy.
from dataclasses import dataclass


@dataclass(frozen=True)
class CheckSpec:
    """One check of one asset.

    Attributes:
        name: Name, unique within the asset.
        gate: True if a failure stops everything downstream; otherwise the check is a warning.
        description: Condition that a gate verifies, or problem that a warning reports, in one sentence.
        advice: The first thing to do when it fails.
        openable: False for a gate that `checks.allow` cannot allow.
    """

    name: str
    gate: bool
    description: str
    advice: str
    openable: bool = True

    @property
    def explained(self) -> str:
        """Description and advice in Markdown, for the UI."""
        return f"{self.description}\n\nWhen it fails: {self.advice}"


def _gate(name: str, description: str, advice: str) -> CheckSpec:
    return CheckSpec(name, True, description, advice)


def _strict_gate(name: str, description: str, advice: str) -> CheckSpec:
    return CheckSpec(name, True, description, advice, openable=False)


def _warning(name: str, description: str, advice: str) -> CheckSpec:
    return CheckSpec(name, False, description, advice)


PATH_ISOLATION = _strict_gate(
    "path_isolation",
    "The datasets, cache_dir and output_dir are separate folders, and none contains another. The file in "
    "training.lora.start_from is in no folder that runs replace.",
    "Use separate folders for datasets, cache_dir and output_dir. To continue from a LoRA of the same "
    "recipe, set start_from to a file below its runs/ folder. Symbolic links are resolved; the message "
    "shows both paths as written and as resolved.",
)
"""Runs inside raw_images, before anything is written."""

_FRACTION = _gate(
    "rejected_fraction",
    "Samples are left, and the fraction of samples rejected for a defect is at most "
    "checks.max_rejected_fraction. Samples that filters, limit or duplicates exclude do not count.",
    "Repair or remove the files listed in rejected.parquet, starting with the most frequent reason, or raise "
    "checks.max_rejected_fraction.",
)
_CONSERVATION = _gate(
    "conservation",
    "Every sample of the input is either kept or rejected, exactly once.",
    "Start the job again. If the problem returns, report a bug and attach the table.",
)
_ENTRY_BYTES = _strict_gate(
    "file_size_outliers",
    "The size of each cache entry is exactly the one that follows from its shape and dtype.",
    "Run the cache job again, which encodes damaged entries again. If the problem returns, check the disk.",
)
_ENTRY_VALUES = _strict_gate(
    "finite_values",
    "Each cache entry matches its checksum and contains no NaN or infinite values.",
    "Run `latentline verify` with `--repair`. If the problem returns, check the disk.",
)
_COMPLETENESS_ADVICE = "Run the cache job again, which encodes the missing entries."
_RETRAIN = "Delete the run's folder and train again. If the problem returns, report a bug."

SPECS: dict[str, tuple[CheckSpec, ...]] = {
    "raw_images": (
        _gate(
            "images_found",
            "Each dataset contains at least one image.",
            "Compare the folder with the file counts in the message. Common causes are a wrong path, hidden "
            "folders, and a manifest with a different path column.",
        ),
        _gate(
            "names_distinct",
            "No two image names differ only in case or Unicode normalization.",
            "Rename one image of each pair: on another file system they would be the same file.",
        ),
        _CONSERVATION,
        _gate(
            "shape_uniformity",
            "The size and the number of channels of each image can be read.",
            "Export the images again, or remove them.",
        ),
        _warning(
            "file_size_outliers",
            "Images with far more or fewer bytes per pixel than the rest of the dataset.",
            "Inspect these images. Most often they are thumbnails, placeholders or uncompressed files.",
        ),
        _warning(
            "oddities",
            "Wrong suffixes, animations, links that leave the dataset, caches of other programs, and "
            "captions without an image.",
            "No action is required. Problems that were corrected automatically are listed by kind.",
        ),
    ),
    "validated_dataset": (
        _gate(
            "captions_present",
            "Each image has a caption with readable text.",
            "Write the missing captions, set captions.suffix to the suffixes that the message names, or set "
            "captions.fallback to a caption for these images. To train on the other images, allow the gate.",
        ),
        _gate(
            "captions_decodable",
            "Each caption file is a text and can be decoded with the encoding in the recipe.",
            "Save the files as UTF-8, or set captions.fallback_encoding (cp1252 for files from Windows). The "
            "message shows file, line and byte.",
        ),
        _gate(
            "captions_unshared",
            "No two images share a caption file.",
            "Give each image its own caption file; if x.jpg and x.png share one, rename one of them.",
        ),
        _gate(
            "masks_present",
            "Each image of a dataset with masks has exactly one mask.",
            "Draw the missing masks, or move images without a mask to a dataset without masks. The message "
            "names the expected file.",
        ),
        _gate(
            "masks_usable",
            "Each mask can be decoded, is grey, has the size of its image and is not black.",
            "Export the masks again in the size of their images, as displayed, in black, grey and white.",
        ),
        _gate(
            "masks_matched",
            "Each mask belongs to an image.",
            "Rename the masks like their images, or remove them.",
        ),
        _gate(
            "references_present",
            "Each image of a dataset with reference images has exactly one file of each reference.",
            "Add the missing references, or move images without one to a dataset without references. The "
            "message names the expected file.",
        ),
        _gate(
            "references_usable",
            "Each reference image can be decoded completely.",
            "Export the references again, or remove them together with their images.",
        ),
        _gate(
            "references_matched",
            "Each reference image belongs to an image.",
            "Rename the references like their images, or remove them.",
        ),
        _FRACTION,
        _CONSERVATION,
        _gate(
            "shape_uniformity",
            "The decoded size of each image is the size recorded by the scan.",
            "Export the images again, or remove them.",
        ),
        _gate(
            "file_size_outliers",
            "No file has changed since the scan; rejected bytes are reported.",
            "Wait until no program writes to the dataset, then start the job again.",
        ),
        _gate(
            "validation_apart",
            "No training image is a near duplicate of an image in the holdout.",
            "Report a bug in Latentline, and attach the table; the holdout never separates near duplicates.",
        ),
        _warning(
            "masks_white",
            "Masks that are white everywhere, and so have no effect.",
            "Draw these masks, or ignore the warning.",
        ),
        _warning(
            "captions_agree",
            "Images with different captions in two files listed in captions.suffix.",
            "Delete the caption file that is out of date, or change the order in captions.suffix: the first "
            "file with a text is used.",
        ),
        _warning(
            "edits_matched",
            "Edited captions in output_dir/captions/ that belong to no image.",
            "Rename the file to captions/<sample id>.txt, such as captions/photos/rose.png.txt, or delete "
            "it. A renamed image has another sample id.",
        ),
        _warning(
            "captions_plausible",
            "Captions with more than a description: refusals, chatter and reasoning of captioning models, "
            "HTML, RTF, JSON, Markdown, links, and prompt syntax of web UIs such as `<lora:...>`, "
            "`(word:1.3)` or `BREAK`.",
            "Write these captions again. Training reads prompt syntax as plain text; captions.replace "
            "removes it.",
        ),
        _warning(
            "captions_repeated",
            "Captions that more than a tenth of a dataset's images share, at least three; tags and phrases "
            "besides the trigger word in at least 80% of the captions; and, without captions.trigger, a word "
            "that opens so many captions, but not all.",
            "Describe each image, and remove common phrases: the concept binds to them. If the word that "
            "opens the captions is the trigger word, set captions.trigger, which adds it to all. If one "
            "caption is intended, set `captions: {from: fixed, text: ...}`: the check ignores texts of the "
            "recipe, and datasets with role: prior.",
        ),
        _warning(
            "caption_settings",
            "Settings of captions without an effect: captions.shuffle and drop_tags whose separator is in no "
            "caption, and placeholders that are left in captions, for example in another case.",
            "Correct the setting that the message names, or the captions.",
        ),
        _warning(
            "look_alikes",
            "Duplicates that are rejected, and near duplicates that are kept.",
            "Keep the best image of each group, or ignore the warning; training then sees that motif more "
            "often. If the listed images differ, lower checks.near_duplicate_bits. Duplicates with the same "
            "caption are already rejected unless the dataset sets duplicates: keep_all.",
        ),
        _warning(
            "one_colour",
            "Images of a single colour.",
            "Inspect and remove them; they are placeholders, failed downloads or black frames.",
        ),
        _warning(
            "look_alikes_agree",
            "Near duplicates with captions that contradict each other, such as a red cup and a blue cup.",
            "Correct the wrong caption of each pair, or remove one of the images.",
        ),
        _warning(
            "pictures_sharp",
            "Images with much less detail than the training size can show, or than the rest of the dataset "
            "(blurred, shaken, enlarged), and strongly compressed JPEGs.",
            "Replace them by their originals, or remove them. findings.jpg shows the worst.",
        ),
        _warning(
            "pictures_exposed",
            "Images that are too dark, overexposed or flat (of low contrast).",
            "Correct them in an editor, or remove them. If the light is intended, name it in the captions.",
        ),
        _warning(
            "pictures_unframed",
            "Images with bars along their edges, and a mark that many images have in one corner, such as a "
            "watermark, logo or date.",
            "Cut the bars and marks off, or hide them with masks: training draws them too.",
        ),
        _warning(
            "views_varied",
            "A view that more than a fifth of the images show nearly alike, at least three.",
            "Keep a few of these images and add other views: training learns pose, light and background with "
            "the subject.",
        ),
        _warning(
            "subjects_visible",
            "Subjects that are smaller than 32x32 pixels at the training size, by their mask, or centred at "
            "an edge of the image, by their focus point.",
            "Crop the images around their subjects, or train at a higher buckets.resolution.",
        ),
    ),
    "aspect_buckets": (
        _CONSERVATION,
        _gate(
            "shape_uniformity",
            "Each bucket has one target size, and its edges are multiples of the base model's size multiple.",
            "Set buckets.step, or the edges in buckets.sizes, to multiples of the number in the message.",
        ),
        _warning(
            "file_size_outliers",
            "Buckets with far fewer samples than the rest.",
            "Fit the bucket sizes to the images with `latentline fit-buckets`.",
        ),
        _gate(
            "batches_possible",
            "Samples are left, and with buckets.underfilled: drop, each bucket fills a batch of all "
            "processes.",
            "Set buckets.underfilled to partial or repeat, or lower batch_size or the number of processes.",
        ),
        _warning(
            "underfilled",
            "Buckets with too few samples for one full batch of all processes.",
            "Use fewer sizes; `latentline fit-buckets` shows the trade-off.",
        ),
        _warning(
            "crop_loss",
            "Images that lose more than buckets.max_crop_loss to the crop.",
            "Inspect worst_crops.jpg in the asset's metadata. More sizes or a larger max_aspect_ratio crop "
            "less; filters can reject such images.",
        ),
        _warning(
            "slider_pairs",
            "Images of a slider without a partner: no image of the opposite dataset has the same path and "
            "bucket.",
            "Give both images of a pair the same name and size. Images without a partner are trained on "
            "with their own noise, which makes the slider less exact.",
        ),
    ),
    "vae_latents": (
        _strict_gate(
            "completeness",
            "Each sample of aspect_buckets has a cache entry or was rejected.",
            _COMPLETENESS_ADVICE,
        ),
        _strict_gate(
            "shape_uniformity",
            "Each entry has the shape that follows from the geometry, and each bucket has one shape.",
            "Run the cache job again: the bucket settings or the base model have changed.",
        ),
        _ENTRY_BYTES,
        _ENTRY_VALUES,
        _FRACTION,
        _warning(
            "masks_cropped",
            "Masks that lose more than half of their weight to the crop.",
            "Inspect these images. buckets.crop: focus and more bucket sizes keep more of a mask.",
        ),
    ),
    "text_embeddings": (
        _strict_gate(
            "completeness",
            "Each sample and the empty caption have a cache entry.",
            _COMPLETENESS_ADVICE,
        ),
        _strict_gate(
            "shape_uniformity",
            "Each entry has the shapes that follow from the text encoders' configurations.",
            "Run the cache job again: the base model has changed.",
        ),
        _ENTRY_BYTES,
        _ENTRY_VALUES,
        _warning(
            "captions_fit",
            "Captions that the text encoder truncates, with the part that is cut off.",
            "Shorten these captions, or move the important part to the front; the part in the table is never "
            "seen by the model.",
        ),
        _warning(
            "trigger_fits",
            "Captions in which the trigger word, class words or the postfix are behind the text encoder's "
            "last token, and so have no effect.",
            "Shorten these captions, move the trigger word to the front, or use captions.prefix instead of "
            "captions.postfix.",
        ),
        _warning(
            "previews_name_trigger",
            "Trigger words that no prompt in training.sample_prompts contains.",
            "Add the trigger word, or the text of captions.placeholder, to a prompt. Otherwise the previews "
            "cannot show what it stands for.",
        ),
    ),
    "trained_lora": (
        _gate(
            "loss_finite",
            "All training losses are finite numbers.",
            "Lower the learning rate, or set mixed_precision to bf16 or no. The message names the samples of "
            "the step. The last valid LoRA is kept.",
        ),
        _gate(
            "adapter_not_zero",
            "The adapter's delta weights are not all zero.",
            "Train longer, or with a higher learning rate: the adapter has not learned anything.",
        ),
        _gate(
            "reload_equals",
            "Each exported file reproduces the trained delta weights.",
            _RETRAIN,
        ),
        _gate(
            "plan_completed",
            "Training reached the last step of its plan.",
            "Start the job again; it resumes from the last checkpoint.",
        ),
        _gate(
            "shape_uniformity",
            "The ranks and key shapes of each exported file match the recipe.",
            _RETRAIN,
        ),
        _gate(
            "file_size_outliers",
            "The size of each exported file follows from its keys and ranks.",
            "Delete the run's folder and train again: a file was truncated or modified.",
        ),
        _gate(
            "output_changed",
            "Enabling the adapter changes the model's output.",
            "Train longer, or with a higher learning rate: the LoRA changes nothing.",
        ),
        _warning(
            "loss_fell",
            "The loss, relative to the average at its timestep, is not lower in the last fifth of the steps "
            "than in the first fifth.",
            "A short run often triggers this. Otherwise raise the learning rate or the rank, or review the "
            "captions.",
        ),
        _warning(
            "validation_loss",
            "The final validation loss is more than 1% above its minimum.",
            "The run continued after it started to overfit. Publish an earlier step with `latentline export` "
            "or train with fewer steps or more images.",
        ),
        _warning(
            "modules_touched",
            "The delta weights of some modules are zero.",
            "Compare training.lora.targets with the model's modules.",
        ),
        _warning(
            "as_declared",
            "The run that made the LoRA overrode settings of the recipe.",
            "Start the job without overrides, which publishes the recipe's own LoRA, or write the values "
            "into the recipe.",
        ),
    ),
}
"""Checks of each asset that read its table, in order; see `specs_of` for all checks."""

OPTIONAL_SPECS: dict[str, tuple[CheckSpec, ...]] = {
    "captions": (
        _gate(
            "captions_readable",
            "The model wrote a readable caption for each image that it got.",
            "Change captions.prompt or lower captions.tagger.threshold, or write captions for the listed "
            "images.",
        ),
        _warning(
            "captions_complete",
            "Captions of the model that captions.max_tokens cut off.",
            "Raise captions.max_tokens, or ask for shorter captions in captions.prompt.",
        ),
        _warning(
            "captions_looping",
            "Captions of the model that repeat a passage at least 4 times.",
            "Change captions.prompt, lower captions.max_tokens, or use another model.",
        ),
    ),
    "diagnosis": (
        _warning(
            "captions_match_images",
            "The base model fits a caption of another image better to an image than the image's own caption.",
            "Compare each listed image with its caption and with the caption that fits better. Correct the "
            "caption, or remove the image.",
        ),
    ),
    "evaluation": (
        _warning(
            "concept_learned",
            "The pictures of the chosen step, or of the last one, are not measurably closer to held-out "
            "images than the base model's.",
            "Train longer or with a higher learning rate. If the interval is wide, draw more pictures with "
            "evaluation.pictures.",
        ),
        _warning(
            "base_kept",
            "Pictures of prompts that have nothing to do with the LoRA differ from the base model's by more "
            "than evaluation.limits.drift.",
            "Lower the learning rate, train fewer steps, or add images of the class with role: prior.",
        ),
        _warning(
            "not_memorised",
            "Pictures for captions of trained images are closer to these images than pictures for captions "
            "of held-out images are to theirs, by more than evaluation.limits.copies, and the interval is "
            "completely above the limit.",
            "Publish an earlier step with `latentline export`, or train with fewer steps, a lower rank or "
            "more images.",
        ),
        _warning(
            "choice_decided",
            "The pictures do not show which step is the best.",
            "Draw more pictures with evaluation.pictures, hold out images with "
            "datasets[].validation_fraction, or look at the grid.",
        ),
    ),
    "sweep": (
        _warning(
            "variants_finished",
            "Variants of the sweep failed.",
            "Read the error of each variant in tables/sweep.parquet, and remove its values from the sweep or "
            "correct their cause. Variants that did not fail are not trained again.",
        ),
        _warning(
            "sweep_decided",
            "The scores do not show which variant is the best.",
            "Draw more pictures with evaluation.pictures, hold out more images with "
            "datasets[].validation_fraction, or raise sweep.seeds.",
        ),
    ),
}
"""Checks of assets that only some recipes have."""

ALL_SPECS = {**SPECS, **OPTIONAL_SPECS}


def specs_of(asset: str) -> tuple[CheckSpec, ...]:
    """Return all checks of the asset in order, including `path_isolation` for raw_images."""
    return (PATH_ISOLATION, *SPECS[asset]) if asset == "raw_images" else ALL_SPECS[asset]


_MASKS = ("masks_present", "masks_usable", "masks_matched", "masks_white", "masks_cropped")
_REFERENCES = ("references_present", "references_usable", "references_matched")

ONLY_WITH: dict[str, str] = {
    **dict.fromkeys(_MASKS, "masks"),
    **dict.fromkeys(_REFERENCES, "references"),
    **dict.fromkeys(("validation_apart", "validation_loss"), "holdout"),
    "slider_pairs": "sliders",
    "subjects_visible": "subjects",
}
"""Checks that can only fail in recipes with a feature, see `features` in assets/checks.py."""


def _gates(*, openable: bool) -> set[str]:
    all_specs = (spec for asset in ALL_SPECS for spec in specs_of(asset))
    return {spec.name for spec in all_specs if spec.gate and spec.openable == openable}


GATES: tuple[str, ...] = tuple(sorted(_gates(openable=True)))
"""Names that `checks.allow` may contain. Gates of that name that cannot be allowed stay closed."""

WARNINGS: tuple[str, ...] = tuple(
    sorted({spec.name for asset in ALL_SPECS for spec in specs_of(asset) if not spec.gate})
)
"""Names that `checks.gates` may contain. A gate of the same name of another asset is not changed."""

NEVER_OPEN: tuple[str, ...] = tuple(sorted(_gates(openable=False) - {*GATES}))
"""Names of checks that cannot be allowed for any asset."""
