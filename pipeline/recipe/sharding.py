"""Rules of `accelerate.shard`, which compare it with keys of `training`."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.recipe.settings import Violation
from pipeline.recipe.training import TrainingSettings


def shard_violations(num_processes: int, training: TrainingSettings) -> Iterator[Violation]:
    """Yield the settings that a sharded base model does not work with."""
    if num_processes < 2:
        what = f"shard: true requires num_processes of at least 2, got {num_processes}"
        fix = "set accelerate.num_processes to the number of GPUs, or remove shard"
        yield Violation("accelerate.shard", what, fix, ("accelerate",))

    lora = training.lora
    conflicts = (
        (training.offload != "none", f"training.offload: {training.offload}", "offload: none"),
        (training.quantize != "none", f"training.quantize: {training.quantize}", "quantize: none"),
        (training.compute != "none", f"training.compute: {training.compute}", "compute: none"),
        (training.compile, "training.compile: true", "compile: false"),
        (lora.dora, "training.lora.dora: true", "lora.dora: false"),
        (lora.starts_from_base_weights, f"training.lora.init: {lora.init}", "lora.init: kaiming"),
        (lora.text_encoders is not None, "training.lora.text_encoders", "lora.text_encoders: null"),
    )
    for is_conflict, setting, alternative in conflicts:
        if is_conflict:
            what = f"shard: true cannot be combined with {setting}"
            fix = f"remove accelerate.shard, or set training.{alternative}"
            yield Violation("accelerate.shard", what, fix, ("accelerate", "training"))
