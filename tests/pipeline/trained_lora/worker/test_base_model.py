from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pipeline.errors import TrainingError
from pipeline.models.worker.family import load_family
from pipeline.recipe.errors import find_mistakes
from pipeline.recipe.yaml_document import dotted
from pipeline.trained_lora.worker.base_model import quantization
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.export.exporter import Exporter
from pipeline.trained_lora.worker.loader import MicroBatchMaker, MicroInput
from tests.pipeline.trained_lora.runs import run_until
from tests.pipeline.trained_lora.worker.test_loop import outcome

if TYPE_CHECKING:
    from conftest import Project

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None


def engine_and_input(project: Project, **training: Any) -> tuple[Engine, MicroInput]:
    job = project.changed("-".join(["made", *training]), **training).job()
    family = load_family(job.base)
    engine = Engine(job, family)
    with torch.no_grad():
        for number, weight in enumerate(engine.weights):
            torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(number))
    maker = MicroBatchMaker(job, family, engine.scheduler)
    return engine, maker.make(0, next(iter(job.plan())).micro_batches[0][0])


def gradients(engine: Engine, micro: MicroInput) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Return losses, gradients of all weights, and the bytes saved for the backward pass."""
    saved_bytes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved_bytes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = engine.losses(micro, engine.denoiser)
    num_bytes = sum(saved_bytes.values())
    losses.sum().backward()
    return losses.detach(), [weight.grad for weight in engine.weights if weight.grad is not None], num_bytes


def test_gradient_checkpointing_saves_memory_and_gives_identical_gradients(
    make_project: Callable[..., Project],
) -> None:
    project = make_project()
    losses, expected, num_bytes = gradients(*engine_and_input(project))
    loss, actual, fewer_bytes = gradients(*engine_and_input(project, gradient_checkpointing=True))
    assert torch.equal(loss, losses)
    assert len(actual) == len(expected) == 64
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
    assert fewer_bytes < 0.7 * num_bytes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_give_the_same_gradients(make_project: Callable[..., Project]) -> None:
    project = make_project()
    losses, expected, _ = gradients(*engine_and_input(project))
    engine, micro = engine_and_input(project, compile=True)
    assert any(module._compiled_call_impl is not None for module in engine.denoiser.modules())
    loss, actual, _ = gradients(engine, micro)
    torch.testing.assert_close(loss, losses, rtol=1e-4, atol=1e-6)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


@pytest.mark.filterwarnings("ignore")
def test_blocks_traced_for_the_compiler_give_the_same_gradients(
    make_project: Callable[..., Project],
) -> None:
    """The slow test without a C++ compiler: the traced graph runs as it is."""
    project = make_project(
        sizes={"64x64": 2}, lora={"rank": 4, "alpha": 2.0, "modules": ["mid_block.*.to_q"]}
    )
    losses, expected, _ = gradients(*engine_and_input(project))
    engine, micro = engine_and_input(project, compile=True)
    compiled = [module for module in engine.denoiser.modules() if module._compiled_call_impl is not None]
    assert {type(module).__name__ for module in compiled} == {"BasicTransformerBlock"}
    denoiser: Any = engine.denoiser
    denoiser.compile_repeated_blocks(backend="eager")
    loss, actual, _ = gradients(engine, micro)
    torch.testing.assert_close(loss, losses)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("kind", "message", "fix"),
    [("nf4", "needs a GPU", "int8_torchao"), ("int8", "needs a GPU", "fp8_torchao")],
)
def test_bitsandbytes_without_a_gpu_is_an_error_with_an_alternative(
    kind: str, message: str, fix: str
) -> None:
    with pytest.raises(TrainingError, match=message) as excinfo:
        quantization(kind, "float32", "cpu")
    assert fix in excinfo.value.fix


@pytest.mark.skipif(HAS_TORCHAO, reason="torchao is installed")
def test_a_missing_quantisation_package_is_named(make_project: Callable[..., Project]) -> None:
    with pytest.raises(TrainingError, match="int8_torchao needs torchao") as excinfo:
        engine_and_input(make_project(), quantize="int8_torchao")
    assert "pip install -e '.[gpu]'" in excinfo.value.fix


@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["int8_torchao", "fp8_torchao"])
def test_quantised_weights_give_almost_the_same_output_and_can_be_trained_and_exported(
    make_project: Callable[..., Project], tmp_path: Path, kind: str
) -> None:
    project = make_project()
    losses, expected, _ = gradients(*engine_and_input(project))
    engine, micro = engine_and_input(project, quantize=kind)
    plain, _ = engine_and_input(project)
    assert _bytes(engine) < 0.6 * _bytes(plain)
    loss, actual, _ = gradients(engine, micro)
    torch.testing.assert_close(loss, losses, rtol=0.1, atol=0.0)
    assert not torch.equal(loss, losses)
    for one, other in zip(actual, expected, strict=True):
        assert float(torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0)) > 0.98
    exported = Exporter(load_family(project.job().base), "demo", {}).export(engine.networks, tmp_path)
    assert max(file.max_error for file in exported) < 1e-6


@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")
def test_a_quantised_run_draws_previews_and_resumes_bit_for_bit(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(quantize="int8_torchao", sample_every=3, sample_prompts=["photograph 0 of 64x64"])
    whole, cut = project.changed("whole").job(), project.changed("cut").job()
    assert run_until(whole)[0]
    assert not run_until(cut, stop_after=3)[0]
    assert run_until(cut)[0]
    assert len(list((whole.folder / "samples").glob("*.png"))) == 3
    assert outcome(cut) == outcome(whole)


def _bytes(engine: Engine) -> int:
    """Return the size of the linear layers' frozen weights."""
    total = 0
    for name, weight in engine.denoiser.named_parameters():
        if "base_layer.weight" in name:
            packed: Any = getattr(weight, "__tensor_flatten__", None)
            parts = [getattr(weight, part) for part in packed()[0]] if packed else [weight]
            total += sum(part.numel() * part.element_size() for part in parts)
    return total


ADAPTERS_OF_PLAIN_WEIGHTS: list[dict[str, Any]] = [
    {"dora": True},
    {"kind": "loha"},
    {"kind": "lokr"},
    {"init": "pissa"},
    {"init": "olora"},
]


@pytest.mark.parametrize("lora", ADAPTERS_OF_PLAIN_WEIGHTS)
def test_adapters_that_need_plain_weights_are_recipe_errors_with_quantisation(lora: dict[str, Any]) -> None:
    smallest = {"datasets": [{"name": "p", "path": "p"}], "output_dir": "o", "model": {"base": "a/b"}}
    actual = find_mistakes({**smallest, "training": {"quantize": "nf4", "lora": lora}})
    assert [dotted(each.path) for each in actual] == ["training.quantize"]
