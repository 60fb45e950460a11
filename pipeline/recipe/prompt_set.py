"""Files with prompts for an evaluation other than the recipe's, for `latentline evaluate --prompt-set`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.errors import RecipeError
from pipeline.recipe.error_descriptions import FileKind
from pipeline.recipe.errors import PlacedMistake, file_error
from pipeline.recipe.evaluation import EvaluationPrompt, Prompts, repeated_prompts
from pipeline.recipe.project import project_root
from pipeline.recipe.schema import NAME_PATTERN, Recipe, valid_name
from pipeline.recipe.settings import Settings, Violation
from pipeline.recipe.untrusted import is_untrusted, untrusted_mistakes
from pipeline.recipe.yaml_file import read_yaml_file
from pipeline.storage.addresses import absolute


@dataclass(frozen=True)
class PromptSet:
    """Prompts of an evaluation in a file, named by its stem."""

    file: Path
    prompts: tuple[EvaluationPrompt, ...]

    @property
    def name(self) -> str:
        """Name of the folder of its results."""
        return self.file.stem


class PromptSetFile(Settings):
    """Content of a file with prompts."""

    prompts: Prompts

    def violations(self) -> Iterator[Violation]:
        """See `Settings.violations`."""
        if not self.prompts:
            what = "the prompts of a prompt set must be a list, got auto"
            yield Violation("prompts", what, "write a list such as [{prompt: a red rose, role: concept}]")
        yield from repeated_prompts(self.prompts)


PROMPT_SET = FileKind(
    name="prompt set",
    model=PromptSetFile,
    first_key="prompts",
    example="prompts: [{prompt: a red rose, role: concept}]",
    schema="configs/recipe.schema.json",
    unknown_key_fix=lambda _: None,
)


def load_prompt_set(file: Path) -> PromptSet:
    """Return the prompts in a YAML file; all mistakes are in one RecipeError, with line, key and fix."""
    if not re.fullmatch(NAME_PATTERN, file.stem):
        raise RecipeError(
            f"the name of a prompt set must contain only letters, digits and _, got {file.stem!r}",
            where=str(file),
            fix=f"rename the file, for example to {valid_name(file.stem)}.yaml",
        )
    document, mistakes = read_yaml_file(file, PROMPT_SET)
    if not mistakes and is_untrusted():
        cache_dir = str(Recipe.model_fields["cache_dir"].default)
        section = {"evaluation": document.data}
        refused = untrusted_mistakes(section, project_root(), cache_dir=cache_dir)
        placed = [replace(each, path=each.path[1:]) for each in refused]
        mistakes = [PlacedMistake(str(file), each, document.line(each.path)) for each in placed]
    if mistakes:
        raise file_error(mistakes, RecipeError, PROMPT_SET)

    prompts = PromptSetFile.model_validate_json(json.dumps(document.data)).prompts
    root = project_root()
    return PromptSet(
        file,
        tuple(
            each.model_copy(
                update={"references": tuple(Path(str(absolute(str(path), root))) for path in each.references)}
            )
            for each in prompts
        ),
    )
