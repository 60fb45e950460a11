"""Stage sweep: train the variants of a recipe by successive halving, judge them, and name the winner.

Nothing is stored about the progress. What was trained is in the folders of the runs, and what was drawn is in
the cache, so a sweep that was stopped or killed starts again at its first rung and finds its work done.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.errors import LatentlineError, SweepError, counted
from pipeline.evaluation.prepare import Request, prepare_evaluation
from pipeline.evaluation.report import shown_strength
from pipeline.evaluation.stage import score_pictures
from pipeline.log import NOTE, Log
from pipeline.recipe.evaluation import EvaluationSettings
from pipeline.reporting.reports import StageResult, Stopwatch
from pipeline.storage.tables import Tables, empty, frame
from pipeline.sweep.concurrency import ONE_AT_A_TIME, Concurrency, call_concurrently
from pipeline.sweep.halving import affordable, num_kept, rungs
from pipeline.sweep.judging import Cost, Decision, Judged, decide, judge
from pipeline.sweep.report import Shown, write_pictures
from pipeline.sweep.runs import VariantRun, planner, recorded, require_distinct
from pipeline.sweep.scores import (
    expected_cells,
    numbered_prompts,
    picture_cells,
    shares_loss,
    validation_cells,
)
from pipeline.sweep.variants import Variant, overrides_text, require_sweep, variants
from pipeline.trained_lora.stage import require_open_gates

if TYPE_CHECKING:
    from pipeline.processes.launch import Launch
    from pipeline.recipe import Recipe
    from pipeline.recipe.sweep import SweepSettings

ASSET = "sweep"

Row = dict[str, Any]


def sweep(
    recipe: Recipe,
    latents: pl.DataFrame,
    text: pl.DataFrame,
    *,
    launch: Launch,
    log: Log,
    concurrency: Concurrency = ONE_AT_A_TIME,
) -> StageResult:
    """Find the best variant of the recipe. Its own run, tables, reports and `lora/` stay as they are.

    Each variant has the run that a plain recipe with its values has, in the same folder. A variant that fails
    is recorded with its error, and the others continue.

    Args:
        recipe: A recipe with the section `sweep`.
        latents: Table of vae_latents.
        text: Table of text_embeddings.
        launch: Launches the training, and the processes that draw and score.
        log: Log of the step.
        concurrency: How many variants are trained at the same time.

    Raises:
        GateClosedError: An upstream gate is closed; nothing was launched.
        LatentlineError: The error of the first variant, if each variant failed.
        RecipeError: A variant is not a valid recipe.
        StoppedError: The training was stopped; the next sweep continues from its checkpoint.
        StoreError: The cache cannot be read or written.
        SweepError: Two variants are the same run, the budget is too small, or nothing can be compared.
    """
    watch = Stopwatch()
    require_sweep(recipe)
    chosen = variants(recipe)
    # The command, and a selection of this asset alone, run no check of the assets before it.
    require_open_gates(recipe, log=log)
    running = _Sweep(recipe, chosen, launch, log, watch, concurrency)
    with planner(recipe, latents, text, launch=launch, log=log) as planned:
        for variant in chosen:
            runs = recorded(partial(planned.runs_of, variant), running.failed, variant.number)
            if runs is not None:
                running.runs[variant.number] = runs
        require_distinct(running.runs, running.names)
        decision = running.run()

    table = frame(ASSET, running.rows)
    write_pictures(recipe, chosen, table, running.shown, decision)
    report = {**_report(running, decision, table), **watch.numbers()}
    return StageResult(table, empty("rejected"), report)


@dataclass
class _Sweep:
    """The state of one sweep.

    Attributes:
        runs: Runs by variant, without variants that could not be planned.
        failed: Error of each variant that failed.
        rows: Rows of the table.
        shown: What the sheet shows of each judged variant.
        spent: Number of steps of all variants up to now, whichever sweep has trained them.
    """

    recipe: Recipe
    variants: Sequence[Variant]
    launch: Launch
    log: Log
    watch: Stopwatch
    concurrency: Concurrency
    runs: dict[int, tuple[VariantRun, ...]] = field(default_factory=dict[int, "tuple[VariantRun, ...]"])
    failed: dict[int, LatentlineError] = field(default_factory=dict[int, LatentlineError])
    rows: list[Row] = field(default_factory=list[Row])
    shown: dict[int, Shown] = field(default_factory=dict[int, Shown])
    spent: int = 0

    @property
    def settings(self) -> SweepSettings:
        """The section `sweep`."""
        return require_sweep(self.recipe)

    @property
    def _measures(self) -> bool:
        """Whether a rung needs the validation loss of its step."""
        return self.settings.judge == "validation_loss"

    @property
    def names(self) -> dict[int, str]:
        """Texts of the variants."""
        return {variant.number: variant.text for variant in self.variants}

    def run(self) -> Decision:
        """Train and judge the variants rung by rung."""
        self.rows += [
            self._unplanned_row(variant) for variant in self.variants if variant.number in self.failed
        ]
        fractions = rungs(self.settings.halving)
        self._require_budget(fractions[0])

        alive, before, decision = list(self.runs), 0.0, _NO_DECISION
        for fraction in fractions:
            entered = alive
            self.log(f"{NOTE}{counted(len(entered), 'variant')} to {fraction:.3g} of the steps")
            unjudged = self._train(entered, before, fraction)
            judged = self._judge([v for v in entered if v not in self.failed and v not in unjudged], fraction)
            alive = [variant for variant in entered if variant not in self.failed]
            if not alive and not before:
                raise next(iter(self.failed.values()))
            promoted = (
                self._promoted(alive, self._order(judged, before, fraction), fraction)
                if fraction < 1.0
                else []
            )
            decision = decide(judged, self.names, num_variants=len(self.variants)) if judged else _NO_DECISION
            winners = promoted if fraction < 1.0 else [decision.winner]
            for variant in entered:
                self._add(self._rows(variant, judged, before, fraction, promoted=variant in winners))
            alive, before = promoted, fraction
            if not alive:
                break
        self.log(decision.why)
        return decision

    def _train(self, entered: Sequence[int], before: float, fraction: float) -> set[int]:
        """Train variants up to a rung; return those that cannot be judged there."""
        unjudged = set[int]()
        lock = threading.Lock()

        def train(variant: int) -> None:
            with lock:
                # The first rung has no ranking, so a budget of minutes ends it in the order of the variants.
                if variant != entered[0] and not before and not self._has_budget_for(variant, fraction):
                    self.failed[variant] = _budget_error(self.recipe, "is used up before this variant")
                    return
                self.spent += self._steps(variant, before, fraction)
            if recorded(partial(self._train_one, variant, fraction), self.failed, variant) is False:
                unjudged.add(variant)
            if variant in self.failed:
                self.log(f"warning: {self.names[variant]} failed: {self.failed[variant].what}")

        calls = [partial(train, variant) for variant in entered]
        several = self.concurrency.number > 1 and self._trains(entered, fraction)
        with self.concurrency.place() if several else nullcontext():
            call_concurrently(calls, self.concurrency.number)
        return unjudged

    def _trains(self, entered: Sequence[int], fraction: float) -> bool:
        runs = [run for variant in entered for run in self.runs[variant]]
        return not all(run.is_trained(run.step_at(fraction), measured=self._measures) for run in runs)

    def _train_one(self, variant: int, fraction: float) -> bool:
        trained = [
            run.train(run.step_at(fraction), measured=self._measures, launch=self.launch, log=self.log)
            for run in self.runs[variant]
        ]
        return all(trained)

    def _judge(self, judgeable: Sequence[int], fraction: float) -> Judged | None:
        """Compare the variants that can be judged at a rung; None without any."""
        cells_of = self._picture_scores if self.settings.judge == "evaluation" else self._validation_cells
        cells: dict[int, list[pl.DataFrame]] = {}
        for variant in judgeable:
            of_variant = recorded(partial(cells_of, variant, fraction), self.failed, variant)
            if of_variant is not None:
                cells[variant] = of_variant
        if not cells:
            return None

        broken = dict[int, str]()
        if self.settings.judge == "evaluation":
            settings = self.recipe.evaluation or EvaluationSettings()
            limits = settings.limits.model_dump()
            quality, broken = picture_cells(cells, limits, pictures=settings.pictures)
        else:
            quality = {variant: pl.concat(of_variant) for variant, of_variant in cells.items()}
        return judge(quality, {variant: self._cost(variant, fraction) for variant in quality}, broken)

    def _cost(self, variant: int, fraction: float) -> Cost:
        runs = self.runs[variant]
        return sum(run.steps for run in runs), runs[0].lora_bytes(runs[0].step_at(fraction)), variant

    def _validation_cells(self, variant: int, fraction: float) -> list[pl.DataFrame]:
        runs = self.runs[variant]
        self.shown[variant] = Shown(runs[0], runs[0].step_at(fraction))
        return self._losses(variant, fraction)

    def _losses(self, variant: int, fraction: float) -> list[pl.DataFrame]:
        return [
            validation_cells(run.job, run.step_at(fraction), seed=number)
            for number, run in enumerate(self.runs[variant])
        ]

    def _picture_scores(self, variant: int, fraction: float) -> list[pl.DataFrame]:
        """Return the scores of the pictures of each of a variant's runs."""
        tables = Tables(self.recipe.output_dir, log=self.log)
        scores: list[pl.DataFrame] = []
        for run in self.runs[variant]:
            step = run.step_at(fraction)
            request = Request(run=run.job.run, steps=(step,))
            evaluation = prepare_evaluation(run.job.recipe, request, log=self.log)
            scored = score_pictures(evaluation, tables, launch=self.launch, log=self.log, watch=self.watch)
            if not scores:
                self.shown[variant] = Shown(run, step, evaluation, scored.pictures)
            shown = scored.measured.scores.filter(pl.col("strength") == shown_strength(evaluation))
            scores.append(numbered_prompts(shown, evaluation.prompts))
        return scores

    def _order(self, judged: Judged | None, before: float, fraction: float) -> list[int]:
        """Return the judged variants in the order in which they go on, the best first."""
        if judged is None:
            return []
        # Early pictures show nothing of the concept, and the held-out images' losses do: see docs/sweeps.md.
        is_measured = self.recipe.training.validate_every > 0 and shares_loss(self.settings.keys)
        if self.settings.judge == "evaluation" and not is_measured:
            return list(judged.standings)

        try:
            losses = {
                variant: pl.concat(self._expected_losses(variant, before, fraction))
                for variant in sorted(judged.standings)
            }
        except SweepError:
            # A run that was trained before may have no losses of these steps.
            return list(judged.standings)
        broken = {variant: each.broken for variant, each in judged.standings.items() if each.broken}
        costs = {variant: self._cost(variant, fraction) for variant in losses}
        return list(judge(losses, costs, broken).standings)

    def _expected_losses(self, variant: int, before: float, fraction: float) -> list[pl.DataFrame]:
        """Return the losses that each run of a variant has at the next rung if they go on falling."""
        fractions = rungs(self.settings.halving)
        later = fractions[fractions.index(fraction) + 1]
        # A low rate is behind a high one at first, and often ahead of it at the end.
        ahead = (later - fraction) / (fraction - before)
        pairs = zip(self._losses(variant, fraction), self._losses(variant, before), strict=True)
        return [expected_cells(now, earlier, ahead=ahead) for now, earlier in pairs]

    def _promoted(self, alive: Sequence[int], ranked: Sequence[int], fraction: float) -> list[int]:
        """Return the variants that go on to the next rung, in their order."""
        halving = self.settings.halving
        assert halving is not None, "without halving, the first rung is the last one"
        # Variants that are further already cost nothing.
        unjudged = [variant for variant in alive if variant not in ranked]
        kept = ranked[: max(0, num_kept(halving.keep, len(alive)) - len(unjudged))]

        fractions = rungs(halving)
        later = fractions[fractions.index(fraction) + 1]
        reserve = max((self._steps(variant, later, 1.0) for variant in kept), default=0)
        costs = [self._steps(variant, fraction, later) for variant in kept]
        number = max(1, affordable(costs, left=self._limit_steps() - self.spent - reserve))
        if number < len(kept):
            self.log(f"{NOTE}the budget allows {number:,} of {counted(len(kept), 'variant')} to go on")
        return sorted([*unjudged, *kept[:number]])

    def _steps(self, variant: int, start: float, end: float) -> int:
        return sum(run.step_at(end) - run.step_at(start) for run in self.runs[variant])

    def _limit_steps(self) -> float:
        """Return the budget in steps; infinite without one, and until the time of a step is known."""
        budget = self.settings.budget
        if budget is None:
            return math.inf
        if budget.steps is not None:
            return budget.steps
        runs = [run for of_variant in self.runs.values() for run in of_variant]
        seconds, steps = sum(run.seconds() for run in runs), sum(run.num_trained() for run in runs)
        return 60.0 * (budget.minutes or 0.0) * steps / seconds if seconds else math.inf

    def _has_budget_for(self, variant: int, fraction: float) -> bool:
        reserve = max(self._steps(each, fraction, 1.0) for each in self.runs)
        return self.spent + self._steps(variant, 0.0, fraction) + reserve <= self._limit_steps()

    def _require_budget(self, fraction: float) -> None:
        budget = self.settings.budget
        if budget is None or budget.steps is None or not self.runs:
            return
        first = sum(self._steps(variant, 0.0, fraction) for variant in self.runs)
        needed = first + max(self._steps(variant, fraction, 1.0) for variant in self.runs)
        if needed > budget.steps:
            what = (
                f"of {budget.steps:,} steps is too small: {counted(len(self.runs), 'variant')} to the first "
                f"rung and one of them to its end are {needed:,} steps"
            )
            raise _budget_error(self.recipe, what)

    def _add(self, rows: Sequence[Row]) -> None:
        """Add rows to the table. Two rungs of a short run may be the same step, which has one row."""
        names = ("variant", "seed", "step")
        for row in rows:
            same = [each for each in self.rows if all(each[name] == row[name] for name in names)]
            for each in same:
                self.rows.remove(each)
            self.rows.append({**row, "steps": row["steps"] + sum(each["steps"] for each in same)})

    def _rows(
        self, variant: int, judged: Judged | None, before: float, fraction: float, *, promoted: bool
    ) -> list[Row]:
        standing = None if judged is None else judged.standings.get(variant)
        error = self.failed.get(variant)
        rows: list[Row] = []
        for run in self.runs[variant]:
            start, end = run.step_at(before), run.step_at(fraction)
            rows.append(
                {
                    "variant": variant,
                    "seed": run.seed,
                    "overrides": self._overrides(variant),
                    "run": run.job.run,
                    "step": end,
                    "score": standing and standing.score.mean,
                    "behind": standing and standing.behind.mean,
                    "low": standing and standing.behind.low,
                    "high": standing and standing.behind.high,
                    "promoted": promoted,
                    "steps": max(0, min(end, run.num_trained()) - start),
                    "error": error and error.what,
                }
            )
        return rows

    def _unplanned_row(self, variant: Variant) -> Row:
        nothing = dict.fromkeys(("score", "behind", "low", "high"))
        return {
            "variant": variant.number,
            "seed": variant.recipes[0].training.seed,
            "overrides": self._overrides(variant.number),
            "run": "",
            "step": 0,
            **nothing,
            "promoted": False,
            "steps": 0,
            "error": self.failed[variant.number].what,
        }

    def _overrides(self, variant: int) -> str:
        return json.dumps(self.variants[variant - 1].overrides, ensure_ascii=False)


