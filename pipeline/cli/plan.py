"""`latentline plan`: forecast the next job: what it would encode and train, why, how long, and its memory."""

from __future__ import annotations

import sys
from dataclasses import asdict

import click

from pipeline.cli.conventions import RECIPE_WITH_OUTPUTS, bytes_text, echo, log_to_stderr, seconds_text
from pipeline.cli.json_output import give, json_option
from pipeline.errors import ModelError, counted
from pipeline.maintenance.diagnosis_forecast import DiagnosisForecast
from pipeline.maintenance.expected import Expected
from pipeline.maintenance.forecast import Forecast, forecast
from pipeline.maintenance.picture_forecast import PictureForecast
from pipeline.maintenance.sweep_forecast import SweepForecast
from pipeline.maintenance.training_forecast import TrainingForecast
from pipeline.memory.forecast import forecast_memory
from pipeline.memory.gpus import GPUS, gpu_named
from pipeline.memory.job import Change, ComputedTimes, MemoryForecast
from pipeline.recipe import Recipe
from pipeline.recipe.check_specs import PATH_ISOLATION
from pipeline.storage.tables import Tables
from pipeline.trained_lora.duration import Duration

MAX_NAMED = 3
"""Maximum number of samples named per reason."""

GIB = 2**30


@click.command(short_help="Preview what the next job would do, its time and memory.")
@click.argument("recipe", type=RECIPE_WITH_OUTPUTS)
@json_option("Print the forecast as JSON, with all samples instead of a few.")
@click.option(
    "--vram",
    type=click.FloatRange(min=1.0),
    metavar="GB",
    help="Memory of the GPU to plan for, such as 24. By default, the memory of this machine's GPU.",
)
@click.option(
    "--card",
    type=click.Choice([gpu.name for gpu in GPUS], case_sensitive=False),
    metavar="GPU",
    help=f"GPU to plan for, with its memory and computed times: {', '.join(gpu.name for gpu in GPUS)}.",
)
@click.option(
    "--price",
    type=click.FloatRange(min=0.0),
    metavar="PER_HOUR",
    help="Price of this machine per hour, such as 2.5, to show what the job would cost.",
)
@click.option(
    "--continue",
    "continue_run",
    metavar="RUN",
    help="Show the job of latentline run --continue: a folder name in runs/, or latest.",
)
@click.option("--no-memory", is_flag=True, help="Omit the memory forecast, which takes some seconds.")
@click.option(
    "--only-memory",
    is_flag=True,
    help="Forecast memory only. This downloads configuration files of the base model, but no weights.",
)
def command(  # noqa: PLR0913 - an argument for each option
    recipe: Recipe,
    *,
    as_json: bool,
    vram: float | None,
    card: str | None,
    price: float | None,
    continue_run: str | None,
    no_memory: bool,
    only_memory: bool,
) -> None:
    """Show what the next job of RECIPE would encode and train, why, how long it takes, and its memory.

    Training either starts a new run, resumes one, publishes a LoRA that a checkpoint has saved, or has
    nothing to do. For a new run, the changed samples and settings are named. The time is estimated from the
    last training of the recipe on this machine, or else of its base model.

    A gate is a check that can stop the job. If one would, it is shown first with its fix, and the exit status
    is 1. Warnings are shown before any work too.

    To find out which images would be kept, new and changed ones are decoded. Nothing is encoded. A base model
    from the Hub is downloaded if it is not on this machine, because cache entries are identified by hashes of
    its weights. Only these hashes are stored, as fingerprints.json in cache_dir.

    The memory forecast is computed from the base model's configuration and needs no GPU. If training does not
    fit, the forecast names the cheapest changes that make it fit. For some GPUs, the time of a training step
    and of encoding latents is computed too.
    """
    if no_memory and only_memory:
        raise click.UsageError("--no-memory and --only-memory exclude each other.")
    if vram is not None and card is not None:
        raise click.UsageError("--vram and --card exclude each other.")
    if only_memory:
        memory = forecast_memory(recipe, card_bytes=_card_bytes(vram, card), card=card)
        if as_json:
            give({"memory": asdict(memory)})
        else:
            show_memory(memory)
            show_times(memory.times, recipe.accelerate.num_processes, steps=recipe.training.steps)
        return

    # If paths overlap, the forecast stops before it reads the datasets, and has nothing but this gate.
    tables = Tables(recipe.output_dir, log=log_to_stderr)
    result = forecast(recipe, tables, continue_run=continue_run, log=log_to_stderr)
    is_isolated = not any(gate.name == PATH_ISOLATION.name for gate in result.closed)
    memory = _memory(recipe, vram, card) if is_isolated and not no_memory else None
    if as_json:
        values = {**_as_json(result), **_cost(result, price)}
        give({**values, "memory": None if memory is None else asdict(memory)})
    elif not is_isolated:
        echo(f"{recipe.name}: the job would stop at {result.closed[0].asset}, before any work:")
        _show_gates(result)
    else:
        _show(recipe, result)
        _show_total(result, price)
        if memory is not None:
            show_memory(memory)
            steps = None if result.training is None else result.training.action.steps_left
            processes = recipe.accelerate.num_processes
            show_times(memory.times, processes, images=result.latents.to_make, steps=steps)
    if result.closed:
        sys.exit(1)


