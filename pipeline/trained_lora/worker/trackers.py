"""Experiment trackers of a training run, through the tracker classes of accelerate.

They are created here instead of by `Accelerator(log_with=...)`, which gives all of them the same project
name, and ends the training if one of them fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from PIL import Image

from pipeline.errors import TrainingError
from pipeline.recipe.trackers import LOGIN
from pipeline.trained_lora.provenance import shareable
from pipeline.trained_lora.run_folder import RunLayout

if TYPE_CHECKING:
    from pipeline.recipe.trackers import TrackerName
    from pipeline.trained_lora.job import TrainingJob

# accelerate declares `name`, `tracker` and `log_images` in no common class.
Tracker = Any

RUN_TAG = "latentline.run"
"""Tag of an MLflow run with the id of the training run, by which a resumed run finds it."""


class Trackers:
    """The started trackers of a run, in the process that writes its files; close them after use."""

    def __init__(self, job: TrainingJob, *, start: int, warn: Callable[[str], None]) -> None:
        """Start the trackers of a run that continues after `start` optimizer steps.

        Raises:
            TrainingError: A tracker does not start.
        """
        self._warn = warn
        self._started: list[Tracker] = []
        for name in job.recipe.training.trackers:
            try:
                self._started.append(_started(name, job, start=start))
            except Exception as err:
                self.close()
                login = f", check {LOGIN[name]}" if name in LOGIN else ""
                raise TrainingError(
                    f"the tracker {name} does not start: {err}",
                    where="training.trackers and training.tracker_arguments",
                    fix=f"follow the tracker's message{login}, or remove {name} from training.trackers",
                ) from err

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Log numbers of the run after `step` optimizer steps."""
        self._with_each(lambda tracker: tracker.log(dict(values), step=step))

    def log_previews(self, files: Sequence[Path], *, step: int) -> None:
        """Log the previews drawn after `step` optimizer steps."""
        self._with_each(lambda tracker: _log_pictures(tracker, files, step=step))

    def close(self) -> None:
        """Finish the runs of all trackers."""
        self._with_each(lambda tracker: tracker.finish())

    def _with_each(self, act: Callable[[Tracker], None]) -> None:
        for tracker in list(self._started):
            try:
                act(tracker)
            except Exception as err:
                # A server that fails for a minute must not end a training of hours. The run has its own logs.
                self._started.remove(tracker)
                self._warn(f"the tracker {tracker.name} failed and receives nothing more of this run: {err}")


def _started(name: TrackerName, job: TrainingJob, *, start: int) -> Tracker:
    """Return a started tracker that knows the settings of the run."""
    arguments = _arguments(name, job, start=start)
    if name == "mlflow":
        _choose_mlflow_run(job, arguments)
    tracker: Tracker = cast("Any", LOGGER_TYPE_TO_CLASS[name](**arguments))
    tracker.start()

    settings = shareable(job.recipe)
    if name == "tensorboard":
        # accelerate's tracker writes the settings to a second run in another folder, for every start.
        tracker.log({"settings": _as_code(settings)}, step=start)
    elif name == "mlflow":
        # MLflow refuses another value of a parameter, such as `checkpoint_every` of a resumed run.
        logged: Mapping[str, str] = tracker.tracker.data.params
        tracker.store_init_configuration({k: v for k, v in _flat(settings).items() if k not in logged})
    elif name in ("comet_ml", "aim", "clearml", "dvclive"):
        tracker.store_init_configuration(settings)
    if name == "comet_ml":
        tracker.tracker.set_name(_run_name(job))
    return tracker


