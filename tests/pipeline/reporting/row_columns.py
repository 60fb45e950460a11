"""The columns of the rows that failing checks report, which programs read by name from reports."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.reporting.findings import Finding

_REJECTED = {"sample_id", "reason", "detail", "fix"}
_PICTURE = {"sample_id", "what", "value"}
_ENTRY = {"sample_id", "problem", "bytes", "expected_bytes", "path"}

COLUMNS: dict[str, list[set[str]]] = {
    "images_found": [{"dataset", "searched", "rejected", "passed_over", "other_suffixes"}],
    "names_distinct": [{"names", "differ_in"}],
    "conservation": [{"sample_id", "problem"}],
    "shape_uniformity": [
        {"sample_id", "height", "width", "channels", "mode"},
        {"sample_id", "height", "width", "scanned_height", "scanned_width"},
        {"bucket", "problem"},
        {"sample_id", "problem"},
        _ENTRY,
    ],
    "file_size_outliers": [
        {"sample_id", "format", "bytes_per_pixel", "median"},
        {"sample_id", "reason"},
        _ENTRY,
    ],
    "oddities": [{"what", "path", "detail"}],
    "captions_present": [_REJECTED],
    "captions_decodable": [_REJECTED],
    "captions_unshared": [{"caption", "images"}],
    "rejected_fraction": [_REJECTED],
    "look_alikes": [{"what", "images"}, {"what", "images", "of"}],
    "one_colour": [{"sample_id", "height", "width"}],
    "look_alikes_agree": [{"images", "conflict"}],
    "pictures_sharp": [_PICTURE],
    "pictures_exposed": [_PICTURE],
    "pictures_unframed": [_PICTURE],
    "subjects_visible": [_PICTURE],
    "views_varied": [{"images", "number"}],
    "validation_apart": [{"images"}],
    "captions_agree": [{"sample_id", "used", "not_used"}],
    "edits_matched": [{"file"}],
    "captions_readable": [{"sample_id", "what"}],
    "captions_complete": [{"sample_id", "text"}],
    "captions_looping": [{"sample_id", "text"}],
    "captions_plausible": [{"sample_id", "what", "text"}],
    "captions_repeated": [
        {"dataset", "caption", "images", "of", "first"},
        {"dataset", "what", "text", "images", "of", "without"},
    ],
    "caption_settings": [{"sample_id", "setting", "problem"}],
    "batches_possible": [{"bucket", "draws"}, _REJECTED],
    "underfilled": [{"bucket", "draws"}],
    "crop_loss": [{"sample_id", "crop_loss", "size", "bucket"}],
    "slider_pairs": [{"sample_id", "bucket", "slider"}],
    "completeness": [_ENTRY, {"sample_id", "problem"}],
    "finite_values": [_ENTRY],
    "captions_fit": [{"sample_id", "num_tokens", "num_cut", "cut_part"}],
    "trigger_fits": [{"sample_id", "setting", "text"}],
    "previews_name_trigger": [{"trigger"}],
}
"""The possible sets of columns of each check's rows."""


def require_columns(findings: Iterable[Finding]) -> None:
    """Fail if a row of a finding has other columns than its check reports."""
    for finding in findings:
        for row in finding.rows:
            assert set(row) in COLUMNS[finding.name], f"{finding.name} reports other columns: {row}"
