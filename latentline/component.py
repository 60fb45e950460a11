"""The component `latentline.LoraRecipe`: the definitions of one recipe in a Dagster project."""

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import click
from dagster import (
    Component,
    ComponentLoadContext,
    Definitions,
    Model,
    ResolutionContext,
    Resolvable,
    Resolver,
    Scaffolder,
    ScaffoldRequest,
    scaffold_component,
    scaffold_with,
)
from pydantic import BaseModel, Field

from latentline.shadowed import shadowed_packages

# Otherwise the next imports would fail inside the other project's packages.
if (problem := shadowed_packages()) is not None:
    raise ImportError(problem)

from assets.definitions import (
    FileContents,
    is_strict,
    load_project_recipes,
    read_files,
    shared_definitions,
)
from assets.deployment import build_executor, gpu_pool
from assets.location import Location
from assets.recipe_graph import broken_recipe_graphs, recipe_graph
from assets.sources import start_dependency
from pipeline.errors import LatentlineError, RecipeError
from pipeline.escaping import printable_lines
from pipeline.recipe import BrokenRecipe, Recipe, recipes_dir
from pipeline.recipe.deployment import load_deployment
from pipeline.recipe.project import MARKER, use_project
from pipeline.reporting.terminal import find_terminal
from resources.recipe_executor import recipe_executor


class NewRecipe(BaseModel):
    """Options of `latentline new`."""

    images: str | None = Field(None, description="Folder of images and captions; data/NAME by default.")
    base: str | None = Field(None, description="Hub id or diffusers folder of the base model.")
    preset: Literal["subject", "style", "edit"] | None = Field(None, description="Published settings.")
    trigger: str | None = Field(None, description="Trigger word.")
    steps: int | None = Field(None, description="Number of optimizer steps.")
    rank: int | None = Field(None, description="Rank of the LoRA, and its alpha.")
    resolution: int | None = Field(None, description="Edge of a square bucket in pixels.")


class LoraRecipeScaffolder(Scaffolder[NewRecipe]):
    """Writes configs/NAME.yaml as `latentline new` does, and the defs.yaml that names it."""

    @classmethod
    def get_scaffold_params(cls) -> type[NewRecipe]:
        """Return the options of `dg scaffold defs latentline.LoraRecipe`."""
        return NewRecipe

    def scaffold(self, request: ScaffoldRequest[NewRecipe]) -> None:
        """Write the recipe, defs.yaml, and the mark of a project folder for the command `latentline`."""
        from pipeline.cli.new import command as new

        root, name = request.project_root or Path.cwd(), request.target_path.name
        options = {"images": str(root / "data" / name), **request.params.model_dump(exclude_none=True)}
        try:
            use_project(root)
            arguments = [f"--{option}={value}" for option, value in options.items()]
            new.main([name, *arguments], "latentline new", standalone_mode=False)
        except (LatentlineError, click.ClickException) as err:
            # Dagster has made this folder, and would refuse to scaffold into it again.
            with suppress(OSError):
                request.target_path.rmdir()
            raise click.ClickException(
                err.text() if isinstance(err, LatentlineError) else err.message
            ) from err

        (root / MARKER).touch()
        file = recipes_dir() / f"{name}.yaml"
        if file.is_relative_to(root):
            file = "{{ context.project_root }}/" + file.relative_to(root).as_posix()
        scaffold_component(request, {"recipe": str(file)})


def _recipe_file(context: ResolutionContext, value: str) -> Path:
    return context.resolve_source_relative_path(value)


