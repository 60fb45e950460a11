"""Reading of a YAML file: its data, and all of its mistakes with their lines."""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_ISREG

from pipeline.recipe.error_descriptions import FileKind
from pipeline.recipe.errors import Mistake, PlacedMistake, find_mistakes
from pipeline.recipe.project import path_in_recipe
from pipeline.recipe.yaml_document import Document, parse

MAX_FILE_BYTES = 4_000_000
"""Maximum size of a file; `yaml_document` limits its characters further."""


def read_yaml_file(file: Path, kind: FileKind) -> tuple[Document, list[PlacedMistake]]:
    """Return the document in `file`, which is empty if it cannot be read, and all mistakes by line."""
    shown = path_in_recipe(file)
    try:
        text = _read_bytes(file, kind).decode("utf-8")
    except OSError as error:
        what = f"cannot read the {kind.name}: {error.strerror or error}"
        return Document(), [PlacedMistake(shown, Mistake((), what, "name a readable file"))]
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        what = f"a {kind.name} must be UTF-8, got byte {error.object[error.start]:#04x}"
        return Document(), [PlacedMistake(shown, Mistake((), what, "save the file as UTF-8"), line)]

    document = parse(text)
    return document, _document_mistakes(document, shown, kind)


def _read_bytes(file: Path, kind: FileKind) -> bytes:
    # A repository can hold a link to a device, and reading it would never end.
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb") as opened:
        if not S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise OSError("it is not a regular file")
        content = opened.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise OSError(f"a {kind.name} must have at most {MAX_FILE_BYTES:,} bytes")
    return content


def _document_mistakes(document: Document, shown: str, kind: FileKind) -> list[PlacedMistake]:
    mistakes: list[Mistake] = []
    if isinstance(document.data, dict):
        mistakes = find_mistakes(document.data, kind)
    elif document.data is not None:
        what = f"a {kind.name} must be a mapping of keys"
        mistakes = [Mistake((), what, f"start with {kind.first_key}: at the top level")]
    elif not document.flaws:
        mistakes = [Mistake((), f"the {kind.name} is empty", f"start from {kind.example}")]

    placed = [
        PlacedMistake(shown, Mistake(flaw.path, flaw.what, flaw.fix), flaw.line) for flaw in document.flaws
    ]
    # A value with a flaw was read as None, and what pydantic reports about None would mislead.
    flawed = {flaw.path for flaw in document.flaws}
    placed += [
        PlacedMistake(shown, mistake, document.line(mistake.path))
        for mistake in mistakes
        if mistake.path not in flawed
    ]
    return sorted(placed, key=lambda one: one.line or 0)
