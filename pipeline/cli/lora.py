"""`latentline lora`: merge, resize, extract and inspect LoRA files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.conventions import bytes_text, echo, log_to_stderr
from pipeline.cli.json_output import give, json_option
from pipeline.errors import counted

if TYPE_CHECKING:
    from pipeline.lora_files.combine import Combined, Reduction
    from pipeline.lora_files.layers import Dtype
    from pipeline.lora_files.summary import LayerSummary

_PATH = click.Path(path_type=Path)
_NUM_LARGEST = 5

_RANK = click.option(
    "--rank", "max_rank", type=click.IntRange(1), help="Largest rank of a layer. By default unlimited."
)
_ENERGY = click.option(
    "--energy",
    type=click.FloatRange(0.0, 1.0, min_open=True),
    help="Reduce each layer to the smallest rank that keeps this part of its energy (sum of the squared "
    "singular values), such as 0.99.",
)
_DTYPE = click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Dtype of the new file. By default the most exact one of the files.",
)


@click.group(short_help="Merge, resize, extract or inspect LoRAs.")
def command() -> None:
    """Work with finished LoRA files, of Latentline or of another program.

    A FILE is a .safetensors file, the folder lora/, or the output folder of a recipe. It is only read. It may
    have the layout of diffusers, of kohya's tools or of ComfyUI, and a new file has the same layout.
    """


@command.command(short_help="Show the layers, ranks and metadata of a LoRA.")
@click.argument("file", type=_PATH)
@click.option("--layers", "list_layers", is_flag=True, help="List all layers.")
@json_option("Print everything as JSON.")
def info(file: Path, *, list_layers: bool, as_json: bool) -> None:
    """Show what a LoRA file contains.

    The norm of a layer is the Frobenius norm of what it adds to the weight. The last column is the rank that
    keeps 99% of a layer's energy: if it is far below the rank, the file can become smaller with resize.
    """
    from pipeline.lora_files.summary import summarize

    summary = summarize(file, log=log_to_stderr)
    if as_json:
        give(summary.as_json())
        return

    echo(f"{summary.path}: {bytes_text(summary.num_bytes)}, {summary.dtype}, matrices {summary.naming}")
    for name, text in summary.about.items():
        echo(f"  {name:<12} {text}")
    for network in dict.fromkeys(each.network for each in summary.layers):
        layers = [each for each in summary.layers if each.network == network]
        echo(f"{network}: {counted(len(layers), 'layer')}")
        echo(f"  rank         {_between([each.rank for each in layers])}")
        echo(f"  for 99%      {_between([each.rank_for_energy for each in layers])}")
        echo(f"  scale        {_between([each.scale for each in layers])}")
        echo(f"  norm         {_between([each.norm for each in layers])}")
    largest = sorted(summary.layers, key=lambda each: each.norm, reverse=True)
    echo("layers:" if list_layers else "largest layers:")
    for each in summary.layers if list_layers else largest[:_NUM_LARGEST]:
        echo(f"  {_layer_line(each)}")


@command.command(short_help="Add up several LoRAs.")
@click.argument("new_file", type=_PATH)
@click.option(
    "--add",
    "added",
    type=(_PATH, float),
    multiple=True,
    required=True,
    metavar="FILE WEIGHT",
    help="LoRA and the number that multiplies it. Repeat it for several.",
)
@click.option(
    "--block",
    "blocks",
    type=(_PATH, str, float),
    multiple=True,
    metavar="FILE PATTERN WEIGHT",
    help="Another number for the layers of FILE whose names match PATTERN, such as '*up_blocks*'. The last "
    "match decides.",
)
@_RANK
@_ENERGY
@_DTYPE
def merge(
    new_file: Path,
    *,
    added: tuple[tuple[Path, float], ...],
    blocks: tuple[tuple[Path, str, float], ...],
    max_rank: int | None,
    energy: float | None,
    dtype: Dtype | None,
) -> None:
    """Write NEW_FILE with the weighted sum of LoRAs, such as --add outputs/style 0.8 --add outputs/cat 1.0.

    The result has the same effect as all files together, each with its weight. The ranks add up. With --rank
    or --energy they are reduced, and the command shows what is lost.
    """
    from pipeline.lora_files.combine import Reduction, Term, combine

    unknown = [str(file) for file, *_ in blocks if file not in {path for path, _ in added}]
    if unknown:
        raise click.UsageError(f"--block names {unknown[0]}, which no --add names.")
    terms = [
        Term(path, weight, [(pattern, number) for file, pattern, number in blocks if file == path])
        for path, weight in added
    ]
    reduction = Reduction(max_rank, energy)
    _report(combine(terms, new_file, reduction=reduction, dtype=dtype, log=log_to_stderr), reduction)


@command.command(short_help="Reduce the ranks of a LoRA.")
@click.argument("file", type=_PATH)
@click.argument("new_file", type=_PATH)
@_RANK
@_ENERGY
@_DTYPE
def resize(
    file: Path, new_file: Path, *, max_rank: int | None, energy: float | None, dtype: Dtype | None
) -> None:
    """Write NEW_FILE with the closest LoRA of smaller ranks.

    --rank limits all layers. --energy chooses the rank of each layer. With both, the smaller one counts.
    """
    from pipeline.lora_files.combine import Reduction, Term, combine

    if max_rank is None and energy is None:
        raise click.UsageError("Pass --rank, --energy or both.")
    reduction = Reduction(max_rank, energy)
    _report(combine([Term(file)], new_file, reduction=reduction, dtype=dtype, log=log_to_stderr), reduction)


@command.command(short_help="Extract a LoRA from two models.")
@click.argument("base")
@click.argument("tuned")
@click.argument("new_folder", type=_PATH)
@click.option("--rank", type=click.IntRange(1), default=32, show_default=True, help="Rank of each layer.")
@click.option(
    "--targets",
    type=click.Choice(["attention", "blocks"]),
    default="blocks",
    show_default=True,
    help="Layers of the LoRA: the linear layers of every attention, or all linear layers of the repeated "
    "blocks.",
)
@click.option(
    "--conv-rank", type=click.IntRange(1), help="Rank of convolutions, which are left out otherwise."
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Dtype of the new files.",
)
def extract(base: str, tuned: str, new_folder: Path, **settings: Any) -> None:
    """Write a LoRA with the difference of two models to NEW_FOLDER, in three layouts.

    BASE is the model that TUNED was made from by fine-tuning or merging. Both are diffusers folders or Hub
    ids; convert-checkpoint makes a folder from a single file. The LoRA has the layers of the UNet or
    transformer, not of the text encoders, and the command shows which part of the difference it has.
    """
    from pipeline.lora_files.extract import Extraction
    from pipeline.lora_files.extract import extract as extract_lora

    result = extract_lora(base, tuned, new_folder, Extraction(**settings))
    layer, least = result.least
    echo(f"wrote {new_folder}: {counted(result.num_layers, 'layer')} of rank {settings['rank']}")
    echo(
        f"  energy kept: {result.energy:.2%} of the change of these layers, at least {least:.2%}, in {layer}"
    )
    if result.outside:
        echo(
            f"  {result.outside:.2%} of the change is in other layers, most of it in {result.largest_outside}"
        )
    echo("  the files were read back and hold the same numbers")
    give({"folder": new_folder, **asdict(result)})


def _report(result: Combined, reduction: Reduction) -> None:
    give(asdict(result))
    size = bytes_text(result.path.stat().st_size)
    layers = counted(len(result.ranks), "layer")
    echo(f"wrote {result.path}, {size}: {layers} of rank {_between(list(result.ranks.values()))}")
    if reduction.max_rank is not None or reduction.energy is not None:
        key = min(result.energies, key=result.energies.__getitem__)
        mean = sum(result.energies.values()) / len(result.energies)
        echo(f"  energy kept: {mean:.2%} on average, at least {result.energies[key]:.2%}, in {key}")
        echo("  the file was read back: its only error is the energy that was cut off")
    else:
        echo(f"  the file was read back: every layer is within {result.error:.2g} of the exact sum")


def _between(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _layer_line(each: LayerSummary) -> str:
    return (
        f"{each.norm:8.4g}  rank {each.rank}, {each.rank_for_energy} for 99%  "
        f"{'x'.join(map(str, each.shape))}  {each.key}"
    )
