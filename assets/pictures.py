"""Pictures in the metadata of a materialization: small enough for the event log, and stored once."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dagster import AssetExecutionContext, MetadataValue

from pipeline.escaping import markdown_text
from resources.old_dagster_runs import PICTURES_RUN

# Dagster's event log stores each picture three times: with the output, and twice with the materialization.
MAX_PICTURE_BYTES = 40_000
"""Maximum size of a picture in the metadata of an asset."""

MAX_PICTURES_BYTES = 120_000
"""Maximum total size of an asset's pictures."""

PICTURES_VERSION = "pictures_version"
"""Metadata entry with a hash of the pictures."""

PICTURE_KINDS = {".png": "image/png", ".jpg": "image/jpeg"}


def pictures_once(
    context: AssetExecutionContext, pictures: Mapping[str, MetadataValue[Any]]
) -> dict[str, MetadataValue[Any]]:
    """Return pictures with their version, or the run that has them if they are the ones of the last run."""
    if not pictures:
        return {}
    text = repr([(name, value.value) for name, value in pictures.items()])
    version = MetadataValue.text(hashlib.sha256(text.encode("utf-8")).hexdigest()[:12])

    event = context.instance.get_latest_materialization_event(context.asset_key)
    materialization = None if event is None else event.asset_materialization
    if event is None or materialization is None or materialization.metadata.get(PICTURES_VERSION) != version:
        return {**pictures, PICTURES_VERSION: version}

    # The last run may refer to an earlier one too.
    reference = materialization.metadata.get(PICTURES_RUN)
    run_id = event.run_id if reference is None else str(reference.value)
    if context.instance.get_run_by_id(run_id) is None:
        return {**pictures, PICTURES_VERSION: version}
    return {PICTURES_RUN: MetadataValue.dagster_run(run_id), PICTURES_VERSION: version}


def picture_metadata(folder: Path) -> dict[str, MetadataValue[Any]]:
    """Return each picture in `folder` as `picture_<file stem>`, up to `MAX_PICTURES_BYTES` in total.

    A larger picture is embedded as a JPEG of lower quality or size; its file is unchanged. The folder may be
    missing.
    """
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    pictures = _embedded([path for path in paths if path.suffix in PICTURE_KINDS])
    return {f"picture_{path.stem}": MetadataValue.md(picture) for path, picture in pictures.items()}


def captioned_pictures(captions: Mapping[Path, str]) -> MetadataValue[Any]:
    """Return pictures with their captions below them, up to `MAX_PICTURES_BYTES` in total.

    Captions are Markdown: use `markdown_text` for text of users. Missing files are skipped.
    """
    pictures = _embedded([path for path in captions if path.is_file()])
    return MetadataValue.md(
        "\n\n".join(f"{picture}\n\n{captions[path]}" for path, picture in pictures.items())
    )


def _embedded(paths: Sequence[Path]) -> dict[Path, str]:
    """Return Markdown with the data of each picture, which any browser shows without access to the file."""
    sizes = {path: path.stat().st_size for path in paths}

    # Small pictures keep their bytes, and larger pictures share the bytes that remain.
    limit_bytes = min(MAX_PICTURE_BYTES, MAX_PICTURES_BYTES // max(1, len(paths)))
    small = [path for path in paths if sizes[path] <= limit_bytes]
    remaining_bytes = MAX_PICTURES_BYTES - sum(sizes[path] for path in small)
    share_bytes = min(MAX_PICTURE_BYTES, remaining_bytes // max(1, len(paths) - len(small)))

    pictures: dict[Path, str] = {}
    for path in paths:
        fits = sizes[path] <= share_bytes or path in small
        kind = PICTURE_KINDS[path.suffix] if fits else "image/jpeg"
        data = path.read_bytes() if fits else _reduced(path, share_bytes)
        if data:
            text = base64.b64encode(data).decode("ascii")
            pictures[path] = f"![{markdown_text(path.stem)}](data:{kind};base64,{text})"
    return pictures


def _reduced(path: Path, max_bytes: int) -> bytes:
    """Return the picture as a JPEG with at most `max_bytes`; no bytes for a damaged one."""
    from PIL import Image

    from pipeline.reporting.pictures import jpeg

    try:
        with Image.open(path) as picture:
            return jpeg(picture.convert("RGB"), max_bytes)
    except OSError:  # Pillow raises it for unknown formats and truncated files
        return b""
