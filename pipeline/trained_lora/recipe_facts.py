"""Recipe keys that decide the weights of a run, and whether a finished run has a recipe's values.

A run decides this before it imports anything large, so this module imports little.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.storage.addresses import Url
from pipeline.trained_lora.run_folder import RunLayout, read_record

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

Facts = dict[str, Any]
"""Nested, JSON-serializable facts."""

ALWAYS_PRESENT = object()
"""Default of a fact that the first runs have whatever its value is."""


class RecipeFact(NamedTuple):
    """A recipe key with its place in the facts.

    Attributes:
        name: Dotted name of the fact.
        key: Dotted name of the recipe key, outside of lists.
        default: Value at which the fact is absent.
        since: First release with this key.
    """

    name: str
    key: str
    default: Any = ALWAYS_PRESENT
    since: str = "0.2.0"


RECIPE_FACTS = (
    RecipeFact("plan.seed", "training.seed"),
    RecipeFact("plan.batch_size", "training.batch_size"),
    RecipeFact("plan.gradient_accumulation", "training.gradient_accumulation"),
    RecipeFact("plan.num_processes", "accelerate.num_processes"),
    RecipeFact("plan.caption_dropout", "text.caption_dropout"),
    RecipeFact("plan.underfilled", "buckets.underfilled"),
    RecipeFact("loss.kind", "training.loss.kind"),
    RecipeFact("loss.delta", "training.loss.delta"),
    RecipeFact("loss.weighting", "training.loss.weighting"),
    RecipeFact("loss.gamma", "training.loss.gamma"),
    RecipeFact("loss.timesteps.density", "training.timesteps.density"),
    RecipeFact("loss.timesteps.location", "training.timesteps.location"),
    RecipeFact("loss.timesteps.scale", "training.timesteps.scale"),
    RecipeFact("loss.timesteps.mode_scale", "training.timesteps.mode_scale"),
    RecipeFact("loss.timesteps.min", "training.timesteps.min"),
    RecipeFact("loss.timesteps.max", "training.timesteps.max"),
    RecipeFact("loss.timesteps.shift", "training.timesteps.shift"),
    RecipeFact("noise.offset", "training.noise.offset"),
    RecipeFact("noise.input_perturbation", "training.noise.input_perturbation"),
    RecipeFact("noise.zero_terminal_snr", "training.noise.zero_terminal_snr"),
    RecipeFact("guidance", "training.guidance", default=1.0, since="0.4.0"),
    RecipeFact("optimizer.kind", "training.optimizer"),
    RecipeFact("optimizer.arguments", "training.optimizer_arguments"),
    RecipeFact("optimizer.learning_rate", "training.learning_rate"),
    RecipeFact("optimizer.max_grad_norm", "training.max_grad_norm"),
    RecipeFact("optimizer.ema_decay", "training.ema_decay"),
    RecipeFact("schedule.kind", "training.lr_scheduler"),
    RecipeFact("schedule.warmup_steps", "training.warmup_steps"),
    RecipeFact("lora.rank", "training.lora.rank"),
    RecipeFact("lora.alpha", "training.lora.alpha"),
    RecipeFact("lora.kind", "training.lora.kind"),
    RecipeFact("lora.dropout", "training.lora.dropout"),
    RecipeFact("lora.targets", "training.lora.targets"),
    RecipeFact("lora.modules", "training.lora.modules"),
    RecipeFact("lora.conv_rank", "training.lora.conv_rank"),
    RecipeFact("lora.conv_alpha", "training.lora.conv_alpha"),
    RecipeFact("lora.ranks", "training.lora.ranks"),
    RecipeFact("lora.dora", "training.lora.dora"),
    RecipeFact("lora.rslora", "training.lora.rslora"),
    RecipeFact("lora.init", "training.lora.init"),
    RecipeFact("lora.text_encoders", "training.lora.text_encoders", default=None),
    RecipeFact("lora.rank_dropout", "training.lora.rank_dropout", default=0.0, since="0.4.0"),
    RecipeFact("lora.module_dropout", "training.lora.module_dropout", default=0.0, since="0.4.0"),
    RecipeFact("lora.scale_weight_norms", "training.lora.scale_weight_norms", default=None, since="0.4.0"),
    RecipeFact("lora.timestep_ranks", "training.lora.timestep_ranks", default=None, since="0.4.0"),
    RecipeFact("lora.learning_rates", "training.lora.learning_rates", default=[], since="0.3.0"),
    RecipeFact("lora.loraplus_ratio", "training.lora.loraplus_ratio", default=None, since="0.3.0"),
    RecipeFact("lora.save_dtype", "training.lora.save_dtype", default="float32", since="0.3.0"),
    RecipeFact("lora.native_file", "training.lora.native_file", default=False, since="0.4.0"),
    RecipeFact("compile", "training.compile"),
    RecipeFact("attention_backend", "training.attention_backend", default="native", since="0.4.0"),
)
"""Recipe keys that decide the weights by their value; other keys are in `DERIVED_KEYS`.

A key that is added gets the release as `since`, and as `default` the value with which a run trains as before.
The fact is absent at this value, so that the runs of earlier releases keep their ids.
"""

_COMPUTED_FACTS = ("plan.caption_dropout", "loss.timesteps.shift")
"""Facts of recipe keys that `run_facts` replaces by computed ones."""


def will_train(recipe: Recipe) -> bool:
    """Return whether no finished run has the recipe's settings, so that its job trains if no gate closes.

    Only small files are read: images and captions may have changed although this returns False.
    """
    # The working copy of outputs at an address may lack runs.
    if isinstance(recipe.output_address, Url):
        return False
    values = recipe.model_dump(mode="json")
    for facts_file in (recipe.output_dir / "runs").glob("*/run.json"):
        layout = RunLayout(facts_file.parent)
        facts = read_record(facts_file)
        if all(_has_fact(facts, fact, values) for fact in RECIPE_FACTS):
            # The steps of epochs depend on the samples.
            finished, steps = read_record(layout.finished), recipe.training.steps
            if finished and (steps is None or steps <= finished["steps"]):
                return False
    return True


def _has_fact(facts: Facts, fact: RecipeFact, values: Mapping[str, Any]) -> bool:
    """Return whether a run may have been trained with the recipe's value; computed facts are not compared."""
    value: Any = values
    for name in fact.key.split("."):
        value = value[name]
    trained: Any = facts
    for name in fact.name.split("."):
        trained = trained.get(name, {})
    return trained in (value, {}) or fact.name in _COMPUTED_FACTS