@scaffold_with(LoraRecipeScaffolder)
class LoraRecipe(Component, Model, Resolvable):
    """The assets, checks, jobs, schedule and sensor of one recipe.

    All components of a project share the resources `latentline_tables` and `latentline_launcher`. Their jobs
    have the executor of the deployment; all other jobs of the code location keep theirs. The first component
    also has the sensors that all recipes share, and the source assets of datasets and base models.
    """

    recipe: Annotated[
        Path,
        Resolver(
            _recipe_file,
            model_field_type=str,
            description="Path of the recipe, relative to the folder of defs.yaml.",
            examples=["flowers.yaml", "{{ context.project_root }}/configs/flowers.yaml"],
        ),
    ]

    def build_defs(self, context: ComponentLoadContext) -> Definitions:
        """Return the definitions of the recipe; a recipe with mistakes shows them, as in a project folder.

        Raises:
            RecipeError: Two components have recipes of one name; the path of the recipe is relative; Dagster
                does not list this component; or `LATENTLINE_STRICT` is set, and the recipe has mistakes.
            FileAccessError: The process has loaded the recipes of another project.
        """
        # The working directory of a code server may be anywhere.
        use_project(context.project_root)

        # Undocumented: a component has no public way to find the others of its project.
        files = [each.recipe for each in context.component_tree.get_all_components(LoraRecipe)]
        self._require_found(files)
        self._require_own_name(files)
        recipes, broken, location, shared = _project(tuple(files), read_files(files))
        own = self._graph(recipes, broken, location)
        if self.recipe == files[0]:
            return Definitions.merge(shared, own)

        # Dagster merges equal objects. With them, `dg` can also load this component alone.
        return Definitions.merge(Definitions(resources=shared.resources), own)

    def _graph(
        self, recipes: Sequence[Recipe], broken: Sequence[BrokenRecipe], location: Location
    ) -> Definitions:
        for recipe in recipes:
            if recipe.source == self.recipe:
                return recipe_graph(recipe, location, start=start_dependency(recipe, recipes))

        # All of them are built, because each gets a name that no other recipe has.
        graphs = broken_recipe_graphs(broken, [recipe.name for recipe in recipes], location)
        error, graph = next(
            (each, graph) for each, graph in zip(broken, graphs, strict=True) if each.file == self.recipe
        )
        if is_strict():
            raise error.error
        click.echo(printable_lines(f"warning: {error.summary()}"), err=True)
        return graph

    def _require_found(self, files: Sequence[Path]) -> None:
        # A component in defs.yaml has an absolute path. A code server may have any working directory.
        if not self.recipe.is_absolute():
            raise RecipeError(
                f"the recipe of a component in Python must be an absolute path, got {self.recipe}",
                where="latentline.LoraRecipe, recipe",
                fix=f'use `context.project_root / "{self.recipe}"`, or another absolute path',
            )
        # Dagster reads the types of components in Python from annotations that are classes, not texts.
        if self.recipe not in files:
            raise RecipeError(
                "Dagster does not list this component, because its function does not state the class",
                where=str(self.recipe),
                fix="give the function that returns it the annotation `-> latentline.LoraRecipe`, in a file "
                "without `from __future__ import annotations`; or declare the component in a defs.yaml",
            )

    def _require_own_name(self, files: Sequence[Path]) -> None:
        # Assets, jobs and sensors are named after the recipe.
        same = [str(file) for file in files if file.stem == self.recipe.stem]
        if len(same) > 1:
            raise RecipeError(
                f"{len(same)} components have a recipe named {self.recipe.stem}",
                where=", ".join(same),
                fix="give each component a recipe of its own, and rename files of the same name",
            )


# Each component of the project needs all recipes, and the very same shared objects.
@lru_cache(maxsize=1)
def _project(
    files: tuple[Path, ...], contents: FileContents
) -> tuple[list[Recipe], list[BrokenRecipe], Location, Definitions]:
    del contents
    find_terminal()
    recipes, broken = load_project_recipes(files)
    deployment = load_deployment()

    # The project's own definitions decide executor, loggers and resources of the code location.
    location = Location(
        gpu_pool(deployment),
        prefix="latentline_",
        executor=recipe_executor(build_executor(deployment), recipes),
        job_config={},
    )
    return recipes, broken, location, shared_definitions(recipes, broken, deployment, location)
