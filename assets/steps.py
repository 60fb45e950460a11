"""A step of Dagster that makes one asset and answers its checks.

`@multi_asset` looks at signatures, annotations and types anew for every recipe: that took most of the time in
which many recipes load. Here, what all recipes share of a step is made once.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from dagster import (
    AssetCheckResult,
    AssetCheckSpec,
    AssetExecutionContext,
    AssetsDefinition,
    AssetSpec,
    Field,
    In,
    MaterializeResult,
    Nothing,
    OpDefinition,
    Out,
)
from dagster._core.definitions.assets.job.asset_layer import AssetLayer
from dagster._core.definitions.dependency import NodeHandle
from dagster._core.definitions.output import OutputDefinition
from dagster._core.definitions.resource_requirement import (
    OpDefinitionResourceRequirement,
    OutputManagerRequirement,
    ResourceRequirement,
)

from assets.checks import answers
from assets.isolation import isolation_result, require_isolated
from assets.naming import TABLES_RESOURCE, asset_key, code_version, pool_of
from pipeline.recipe import Recipe
from pipeline.recipe.gates import PATH_ISOLATION, specs_of
from pipeline.storage.needed_columns import needed_columns
from resources.failures import failures_stated
from resources.tables import COLUMNS

_TABLE = "result"


class _Output(Out):
    """The table, or a check's answer: of one name it is one definition, in all recipes."""

    _made: ClassVar[dict[str, OutputDefinition]] = {}

    def to_definition(
        self, annotation_type: type, name: str | None, description: str | None, code_version: str | None
    ) -> OutputDefinition:
        known = str(name)
        if known not in self._made:
            self._made[known] = super().to_definition(annotation_type, name, description, code_version)
        return self._made[known]


class _Step(OpDefinition):
    """A step that reads and writes tables alone."""

    def get_resource_requirements(
        self, handle: NodeHandle | None, asset_layer: AssetLayer | None
    ) -> Iterator[ResourceRequirement]:
        """Each resource once; Dagster's own names it for every answer, several times for each job."""
        whose = f"{self.node_type_str} '{handle or self.name}'"
        for name in sorted(self.required_resource_keys):
            yield OpDefinitionResourceRequirement(key=name, node_description=whose)
        managers = {each.io_manager_key: each.name for each in self.output_defs}
        for manager, name in managers.items():
            yield OutputManagerRequirement(key=manager, node_description=whose, output_name=name)


@dataclass(frozen=True)
class AssetStep:
    """How an asset is made, for whichever recipe.

    The step first answers `path_isolation`, where it is the asset's, then makes the asset, then answers its
    other checks; of all that, what was selected. A closed gate fails the step, once all has been answered,
    and nothing downstream runs; the table has been written by then, so that it can be looked at. Paths that
    are not apart fail it before anything.

    Attributes:
        name: The asset's, which is its key's last part.
        description: What it holds, for the UI.
        make: Given the recipe, Dagster's context and what it needs of the tables of `reads`, the asset's
            result.
        kinds: The libraries that the UI shows at the asset.
        reads: The assets whose tables `make` is given, by the names of its parameters.
        resources: Names of the resources that `make` uses.
        settings: What a run may be given, with the recipe's values as defaults; none where it is None.
    """

    name: str
    description: str
    make: Callable[..., MaterializeResult[Any]]
    kinds: frozenset[str]
    reads: Mapping[str, str] = field(default_factory=dict[str, str])
    resources: frozenset[str] = frozenset()
    settings: Callable[[Recipe], dict[str, Field]] | None = None

    def of(self, recipe: Recipe) -> AssetsDefinition:
        """The asset `<recipe>/<name>` with its checks."""
        key = asset_key(recipe, self.name)
        upstream = {name: asset_key(recipe, asset) for name, asset in self.reads.items()}

        def compute(
            context: AssetExecutionContext, inputs: Mapping[str, Any]
        ) -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
            return self._run(recipe, context, inputs)

        step = _Step(
            compute,
            name=key.to_python_identifier(),
            description=self.description,
            ins=self._ins,
            outs=self._outs,
            config_schema=self.settings(recipe) if self.settings is not None else None,
            required_resource_keys=self.resources,
            pool=pool_of(self.name),
        )
        spec = AssetSpec(
            key,
            deps=list(upstream.values()),
            group_name=recipe.name,
            code_version=code_version(recipe, self.name),
            kinds=set(self.kinds),
        )
        checks = {
            check.name: AssetCheckSpec(
                check.name, asset=key, description=check.explained, blocking=check.gate
            )
            for check in specs_of(self.name)
        }
        return AssetsDefinition(
            keys_by_input_name=upstream,
            keys_by_output_name={_TABLE: key},
            node_def=step,
            check_specs_by_output_name=checks,
            specs=[spec],
            can_subset=True,
        )

    def _run(
        self, recipe: Recipe, context: AssetExecutionContext, inputs: Mapping[str, Any]
    ) -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
        asked = {check.name for check in context.selected_asset_check_keys}
        run_id = context.run.run_id
        with failures_stated():
            if PATH_ISOLATION.name in asked:
                yield isolation_result(run_id, recipe)
            require_isolated(run_id, recipe)
            if context.selected_asset_keys:
                yield self.make(recipe, context, **inputs)
            if asked := asked - {PATH_ISOLATION.name}:
                yield from answers(recipe, self.name, asked)

    @cached_property
    def _ins(self) -> dict[str, Any]:
        columns = {name: needed_columns(self.name, table) for name, table in self.reads.items()}
        return {
            name: In(metadata=None if of is None else {COLUMNS: list(of)}).to_definition(name)
            for name, of in columns.items()
        }

    @cached_property
    def _outs(self) -> dict[str, Out]:
        table = _Output(io_manager_key=TABLES_RESOURCE, is_required=False)
        answer = _Output(Nothing, is_required=False)
        return {_TABLE: table, **{check.name: answer for check in specs_of(self.name)}}
