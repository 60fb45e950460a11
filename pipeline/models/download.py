"""Download files of a repository on the Hugging Face Hub, and report the progress."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.reporting.progress import progress
from pipeline.reporting.reports import Log

_MEGABYTE = 1_000_000


def download_files(name: str, revision: str | None, files: Iterable[str], *, log: Log) -> Path:
    """Return the snapshot of a repository with the given files; those on this machine are not downloaded.

    Args:
        name: Hub id of the repository.
        revision: Branch, tag or commit; None for the default branch.
        files: Names of the files in the repository.
        log: Receives the progress in megabytes.

    Raises:
        HTTPError: The Hub cannot be reached, or refuses access.
        OSError: The file system refuses a file.
        RuntimeError: A download in chunks (Xet) failed.
    """
    from huggingface_hub import snapshot_download
    from tqdm.auto import tqdm

    bars: list[Any] = []

    class ByteCounter(tqdm):
        """Progress bar of `snapshot_download` that counts and draws nothing."""

        monitor_interval = 0  # tqdm's monitor thread redraws bars

        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{**settings, "file": sink})
            if settings.get("unit") == "B":
                bars.append(self)

    # The bars count the bytes received and the bytes written; the first may be fewer.
    def num_megabytes() -> int:
        return int(max((bar.n for bar in bars), default=0)) // _MEGABYTE

    def total_megabytes() -> int:
        return int(max((bar.total or 0 for bar in bars), default=0)) // _MEGABYTE

    with (
        Path(os.devnull).open("w", encoding="utf-8") as sink,
        progress(num_megabytes, total_megabytes, f"downloading {name}", log=log, measure="MB"),
    ):
        folder = snapshot_download(
            name, revision=revision, allow_patterns=list(files), tqdm_class=ByteCounter
        )
    return Path(folder)
