"""The numbers that checks report, which programs read by name from reports and asset checks."""

from __future__ import annotations

import pytest

from pipeline.aspect_buckets import checks as aspect_buckets
from pipeline.raw_images import checks as raw_images
from pipeline.reporting.findings import CheckContext
from pipeline.text_embeddings import checks as text_embeddings
from pipeline.vae_latents import checks as vae_latents
from pipeline.validated_dataset import checks as validated_dataset
from tests.pipeline.cached_job import Job

CONSERVATION = {"in": 5, "kept": 5, "rejected": 0}
BATCHES = {
    "samples_at_once": 1,
    "draws_per_epoch": 5,
    "in_full_batches": 1.0,
    "full_batches_per_epoch": 5,
}
LATENTS = {"entries": 5, "problems": 0}
EMBEDDINGS = {"entries": 6, "problems": 0}
ODDITIES = ("wrong_suffix", "animated", "converted_from_profile", "links_out", "foreign_caches")

NUMBERS: dict[str, dict[str, dict[str, object]]] = {
    "raw_images": {
        "images_found": {"images": 5},
        "names_distinct": {},
        "conservation": CONSERVATION,
        "shape_uniformity": {"modes": {"RGB": 5}},
        "file_size_outliers": {"judged": 0, "not_judged": 5},
        "oddities": dict.fromkeys([*ODDITIES, "captions_without_image"], 0),
    },
    "validated_dataset": {
        "captions_present": {"from_fallback": 0},
        "captions_decodable": {},
        "captions_unshared": {},
        "rejected_fraction": {"rejected": 0, "of": 5, "fraction": 0.0, "limit": 0.05},
        "conservation": CONSERVATION,
        "shape_uniformity": {},
        "file_size_outliers": {"kept_bytes": 421981, "rejected_bytes": 0},
        "validation_apart": {},
        **{name: {} for name in ("captions_agree", "edits_matched", "captions_plausible")},
        "captions_repeated": {"repeated": 0, "phrases": 0},
        "caption_settings": {},
        "look_alikes": {"copies_left_out": 0, "groups": 0, "images_in_groups": 0, "near_duplicate_bits": 4},
        "one_colour": {"one_colour": 0},
        "look_alikes_agree": {"contradictions": 0},
        "pictures_sharp": {"blurred_or_enlarged": 0, "strongly_compressed": 0},
        "pictures_exposed": {"dark": 0, "overexposed": 0, "flat": 0},
        "pictures_unframed": {"framed_by_bars": 0, "marked_in_one_corner": 0},
        "subjects_visible": {"small_in_the_picture": 0, "centred_at_an_edge": 0},
        "views_varied": {"views": 5, "images": 5},
        **{name: {} for name in ("masks_present", "masks_usable", "masks_matched", "masks_white")},
        **{name: {} for name in ("references_present", "references_usable", "references_matched")},
    },
    "aspect_buckets": {
        "conservation": CONSERVATION,
        "shape_uniformity": {"buckets": 3, "multiple": 8},
        "file_size_outliers": {"buckets": 3, "median": 2.0},
        "batches_possible": BATCHES,
        "underfilled": BATCHES,
        "crop_loss": {"limit": 0.25, "worst": 0.2},
        "slider_pairs": {},
    },
    "vae_latents": {
        **dict.fromkeys(["completeness", "shape_uniformity", "file_size_outliers", "finite_values"], LATENTS),
        "rejected_fraction": {"rejected": 0, "rejected_here": 0, "of": 5, "limit": 0.05, "fraction": 0.0},
        "masks_cropped": {},
    },
    "text_embeddings": {
        **dict.fromkeys(
            ["completeness", "shape_uniformity", "file_size_outliers", "finite_values"], EMBEDDINGS
        ),
        "captions_fit": {"samples": 5, "cut": 0, "max_length": 77},
        "trigger_fits": {},
        "previews_name_trigger": {},
    },
}
"""Numbers of each check of a job with five photographs; all checks pass."""

CHECKS = (raw_images, validated_dataset, aspect_buckets, vae_latents, text_embeddings)


@pytest.mark.parametrize("checks", CHECKS, ids=lambda module: module.__name__.split(".")[1])
def test_a_passing_check_reports_all_its_numbers(job: Job, checks) -> None:
    expected = NUMBERS[checks.__name__.split(".")[1]]
    findings = {finding.name: finding for finding in checks.run(CheckContext(job.recipe, job.tables))}
    assert {name: finding.summary for name, finding in findings.items() if not finding.passed} == {}
    actual = {name: finding.numbers for name, finding in findings.items()}
    assert actual == {name: {"num_rows": 0, **numbers} for name, numbers in expected.items()}
