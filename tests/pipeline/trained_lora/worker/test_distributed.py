from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from demo.tiny_models import TINY
from pipeline.errors import TrainingError
from pipeline.models.worker.family import load_family
from pipeline.recipe import AccelerateSettings
from pipeline.trained_lora.worker.adapter.lora import FROZEN_ADAPTER
from pipeline.trained_lora.worker.distributed import exclude_frozen_weights, make_accelerator, wait_at_most
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.loader import MicroBatchMaker

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one: torch's requirements for DDP apply to it as well."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def exchanging(model: nn.Module, accelerator: Any) -> nn.Module:
    """Return the model wrapped as accelerate wraps it."""
    return DistributedDataParallel(model, **accelerator.ddp_handler.to_kwargs())


def accelerator() -> Any:
    return make_accelerator(AccelerateSettings(), mixed_precision="no", find_unused_parameters=False)


class Packed(Tensor):
    """A tensor with a shape but without data that a process could send."""

    @staticmethod
    def __new__(cls, *shape: int) -> Packed:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)  # pyright: ignore

    def __repr__(self, **_: object) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return "Packed()"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "detach" in str(function):
            return cls(*args[0].shape)
        raise NotImplementedError(f"{function} of a packed weight")


@pytest.mark.usefixtures("alone")
def test_quantised_weights_are_not_sent_to_other_processes() -> None:
    model = nn.Linear(3, 3, bias=False)
    model.base = nn.Linear(3, 3, bias=False)
    model.base.weight = nn.Parameter(Packed(3, 3), requires_grad=False)
    model.register_buffer("table", cast("Any", Packed(2)))
    with pytest.raises(NotImplementedError, match="of a packed weight"):
        exchanging(model, accelerator())
    exclude_frozen_weights(model)
    trained = exchanging(model, accelerator())
    trained(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None


@pytest.mark.usefixtures("alone")
def test_gradients_are_in_the_buffers_that_processes_exchange() -> None:
    """A copy of all gradients would be 260 MB for FLUX.1 and a LoRA of rank 16; the forecast has none."""
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    model = exchanging(nn.Sequential(first, second), accelerator())
    model(torch.ones(1, 3)).sum().backward()
    assert first.weight.grad is not None
    assert second.weight.grad is not None
    storage = first.weight.grad.untyped_storage()
    assert storage.data_ptr() == second.weight.grad.untyped_storage().data_ptr()


@pytest.mark.usefixtures("alone")
def test_a_model_with_unused_text_layers_trains_under_ddp(
    make_project: Callable[..., Project], tiny_bases: dict[str, Path], tmp_path: Path
) -> None:
    """Qwen-Image ignores the text output of its last block, but `targets: blocks` adapts those layers."""
    TINY["Qwen-Image"](tmp_path / "qwen")
    tiny_bases["qwen"] = tmp_path / "qwen"
    lora = {"rank": 4, "targets": "blocks"}
    job = make_project(prediction="qwen", gradient_accumulation=1, lora=lora).job()
    family = load_family(job.base)
    engine = Engine(job, family)
    engine._model = exchanging(engine.denoiser, engine.accelerator)
    maker = MicroBatchMaker(job, family, engine.noise_scheduler)
    for batch in job.plan()[:3]:
        inputs = [(batch, maker.make(batch.step, micro[0])) for micro in batch.micro_batches]
        engine.step(batch, iter(inputs), stop=False)


HANGING = """
import sys
import torch

torch.distributed.init_process_group("gloo", init_method=sys.argv[1], rank=1, world_size=2)
print("joined", flush=True)
sys.stdin.read()
"""
"""A process that takes part in the group, but in none of its exchanges."""


@pytest.mark.timeout(180)
def test_a_process_ends_soon_if_another_one_hangs_within_a_step(tmp_path: Path) -> None:
    method = f"file://{tmp_path / 'group'}"
    command = [sys.executable, "-c", HANGING, method]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as hanging:
        try:
            torch.distributed.init_process_group(
                "gloo", init_method=method, rank=0, world_size=2, timeout=timedelta(hours=12)
            )
            assert cast("Any", hanging.stdout).readline() == "joined\n"
            wait_at_most(timedelta(seconds=1))
            with pytest.raises(RuntimeError, match=r"(?i)timed out"):
                torch.distributed.all_reduce(torch.ones(1))
        finally:
            torch.distributed.destroy_process_group()
            hanging.kill()


def test_a_process_alone_has_nobody_to_wait_for() -> None:
    wait_at_most(timedelta(seconds=1))
    assert not torch.distributed.is_initialized()


def test_processes_wait_for_hours_while_the_main_process_exports_or_draws() -> None:
    assert accelerator().init_handler.to_kwargs()["timeout"] >= timedelta(hours=6)


def test_a_precision_that_the_machine_does_not_support_is_an_error_with_a_fix(any_precision: None) -> None:
    with pytest.raises(TrainingError, match="does not support mixed precision fp12") as excinfo:
        make_accelerator(AccelerateSettings(), mixed_precision="fp12", find_unused_parameters=False)
    assert "bf16" in excinfo.value.fix


@pytest.mark.parametrize("finds", [True, False])
def test_the_search_for_unused_weights_is_passed_on(finds: bool) -> None:
    passed = make_accelerator(
        AccelerateSettings(),
        mixed_precision="no",
        find_unused_parameters=finds,
    )
    assert cast("Any", passed).ddp_handler.find_unused_parameters == finds


@pytest.mark.usefixtures("alone")
def test_only_trained_weights_and_the_frozen_adapter_are_sent_to_other_processes() -> None:
    model = nn.Linear(3, 3, bias=False)
    model.base = nn.Linear(3, 3, bias=False)
    model.lora_A = nn.ModuleDict({FROZEN_ADAPTER: nn.Linear(3, 3, bias=False)})
    for part in (model.base, model.lora_A):
        part.requires_grad_(False)
    model.register_buffer("table", torch.zeros(2))
    exclude_frozen_weights(model)
    ignored = cast("Any", exchanging(model, accelerator())).parameters_to_ignore
    assert set(ignored) == {"base.weight", "table"}


def test_a_number_of_processes_other_than_the_recipe_s_is_an_error() -> None:
    with pytest.raises(TrainingError, match="num_processes is 2, but 1 process was launched"):
        make_accelerator(
            AccelerateSettings(num_processes=2), mixed_precision="no", find_unused_parameters=False
        )
