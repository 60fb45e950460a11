"""Errors shown to users: each has the problem, its location and a fix."""

from __future__ import annotations

from pipeline.escaping import printable_lines, without_secrets

RUN_RECIPE = "latentline run"
"""Shell command, without the recipe's name, that executes a recipe's job."""


def install_extra(extra: str) -> str:
    """Return the shell command that adds an extra of pyproject.toml to an environment with Latentline."""
    # pip reads the extras of the installed distribution. That is right for a wheel and for a checkout, in any
    # folder; `pip install -e '.[extra]'` works in a checkout only.
    return f"pip install 'latentline[{extra}]'"


class LatentlineError(Exception):
    """Base class of every error that Latentline raises on purpose.

    Attributes:
        what: One sentence with the invalid value.
        where: File and line, recipe key, asset or path.
        fix: Instructions for the user, the most useful first.
    """

    def __init__(self, what: str, *, where: str, fix: str) -> None:
        # The parts contain names and addresses from outside, and appear on terminals, in logs and in the UI.
        self.what, self.where, self.fix = (
            printable_lines(without_secrets(part)) for part in (what, where, fix)
        )
        super().__init__(self.text())

    def text(self) -> str:
        """Return three aligned paragraphs: what, where, fix."""
        return f"{self.what}\n  where: {_indented(self.where)}\n  fix:   {_indented(self.fix)}"

    def text_with_fix_first(self) -> str:
        """Return what, fix and where, for places such as Dagster's UI that show only the first few lines."""
        return f"{self.what}\n  fix:   {_indented(self.fix)}\n  where: {_indented(self.where)}"

    def __reduce__(self) -> tuple[object, ...]:
        # The default would call the class with the text alone, and no error could be sent between processes.
        return (_rebuild, (type(self), self.what, self.where, self.fix))


class RecipeError(LatentlineError):
    """A recipe is invalid."""


class DeploymentError(LatentlineError):
    """The deployment file is invalid, or names something that is not installed."""


class PathIsolationError(LatentlineError):
    """Two of dataset, cache_dir and output_dir overlap."""


class BucketError(LatentlineError):
    """No model or image can satisfy the bucket settings."""


class DatasetError(LatentlineError):
    """A dataset, its manifest or its address cannot be read."""


class TableError(LatentlineError):
    """A table is missing, unreadable or violates its schema."""


class StoreError(LatentlineError):
    """A cache entry is missing, damaged or could not be written."""


class ModelError(LatentlineError):
    """A base model cannot be found or read."""


class FamilyError(ModelError):
    """A base model belongs to an unsupported family."""


class FileAccessError(LatentlineError):
    """The operating system refused to read or write a file or folder."""


class LaunchError(LatentlineError):
    """A launched process failed or died."""


class StoppedError(LaunchError):
    """A launched process ended because it was asked to stop."""


class GateClosedError(LatentlineError):
    """A blocking check failed."""


class TrainingError(LatentlineError):
    """Training had to stop, or its result is invalid."""


class LoraFileError(LatentlineError):
    """A LoRA file cannot be read, combined or written."""


class DrawingError(LatentlineError):
    """`latentline sample` cannot draw the requested pictures."""


class EvaluationError(LatentlineError):
    """A run cannot be evaluated."""


class SweepError(LatentlineError):
    """The variants of a sweep cannot be compared, or its budget is too small."""


def counted(number: int, thing: str, things: str | None = None) -> str:
    """Return `number` with the matching form of a noun, "1 image" or "1,234 images".

    The singular may include a verb, such as "image has". The default plural is the singular with an s.
    """
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


def verb(number: int, one: str, several: str) -> str:
    """Return the form of a verb that matches `number` things, such as "is" or "are"."""
    return one if number == 1 else several


def _indented(text: str) -> str:
    # As wide as "  where: " and "  fix:   ", so that further lines are aligned with the first one.
    return text.strip().replace("\n", "\n         ")


def _rebuild(kind: type[LatentlineError], what: str, where: str, fix: str) -> LatentlineError:
    return kind(what, where=where, fix=fix)
