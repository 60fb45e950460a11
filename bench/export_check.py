"""`python -m bench.export_check`: CPU seconds of verifying an export, at the sizes of published models.

The denoisers have their published shapes, but base weights that take no memory, because the verification of a
LoRA does not read them. The LoRA has random numbers and the default modules of its family.

python -m bench.export_check                     all models
python -m bench.export_check SDXL --rank 32      one model, with another rank
python -m bench.export_check --save              all models, into bench/results/export_check.json
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

# OpenMP reads this when torch is imported. Waiting threads would otherwise count as CPU time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from bench import results
from bench.gpu.models import empty_network
from bench.gpu.published import FLUX, FLUX2_DEV, SDXL, Config
from demo.tiny_models import make_tiny_flux, make_tiny_flux2_dev, make_tiny_sdxl

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Model:
    """A denoiser to measure.

    Attributes:
        name: Name of the base model.
        tiny: Function that writes a tiny model of the same family, which provides all other components.
        kind: Class of the denoiser.
        config: Published configuration of the denoiser.
    """

    name: str
    tiny: Callable[[Path], None]
    kind: str
    config: Config


MODELS = (
    Model("SDXL", make_tiny_sdxl, "UNet2DConditionModel", SDXL["unet"]),
    Model("FLUX.1", make_tiny_flux, "FluxTransformer2DModel", FLUX["transformer"]),
    Model("FLUX.2 dev", make_tiny_flux2_dev, "Flux2Transformer2DModel", FLUX2_DEV["transformer"]),
)


RESULT_FILE = Path(__file__).parent / "results" / "export_check.json"


@dataclass(frozen=True)
class Timing:
    """Measurement of one verification.

    Attributes:
        model: Name of the base model.
        rank: Rank of the LoRA.
        num_modules: Number of adapted modules.
        file_bytes: Size of the three files together.
        cpu_s: CPU seconds of this process, summed over its threads.
        wall_s: Elapsed seconds.
    """

    model: str
    rank: int
    num_modules: int
    file_bytes: int
    cpu_s: float
    wall_s: float


def main() -> int:
    """Measure the chosen models, print a table, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.export_check", description=__doc__)
    names = [model.name for model in MODELS]
    parser.add_argument("models", nargs="*", metavar="model", help=f"any of {', '.join(names)}; default all")
    parser.add_argument("--rank", type=int, default=16, help="rank of the LoRA")
    parser.add_argument("--save", action="store_true", help=f"write {RESULT_FILE.name}, for bench.page")
    options = parser.parse_args()
    if unknown := sorted(set(options.models) - set(names)):
        parser.error(f"no such model: {', '.join(unknown)}; choose from {', '.join(names)}")

    if options.save and options.models:
        parser.error("--save measures all models; name none")

    timings: list[Timing] = []
    print(f"{'model':12} {'modules':>8} {'files':>9} {'CPU':>9} {'elapsed':>9}")
    for model in MODELS:
        if options.models and model.name not in options.models:
            continue
        with tempfile.TemporaryDirectory(prefix="latentline-bench-") as folder:
            timing = measure(model, Path(folder), rank=options.rank)
        timings.append(timing)
        seconds = f"{timing.cpu_s:>7.1f} s {timing.wall_s:>7.1f} s"
        size = f"{timing.file_bytes / 1e6:.0f} MB"
        print(f"{model.name:12} {timing.num_modules:>8} {size:>9} {seconds}", flush=True)
    if options.save:
        save(timings)
    return 0


def save(timings: list[Timing], path: Path = RESULT_FILE) -> None:
    """Write the measurements with the machine and commit, for `bench.page`."""
    run = results.as_json([], full=True)
    results.save(run | {"export_check": [asdict(each) for each in timings]}, path)


def measure(model: Model, folder: Path, *, rank: int) -> Timing:
    """Export a random LoRA for the model into `folder`, and time its verification."""
    from pipeline.models.worker.family import load_family
    from pipeline.trained_lora.worker.adapter.lora import adapted_networks
    from pipeline.trained_lora.worker.export.exporter import Exporter

    model.tiny(folder / "base")
    network = weightless_network(model)
    family = load_family(folder / "base")
    cast("Any", network).save_config(folder / "base" / family.spec.denoiser_name)
    add_random_lora(network, family.lora_targets(), rank=rank)
    networks = adapted_networks(network, {})

    exporter, lora = Exporter(family, "bench", {}), folder / "lora"
    files = exporter.export(networks, lora)
    wall_start_s, cpu_start_s = time.perf_counter(), time.process_time()
    exporter.verify(networks, lora)
    return Timing(
        model=model.name,
        rank=rank,
        num_modules=files[0].num_modules,
        file_bytes=sum(path.stat().st_size for path in lora.iterdir()),
        cpu_s=time.process_time() - cpu_start_s,
        wall_s=time.perf_counter() - wall_start_s,
    )


def weightless_network(model: Model) -> nn.Module:
    """Return the denoiser with bfloat16 weights that are expanded views of a single zero."""
    import torch
    from torch import nn

    network = empty_network("diffusers", model.kind, model.config)
    for module in network.modules():
        for name, weight in module.named_parameters(recurse=False):
            zero = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
            module.register_parameter(name, nn.Parameter(zero, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.zeros((), dtype=buffer.dtype).expand(buffer.shape))
    return network


def add_random_lora(network: nn.Module, targets: list[str], *, rank: int) -> None:
    """Add a LoRA of random numbers to the modules with these endings."""
    import torch

    from pipeline.recipe import LoraSettings
    from pipeline.trained_lora.worker.adapter.lora import add_lora, trainable_weights

    settings = LoraSettings(rank=rank, alpha=float(rank))
    add_lora(cast("Any", network), settings, targets=targets, seed=0)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in trainable_weights(network):
            weight.copy_(0.01 * torch.randn(weight.shape, generator=random))


if __name__ == "__main__":
    sys.exit(main())