def _arguments(name: TrackerName, job: TrainingJob, *, start: int) -> dict[str, Any]:
    """Return the arguments of a tracker's class; the recipe's arguments replace ours."""
    run_name, project, settings = _run_name(job), job.recipe.training.tracker_project, shareable(job.recipe)
    logs = RunLayout(job.folder).metrics.parent
    same_run = {"id": job.run, "resume": "allow"}
    ours: dict[str, dict[str, Any]] = {
        # `purge_step` hides the points that an earlier process logged after `start`, which come again.
        "tensorboard": {"run_name": logs.name, "logging_dir": str(job.folder)}
        | {"purge_step": start + 1 if start else 0},
        "wandb": {"run_name": project, "name": run_name, **same_run, "dir": str(logs), "config": settings},
        "swanlab": {"run_name": project, "name": run_name, **same_run}
        | {"log_dir": str(logs / "swanlab"), "config": settings},
        "trackio": {"run_name": project, "name": run_name, "resume": "allow", "config": settings},
        "mlflow": {"experiment_name": project, "run_name": run_name, "tags": {RUN_TAG: job.run}},
        # Comet's keys have at least 32 characters, and run ids 16.
        "comet_ml": {"run_name": project, "experiment_key": job.run * 2},
        "aim": {"run_name": run_name, "logging_dir": str(logs), "experiment": project},
        # Otherwise ClearML also records what TensorBoard's writer gets, and counts steps from the last one.
        "clearml": {"project_name": project, "task_name": run_name, "auto_connect_frameworks": False}
        | {"continue_last_task": 0 if start else False},
        # Otherwise DVCLive commits an experiment to the project's own Git repository.
        "dvclive": {"dir": str(logs / "dvclive"), "resume": start > 0}
        | {"save_dvc_exp": False, "dvcyaml": None},
    }
    return ours[name] | job.recipe.training.tracker_arguments.get(name, {})


def _run_name(job: TrainingJob) -> str:
    return f"{job.recipe.name}-{job.run}"


def _choose_mlflow_run(job: TrainingJob, arguments: dict[str, Any]) -> None:
    """Set MLflow's address, and `run_id` in the arguments if the address has a run of this training."""
    import mlflow  # pyright: ignore[reportMissingImports] - optional

    # accelerate's class has no argument for it.
    if address := arguments.pop("tracking_uri", None):
        mlflow.set_tracking_uri(address)
    runs = mlflow.search_runs(
        search_all_experiments=True,
        filter_string=f"tags.`{RUN_TAG}` = '{job.run}'",
        max_results=1,
        output_format="list",
    )
    for run in runs:
        arguments.setdefault("run_id", run.info.run_id)


def _log_pictures(tracker: Tracker, files: Sequence[Path], *, step: int) -> None:
    """Log pictures under a name for each number; accelerate has no method for some trackers."""
    if tracker.name in ("wandb", "swanlab"):
        tracker.log_images({"samples": [str(path) for path in files]}, step=step)
        return
    for number, path in enumerate(files):
        key = f"samples/{number:02d}"
        if tracker.name == "trackio":
            import trackio  # pyright: ignore[reportMissingImports] - optional

            tracker.log({key: trackio.Image(path)}, step=step)
        elif tracker.name == "comet_ml":
            tracker.tracker.log_image(str(path), name=key, step=step)
        elif tracker.name == "dvclive":
            tracker.tracker.log_image(f"{key}-step-{step:08d}.png", path)
        else:
            _log_pixels(tracker, key, path, step=step)


def _log_pixels(tracker: Tracker, key: str, path: Path, *, step: int) -> None:
    with Image.open(path) as file:
        picture = file.convert("RGB")
    if tracker.name == "tensorboard":
        tracker.log_images({key: np.asarray(picture)[None]}, step=step, dataformats="NHWC")
    elif tracker.name == "mlflow":
        import mlflow  # pyright: ignore[reportMissingImports] - optional

        mlflow.log_image(picture, key=key, step=step)
    else:
        tracker.log_images({key: picture}, step=step)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted key; lists are JSON."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = json.dumps(value) if isinstance(value, list) else value
    return flat


def _as_code(settings: Mapping[str, Any]) -> str:
    # Four spaces make a block of code in TensorBoard's Markdown.
    return "".join(f"    {line}\n" for line in json.dumps(settings, indent=2).splitlines())