def _card_bytes(vram: float | None, card: str | None) -> int | None:
    gpu = gpu_named(card)
    gigabytes = vram if gpu is None else gpu.gigabytes
    return None if gigabytes is None else int(gigabytes * GIB)


def _memory(recipe: Recipe, vram: float | None, card: str | None) -> MemoryForecast | None:
    # A forecast of entries is useful without a forecast of memory, so this error does not end the command.
    try:
        return forecast_memory(recipe, card_bytes=_card_bytes(vram, card), card=card)
    except ModelError as err:
        log_to_stderr(f"{err.what}; {err.fix}")
        return None


def _show(recipe: Recipe, result: Forecast) -> None:
    echo(f"{recipe.name}: {_samples_text(result)}")
    if result.closed:
        echo(f"the job would stop at {result.closed[0].asset}, before anything is encoded:")
        _show_gates(result)
        echo("If you fix or allow this, the job will do the following for the samples kept now:")
    if result.captions is not None:
        _show_expected("captions", result.captions)
    _show_expected("vae_latents", result.latents)
    for name, expected in result.side_inputs.items():
        _show_expected(name, expected)
    _show_expected("text_embeddings", result.text)
    if result.diagnosis is not None:
        _show_diagnosis(result.diagnosis)
    if result.training is not None:
        _show_training(result.training)
    if result.evaluation is not None:
        _show_pictures(result.evaluation)
    if result.sweep is not None:
        _show_sweep(result.sweep)
    _show_warnings(result)


def _show_training(training: TrainingForecast) -> None:
    action = training.action
    echo(f"{'trained_lora':16} {action.work}: {action.state}")
    for line in action.reason.split("; ") if action.reason else ():
        echo(f"{'':16} {line}")
    if action.steps_left:
        echo(f"{'':16} {_duration_text(training.duration)}")


def _duration_text(duration: Duration | None) -> str:
    if duration is None:
        return "time unknown until a training of this base model has run on this machine"
    return f"about {seconds_text(duration.seconds)}, estimated from {duration.basis}"


def _show_warnings(result: Forecast) -> None:
    for each in result.warnings:
        echo(f"warning: {each.asset}, {each.name}: {each.summary}")
        echo(f"  fix: {each.fix}")
    for text in result.training.warnings if result.training is not None else ():
        echo(f"warning: {text}")
    if result.pending_captions:
        captions = counted(result.pending_captions, "caption is", "captions are")
        echo(f"{captions} not written yet: the job checks them, and may encode more texts than counted here")
    if result.unknown_lengths:
        captions = counted(result.unknown_lengths, "caption")
        echo(f"the length of {captions} in tokens is unknown: the cache job warns if some are too long")


