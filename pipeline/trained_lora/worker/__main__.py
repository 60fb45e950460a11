"""`python -m pipeline.trained_lora.worker <order.json>`: one process of a training run.

It ends with its parent: Dagster's step or `latentline train` for a single process, accelerate's launcher for
one of several. If the parent dies, the process saves a checkpoint if it can do so in time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pipeline.processes.guard import end_now, watch_parent
from pipeline.processes.pipes import reporter
from pipeline.trained_lora.worker.stop_request import STOPPED_STATUS, stop_on_signals, stop_orphan

COMPILED = "compiled"
"""Folder of the compiled blocks of all trainings, in the scratch folder."""


def main(path: Path) -> None:
    """Train; exit with status 143 after a stop request, once a checkpoint is saved.

    A training that ends at its job's `stop_after` has the status 0.
    """
    watch_parent(on_death=stop_orphan)
    with reporter() as report:
        # Imports below `reporter` and not at the top, so that an import error reaches the run's log.
        from pipeline.cache.pack_copies import CopySettings
        from pipeline.cache.packs import PACKS
        from pipeline.processes.launch import cpu_threads
        from pipeline.recipe import project_root
        from pipeline.recipe.deployment import load_deployment, scratch_folder
        from pipeline.trained_lora.attention_backends import refuse_variable
        from pipeline.trained_lora.job import read_job
        from pipeline.trained_lora.run_folder import RunLayout
        from pipeline.trained_lora.worker import startup

        max_copied_bytes = round(load_deployment().pack_copies_gb * 1e9)
        copies = CopySettings(scratch_folder(project_root()) / PACKS, max_copied_bytes)
        job = read_job(path, copies=copies)

        refuse_variable(os.environ)

        # torch's default, the temporary folder, is lost with a container or at a restart. A resumed run would
        # compile its blocks again.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(scratch_folder(project_root()) / COMPILED))
        startup.Startup(job, report.phase).begin(startup.IMPORTS)

        from pipeline.processes.worker.imports import quick_imports

        with quick_imports():
            import torch

            from pipeline.models.worker.loading import import_base_classes

            # Before other imports of diffusers and transformers, which print hints.
            import_base_classes()
            from pipeline.processes.worker.devices import used_memory_text
            from pipeline.processes.worker.machine_watch import machines_watched
            from pipeline.trained_lora.worker.loop import train

        report.lines.memory = used_memory_text
        torch.set_num_threads(cpu_threads())
        stop_request = RunLayout(job.folder).stop_request
        with machines_watched(), stop_on_signals(stop_request) as stop:
            finished = train(job, report, stop)
        if not finished:
            raise SystemExit(STOPPED_STATUS)


def import_libraries() -> None:
    """Import what every training needs, and nothing that uses a GPU."""
    from pipeline.models.worker import loading

    loading.import_libraries(
        "accelerate", "pipeline.trained_lora.job", without_gpu=["pipeline.trained_lora.worker.loop"]
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_now(0)
