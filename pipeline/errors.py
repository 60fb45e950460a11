"""Errors that a user can meet: each says what is wrong, where, and how to fix it."""

from __future__ import annotations


class LatentlineError(Exception):
    """Base of every error raised on purpose.

    Args:
        what: One sentence with the value met.
        where: File and line, recipe key, asset or path that is meant.
        fix: What the user can do, most useful first.
    """

    def __init__(self, what: str, *, where: str, fix: str) -> None:
        """Keep the three parts, and join them to the text a terminal shows."""
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(self.text())

    def text(self) -> str:
        """Three aligned lines: what, where, fix."""
        return f"{self.what}\n  where: {_indented(self.where)}\n  fix:   {_indented(self.fix)}"

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild from the three parts, so that the error survives a process boundary."""
        return (_rebuild, (type(self), self.what, self.where, self.fix))


class RecipeError(LatentlineError):
    """A recipe that cannot be used as written."""


class PathIsolationError(LatentlineError):
    """Two of dataset, cache_dir and output_dir share or contain one another."""


class BucketError(LatentlineError):
    """Bucket settings that no model or image can satisfy."""


class DatasetError(LatentlineError):
    """A dataset that cannot be read as a whole."""


class TableError(LatentlineError):
    """A table that is missing, unreadable, or not what its schema says."""


class StoreError(LatentlineError):
    """A store entry that is missing or damaged, or could not be written."""


class ModelError(LatentlineError):
    """A base model that cannot be found or read."""


class FamilyError(ModelError):
    """A base model of a family that Latentline does not know."""


class FileAccessError(LatentlineError):
    """A file or folder that the system did not let us read or write."""


class LaunchError(LatentlineError):
    """A launched process that failed or died."""


class GateClosedError(LatentlineError):
    """A blocking check found a reason not to go on."""


class TrainingError(LatentlineError):
    """Training that had to stop, or a result that is not what was asked for."""


def _indented(text: str) -> str:
    return text.strip().replace("\n", "\n         ")


def _rebuild(kind: type[LatentlineError], what: str, where: str, fix: str) -> LatentlineError:
    return kind(what, where=where, fix=fix)


def counted(number: int, thing: str, things: str | None = None) -> str:
    """`number` and the word for so many: "1 image", "1,234 images".

    Args:
        number: At least 0.
        thing: One of them.
        things: Several of them; by default `thing` with an s. Both may go on with a verb: "image has".
    """
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


def verb(number: int, one: str, several: str) -> str:
    """The form of a verb that goes with `number` things: "is" or "are"."""
    return one if number == 1 else several