def _cost(result: Forecast, price: float | None) -> dict[str, float | None]:
    """Return the time of the whole job in seconds, and with a price its cost; None if they are unknown."""
    captions = [] if result.captions is None else [result.captions]
    works = [*captions, result.latents, *result.side_inputs.values(), result.text]
    training = result.training.duration if result.training is not None else None
    parts = [*(each.seconds for each in works), training and training.seconds]
    known = [part for part in parts if part is not None]
    seconds = sum(known) if len(known) == len(parts) else None
    cost = None if seconds is None or price is None else seconds / 3600 * price
    return {"seconds": seconds, **({} if price is None else {"cost": cost})}


def _show_total(result: Forecast, price: float | None) -> None:
    if result.training is None or (result.training.action.steps_left == 0 and price is None):
        return
    total = _cost(result, price)
    if total["seconds"] is None:
        echo("whole job: time and cost are unknown, because one of the times above is")
        return
    text = f"whole job: about {seconds_text(total['seconds'])}"
    cost = total.get("cost")
    echo(text if cost is None else f"{text}, {cost:,.2f} at {price:g} per hour")


def _as_json(result: Forecast) -> dict[str, object]:
    values = asdict(result)
    side_inputs = values.pop("side_inputs")
    return {
        **values,
        **side_inputs,
        **{f"{name}_to_make": expected.to_make for name, expected in result.side_inputs.items()},
        "closed": [gate._asdict() for gate in result.closed],
        "warnings": [each._asdict() for each in result.warnings],
        "latents_to_make": result.latents.to_make,
        "text_to_make": result.text.to_make,
    }


def _samples_text(result: Forecast) -> str:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(result.rejected.items()))
    text = f"{counted(result.samples, 'sample')} kept, {sum(result.rejected.values()):,} rejected"
    text += f" ({reasons})" if reasons else ""
    return text + (f", {len(result.gone):,} removed since the last run" if result.gone else "")


def _show_gates(result: Forecast) -> None:
    for gate in result.closed:
        echo(f"  {gate.name}: {gate.summary}")
        for line in gate.fix.splitlines():
            echo(f"    fix: {line}")


def _show_expected(asset: str, expected: Expected) -> None:
    line = f"{asset:16} {expected.there:>9,} to reuse {expected.to_make:>9,} to encode"
    if expected.to_make:
        duration = "time unknown until the first entries are encoded on this machine"
        if expected.seconds is not None:
            duration = f"about {seconds_text(expected.seconds)}"
            duration += "" if expected.kind == "masks" else " plus the start of the encoder"
        line += f"   {bytes_text(expected.num_bytes)}, {duration}"
    echo(line)

    for reason, names in sorted(expected.reasons.items(), key=lambda item: -len(item[1])):
        shown = ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")
        echo(f"    {reason}: {len(names):,} ({shown})")


def _show_diagnosis(diagnosis: DiagnosisForecast) -> None:
    line = f"{'diagnosis':16} {diagnosis.there:>9,} to reuse {diagnosis.to_measure:>9,} to measure"
    if diagnosis.to_measure:
        line += f"   {diagnosis.least_passes:,} to {diagnosis.most_passes:,} forward passes, "
        duration = "time unknown until the first captions are measured on this machine"
        if diagnosis.seconds is not None:
            duration = f"about {seconds_text(diagnosis.seconds)} plus the start"
        line += duration
    echo(line)


def _show_pictures(pictures: PictureForecast) -> None:
    prompts = counted(pictures.prompts, "prompt")
    line = f"{'evaluation':16} {pictures.pictures:>9,} pictures at most: {prompts}, "
    line += f"{pictures.pictures_per_prompt} each, for the base model and {counted(pictures.steps, 'step')}"
    duration = "time unknown until the first pictures are drawn on this machine"
    if pictures.seconds is not None:
        duration = f"about {seconds_text(pictures.seconds)} plus the start"
    echo(f"{line}; {duration}")
    if pictures.publishes:
        echo(f"{'':16} {pictures.publishes}")


