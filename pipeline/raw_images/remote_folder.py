"""A dataset on a file system that fsspec opens, walked once: as `folder` has it, by names and stats."""

from __future__ import annotations

from pipeline.errors import DatasetError
from pipeline.images.formats import sniff
from pipeline.raw_images.local_folder import Found, Problem, Walk, is_hidden, may_be_image
from pipeline.storage.source import ListedPath, RemoteSource

_SNIFFED_BYTES = 64


def walk_remote(
    source: RemoteSource, caption_suffix: str | None = None, *, found: Walk | None = None
) -> Walk:
    """Everything below the source; hidden files and folders are passed over.

    There are no links: what a server shows as one is counted as special.

    Args:
        source: Of the dataset.
        caption_suffix: Of sidecar caption files, with its dot; None where there are none.
        found: Filled and handed back; a new one by default.

    Raises:
        DatasetError: The address cannot be listed, or is that of a file.
    """
    found = found or Walk()

    def looks_like_image(path: str) -> bool:
        try:
            return sniff(source.read_start(path, _SNIFFED_BYTES)) is not None
        except OSError:
            return False

    pending = [""]
    while pending:
        folder = pending.pop()
        for entry in _entries(source, folder, found):
            if is_hidden(entry.path.rpartition("/")[2]):
                found.passed_over["hidden"] += 1
            elif entry.is_special:
                found.passed_over["special"] += 1
            elif entry.stat is None:
                pending.append(entry.path)
            elif may_be_image(found, entry.path, caption_suffix, looks_like_image):
                found.images.append(Found(entry.path, *entry.stat, device=0))
    return found


def _entries(source: RemoteSource, folder: str, found: Walk) -> list[ListedPath]:
    """What a folder holds; a folder that we may not list is a problem of its own, as a local one is."""
    try:
        return source.list_folder(folder)
    except DatasetError as err:
        if not folder or not isinstance(err.__cause__, PermissionError):
            raise
        detail = f"the folder cannot be listed: {err.__cause__}"
        found.problems.append(Problem(f"{folder}/", "unreadable_folder", detail, "make it readable"))
        return []