_NO_DECISION = Decision(None, False, "not decided: no variant could be judged at the end of its steps")


def _budget_error(recipe: Recipe, what: str) -> SweepError:
    return SweepError(
        f"the budget {what}",
        where=f"{recipe.source}, sweep.budget",
        fix="raise sweep.budget, remove values, or lower sweep.halving.first",
    )


def _report(running: _Sweep, decision: Decision, table: pl.DataFrame) -> dict[str, Any]:
    recipe, names = running.recipe, running.names
    planned = [sum(run.steps for run in runs) for runs in running.runs.values()]
    last = table.sort("step").unique("variant", keep="last").sort("variant")
    winner = decision.winner
    return {
        "samples": len(running.variants),
        "variants": [
            {
                "variant": row["variant"],
                "settings": overrides_text(json.loads(row["overrides"])),
                **{name: row[name] for name in ("run", "step", "score", "behind", "low", "high")},
                "error": row["error"],
            }
            for row in last.iter_rows(named=True)
        ],
        "winner": winner,
        "winner_run": None if winner is None else running.runs[winner][0].job.run,
        "winner_overrides": None if winner is None else dict(running.variants[winner - 1].overrides),
        "decided": decision.decided,
        "why": decision.why,
        "tied": list(decision.tied),
        "failed": len(running.failed),
        "errors": {names[variant]: error.text() for variant, error in running.failed.items()},
        "judge": running.settings.judge,
        "rungs": list(rungs(running.settings.halving)),
        "steps": int(table["steps"].sum()),
        "steps_of_all": sum(planned),
        "recipe": recipe.name,
    }