def _show_sweep(sweep: SweepForecast) -> None:
    share = sweep.steps / sweep.steps_of_all
    line = (
        f"{'sweep':16} {counted(sweep.variants, 'variant')}: {sweep.steps:,} of {sweep.steps_of_all:,} steps "
    )
    line += f"({share:.0%}), less those that earlier sweeps have trained; "
    duration = "time unknown until a training of this base model has run on this machine"
    if sweep.seconds is not None:
        duration = f"about {seconds_text(sweep.seconds)} plus starts, pictures and scores"
    echo(line + duration)
    if sweep.disk_bytes is not None:
        echo(f"{'':16} checkpoints of about {bytes_text(sweep.disk_bytes)}")


def show_memory(memory: MemoryForecast) -> None:
    """Print the peak memory of each stage, whether training fits, and the changes that make it fit."""
    echo(f"{'memory, computed':20} {'GPU':>10} {'host':>10}")
    for stage in memory.stages:
        note = f"   {stage.note}" if stage.note else ""
        echo(f"  {stage.stage:18} {_gib(stage.device_bytes):>10} {_gib(stage.host_bytes):>10}{note}")

    if memory.card is None or memory.usable_bytes is None:
        echo("This machine has no GPU; compare with one by --vram 24 or --card H100.")
    elif memory.change is None:
        echo(f"Training fits into {memory.card}: about {_gib(memory.usable_bytes)} of it are usable.")
    else:
        usable = _gib(memory.usable_bytes)
        echo(f"Training does not fit into {memory.card}: about {usable} of it are usable.")
        _show_change(memory.change)
    _show_host(memory)


def show_times(
    times: ComputedTimes | None, num_processes: int, *, images: int | None = None, steps: int | None = None
) -> None:
    """Print computed times of a latent and a step, and of all `images` and `steps` if they are not None."""
    if times is None:
        return
    echo(f"time, computed for the {times.gpu} and images of {times.height_px} x {times.width_px} px")
    line = f"  {'encode latents':18} {times.latent_s:.2g} s per image"
    if images:
        line += f", {seconds_text(images * times.latent_s / num_processes)} for {counted(images, 'image')}"
    echo(line)

    if times.step_s is None:
        echo(f"  {'train':18} not computed with {times.not_counted}")
        return
    line = f"  {'train':18} {times.step_s:.2g} s per step"
    if steps:
        seconds, lowest, highest = (steps * times.step_s * each for each in (1, times.lowest, times.highest))
        line += f", {seconds_text(seconds)} for {counted(steps, 'step')}"
        line += f" (range {seconds_text(lowest)} to {seconds_text(highest)})"
    echo(line)
    ratios = f"{times.lowest:g} to {times.highest:g} times"
    echo(f"  measured and published steps took {ratios} as long as computed, see docs/hardware.md")


def _show_host(memory: MemoryForecast) -> None:
    stage = max(memory.stages, key=lambda stage: stage.host_bytes)
    if stage.host_bytes <= memory.machine_bytes:
        return
    needed, available = _gib(stage.host_bytes), _gib(memory.machine_bytes)
    echo(
        f"warning: {stage.stage} needs {needed} of the host's memory per process, but this machine has "
        f"{available}"
    )
    if stage.stage == "train":
        echo(
            "  fix: set training.quantize: int8 or nf4, keep more blocks on the GPU if training.offload is "
            "set, or use a machine with more memory"
        )
    else:
        echo("  fix: use a machine with more memory")


def _show_change(change: Change) -> None:
    if not change.settings:
        echo("  fix: lower buckets.resolution or training.lora.rank, or use a larger GPU")
        return
    changes = ", ".join(change.settings)
    if change.fits:
        echo(f"  cheapest change that fits: {changes} (about {_gib(change.device_bytes)})")
    else:
        echo(f"  least memory: {changes} (about {_gib(change.device_bytes)}), which does not fit either")
        echo("  fix: lower buckets.resolution or training.lora.rank, or use a larger GPU")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
