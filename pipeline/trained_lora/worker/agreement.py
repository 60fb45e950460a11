"""A comparison of the machines of a training before its first step.

Each machine reads its own order, base model and packages. If they differed, the processes would compute
different gradients, or wait for each other forever.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from accelerate.utils import gather_object

from pipeline.errors import TrainingError
from pipeline.models.diffusers_folder import weight_files
from pipeline.processes.machines import machines_of_this_process

if TYPE_CHECKING:
    from pipeline.models.worker.family import WorkerFamily
    from pipeline.trained_lora.job import TrainingJob

_PACKAGES = ("latentline", "accelerate", "diffusers", "peft", "torch", "transformers")

_FIX = (
    "use the same environment, base model and order on all machines, for example from a shared disk, and "
    "start the same commands again"
)


def require_agreement(job: TrainingJob, family: WorkerFamily) -> None:
    """Raise TrainingError if a machine trains another run, or with other packages or weights.

    Every rank calls it. Weights are compared by the names and sizes of their files. Processes of a single
    machine are not compared.
    """
    machines = machines_of_this_process()
    if machines.number == 1:
        return
    gathered: list[tuple[int, dict[str, str]]] = gather_object([(machines.rank, _facts(job, family))])
    _, expected = gathered[0]
    for rank, facts in gathered:
        for name, value in facts.items():
            if value != expected[name]:
                raise TrainingError(
                    f"{name} on machine {rank} must be {expected[name]}, as on machine 0, got {value}",
                    where=f"machine {rank} of {machines.number}",
                    fix=_FIX,
                )


def _facts(job: TrainingJob, family: WorkerFamily) -> dict[str, str]:
    weights = weight_files(family.model.component(family.denoiser_name))
    sizes = [f"{path.name} ({path.stat().st_size} bytes)" for path in weights]
    return {
        "the run": job.run,
        "the number of steps": str(job.recipe.training.num_steps),
        f"the {family.denoiser_name}": ", ".join(sizes),
        **{f"the version of {name}": version(name) for name in _PACKAGES},
    }
