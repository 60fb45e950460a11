"""A step of Dagster that makes one asset, or the checks of one.

`@asset` and `@multi_asset_check` look at signatures, annotations and types anew for every recipe: that took
most of the time in which many recipes load. Here, what all recipes share of a step is made once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dagster import (
    AssetCheckExecutionContext,
    AssetCheckResult,
    AssetChecksDefinition,
    AssetCheckSpec,
    AssetExecutionContext,
    AssetKey,
    AssetsDefinition,
    AssetSpec,
    Field,
    In,
    MaterializeResult,
    Nothing,
    OpDefinition,
    Out,
)

from assets.naming import TABLES_RESOURCE, asset_key, code_version, pool_of
from pipeline.checks.names import CheckSpec
from pipeline.recipe import Recipe

_TABLE = "result"
_ANSWER = Out(Nothing, is_required=False)
_OWN_ANSWER = Out(Nothing)
_ORDER = In(Nothing)


@dataclass(frozen=True)
class AssetStep:
    """How an asset is made, for whichever recipe.

    Attributes:
        name: The asset's, which is its key's last part.
        description: What it holds, for the UI.
        make: Given the recipe, Dagster's context and the tables of `reads`, it yields the asset's result,
            and the answers of `checks`.
        kinds: The libraries that the UI shows at the asset.
        reads: The assets whose tables `make` is given, by the names of its parameters.
        checks: Those that `make` answers itself.
        resources: Names of the resources that `make` uses.
        settings: What a run may be given, with the recipe's values as defaults; none where it is None.
    """

    name: str
    description: str
    make: Callable[..., Iterator[AssetCheckResult | MaterializeResult[Any]]]
    kinds: frozenset[str]
    reads: Mapping[str, str] = field(default_factory=dict[str, str])
    checks: Sequence[CheckSpec] = ()
    resources: frozenset[str] = frozenset()
    settings: Callable[[Recipe], dict[str, Field]] | None = None

    def of(self, recipe: Recipe) -> AssetsDefinition:
        """The asset `<recipe>/<name>`."""
        key = asset_key(recipe, self.name)
        checks = _check_specs(key, self.checks)
        upstream = {name: asset_key(recipe, asset) for name, asset in self.reads.items()}

        def compute(context: AssetExecutionContext, inputs: Mapping[str, Any]) -> Iterator[Any]:
            return self.make(recipe, context, **inputs)

        step = OpDefinition(
            compute,
            name=key.to_python_identifier(),
            description=self.description,
            ins=self._ins,
            outs={_TABLE: self._table, **dict.fromkeys(checks, _OWN_ANSWER)},
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
        return AssetsDefinition(
            keys_by_input_name=upstream,
            keys_by_output_name={_TABLE: key},
            node_def=step,
            check_specs_by_output_name=checks,
            specs=[spec],
        )

    @cached_property
    def _ins(self) -> dict[str, In]:
        return {name: In() for name in self.reads}

    @cached_property
    def _table(self) -> Out:
        return Out(io_manager_key=TABLES_RESOURCE)


def checks_step(
    recipe: Recipe,
    asset: str,
    checks: Sequence[CheckSpec],
    run: Callable[[AssetCheckExecutionContext], Iterator[AssetCheckResult]],
) -> AssetChecksDefinition:
    """The step in which `run` answers `checks` of the asset, or those of them that are selected."""
    key = asset_key(recipe, asset)
    specs = _check_specs(key, checks)

    def compute(context: AssetCheckExecutionContext, inputs: Mapping[str, Any]) -> Iterator[AssetCheckResult]:
        return run(context)

    after = "_".join(key.path)
    step = OpDefinition(
        compute,
        name=f"{key.to_python_identifier()}__checks",
        ins={after: _ORDER},
        outs=dict.fromkeys(specs, _ANSWER),
        config_schema={},
    )
    return AssetChecksDefinition.create(
        keys_by_input_name={after: key},
        node_def=step,
        check_specs_by_output_name=specs,
        can_subset=True,
    )


def _check_specs(key: AssetKey, checks: Sequence[CheckSpec]) -> dict[str, AssetCheckSpec]:
    """By the names of the outputs that their answers are."""
    specs = [
        AssetCheckSpec(check.name, asset=key, description=check.explained, blocking=check.gate)
        for check in checks
    ]
    return {spec.get_python_identifier(): spec for spec in specs}
