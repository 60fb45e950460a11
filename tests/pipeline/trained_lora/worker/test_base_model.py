from __future__ import annotations

import gc
import importlib.util
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from diffusers.quantizers.torchao import torchao_quantizer
from peft import LoraConfig
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from demo.tiny_models import make_tiny_flux
from pipeline.errors import TrainingError
from pipeline.images.geometry import Size
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.recipe import LoraSettings, Recipe, recipe_from_mapping
from pipeline.recipe.errors import find_mistakes
from pipeline.recipe.yaml_document import dotted
from pipeline.trained_lora.supported_settings import memory_warning
from pipeline.trained_lora.worker.adapter.lora import ADAPTER, add_lora, lora_modules, trainable_weights
from pipeline.trained_lora.worker.base_model import (
    cast_inputs_of_quantized_layers,
    load_base,
    quantization,
)
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.export.exporter import Exporter
from pipeline.trained_lora.worker.loader import MicroBatchMaker
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.trained_lora.project import ALL_MODULES
from tests.pipeline.trained_lora.runs import run_until
from tests.pipeline.trained_lora.worker.cuda_autocast import (
    FLOAT32,
    HEADER,
    LOWER_PRECISION,
    ImitatedCudaAutocast,
    calls,
)
from tests.pipeline.trained_lora.worker.test_loop import outcome
from tests.tensor_differences import differing_tensors

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None
needs_torchao = pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
needs_bitsandbytes = pytest.mark.skipif(not HAS_BITSANDBYTES, reason="bitsandbytes is not installed")


def engine_and_input(project: Project, **training: Any) -> tuple[Engine, MicroInput]:
    job = project.changed("-".join(["made", *training]), **training).job()
    family = load_family(job.base)
    engine = Engine(job, family)
    with torch.no_grad():
        for number, weight in enumerate(engine.weights):
            torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(number))
    maker = MicroBatchMaker(job, family, engine.noise_scheduler)
    micro = maker.make(0, next(iter(job.plan())).micro_batches[0][0])
    return engine, micro.to(engine.accelerator.device)


def gradients(engine: Engine, micro: MicroInput) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Return losses, gradients of all weights, and the bytes saved for the backward pass."""
    saved_bytes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved_bytes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = engine.objective.losses(micro, engine.denoiser)
    num_bytes = sum(saved_bytes.values())
    losses.sum().backward()
    return losses.detach(), [weight.grad for weight in engine.weights if weight.grad is not None], num_bytes


def test_gradient_checkpointing_saves_memory_and_gives_identical_gradients(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(lora=ALL_MODULES)
    losses, expected, num_bytes = gradients(*engine_and_input(project))
    loss, actual, fewer_bytes = gradients(*engine_and_input(project, gradient_checkpointing=True))
    assert torch.equal(loss, losses)
    assert len(actual) == len(expected) == 64
    assert differing_tensors(actual, expected) == []
    assert fewer_bytes < 0.7 * num_bytes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_give_the_same_gradients(make_project: Callable[..., Project]) -> None:
    project = make_project()
    losses, expected, _ = gradients(*engine_and_input(project))
    engine, micro = engine_and_input(project, compile=True)
    compiled = [module for module in engine.denoiser.modules() if module._compiled_call_impl is not None]
    assert compiled != []
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


def test_bitsandbytes_without_a_gpu_is_an_error_with_an_alternative() -> None:
    with pytest.raises(TrainingError, match="nf4 needs a CUDA GPU") as excinfo:
        quantization("nf4", "float32", "cpu")
    assert "int8 or fp8_torchao" in excinfo.value.fix


@pytest.mark.skipif(HAS_TORCHAO, reason="torchao is installed")
def test_a_missing_quantisation_package_is_named(make_project: Callable[..., Project]) -> None:
    with pytest.raises(TrainingError, match="int8 needs torchao") as excinfo:
        engine_and_input(make_project(), quantize="int8")
    assert "pip install 'latentline[gpu]'" in excinfo.value.fix


@needs_torchao
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["int8", "fp8_torchao"])
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


@pytest.mark.slow
@needs_torchao
@pytest.mark.filterwarnings("ignore")
def test_a_quantised_run_draws_previews_and_resumes_bit_for_bit(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(quantize="int8", sample_every=3, sample_prompts=["photograph 0 of 64x64"])
    whole, cut = project.changed("whole").job(), project.changed("cut").job()
    assert run_until(whole)[0]
    assert not run_until(cut, stop_after=3)[0]
    assert run_until(cut)[0]
    assert len(list((whole.folder / "samples").glob("*.png"))) == 3
    assert outcome(cut) == outcome(whole)


@pytest.fixture
def flux(tmp_path: Path) -> WorkerFamily:
    make_tiny_flux(tmp_path / "flux")
    return load_family(tmp_path / "flux")


def recipe_with(base: Path, quantize: str, precision: str = "bf16", compute: str = "none") -> Recipe:
    values = {
        "datasets": [{"name": "photos", "path": "photos"}],
        "output_dir": "output",
        "model": {"base": str(base)},
        "training": {"quantize": quantize, "compute": compute},
        "accelerate": {"mixed_precision": precision},
    }
    return recipe_from_mapping("demo", values)


def packed(flux: WorkerFamily, kind: str) -> nn.Module:
    """Return the denoiser with packed layers and bfloat16.

    diffusers packs nf4 on a GPU only, so that is done layer by layer.
    """
    if kind == "int8 products":
        return load_base(flux, recipe_with(flux.model.path, "none", compute="int8"), "cpu")
    if kind != "nf4":
        return load_base(flux, recipe_with(flux.model.path, kind), "cpu")
    import bitsandbytes

    denoiser = flux.denoiser.load("bfloat16", "cpu")
    for parent in list(denoiser.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear):
                packed_layer = bitsandbytes.nn.Linear4bit(
                    layer.in_features,
                    layer.out_features,
                    bias=layer.bias is not None,
                    quant_type="nf4",
                    compute_dtype=torch.bfloat16,
                )
                packed_layer.load_state_dict(layer.state_dict())
                setattr(parent, name, packed_layer.requires_grad_(False).to("cpu"))
    cast_inputs_of_quantized_layers(denoiser, torch.bfloat16)
    return denoiser


def predict(flux: WorkerFamily, denoiser: nn.Module) -> torch.Tensor:
    """Call the denoiser with float32 inputs, as training does."""
    random = torch.Generator().manual_seed(0)
    shapes = flux.text_shapes()
    conditions = {name: torch.randn(1, *shape, generator=random) for name, shape in shapes.items()}
    noisy = torch.randn(1, *flux.latent_shape(Size(64, 64)), generator=random).requires_grad_()
    return flux.denoiser.predict(denoiser, noisy, torch.tensor([500.0]), conditions)


KINDS = [
    pytest.param("int8", marks=needs_torchao),
    pytest.param("fp8_torchao", marks=needs_torchao),
    pytest.param("int8 products", marks=needs_torchao),
    pytest.param("nf4", marks=needs_bitsandbytes),
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_residual_stream_of_packed_layers_is_bfloat16_under_cudas_autocast(
    flux: WorkerFamily, kind: str
) -> None:
    denoiser = packed(flux, kind)
    dtypes: dict[str, set[torch.dtype]] = {}
    for name, block in denoiser.named_modules():
        if type(block).__name__ in ("FluxTransformerBlock", "FluxSingleTransformerBlock"):
            block.register_forward_hook(
                lambda _block, _inputs, outputs, name=name: dtypes.update(
                    {name: {each.dtype for each in outputs}}
                )
            )
    with ImitatedCudaAutocast(), torch.no_grad():
        predict(flux, denoiser)
    assert len(dtypes) >= 2
    assert set.union(*dtypes.values()) == {torch.bfloat16}


@pytest.mark.parametrize("rules", [LOWER_PRECISION, FLOAT32], ids=["bfloat16", "float32"])
def test_each_imitated_rule_cites_its_line_of_torchs_header(rules: dict[str, tuple[int, Any]]) -> None:
    lines = HEADER.read_text().splitlines()
    assert {name: f"_({name})" in lines[number - 1] for name, (number, _) in rules.items()} == dict.fromkeys(
        rules, True
    )


@pytest.mark.parametrize("name", [*LOWER_PRECISION, *FLOAT32])
def test_an_imitated_operation_returns_the_dtype_of_its_list(name: str) -> None:
    with ImitatedCudaAutocast():
        dtype = calls("cpu")[name]().dtype
    assert dtype == (torch.bfloat16 if name in LOWER_PRECISION else torch.float32)


class Clones(TorchDispatchMode):
    """Counts cloned tensors, in forward and backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


@needs_bitsandbytes
@pytest.mark.parametrize("dora", [False, True])
def test_a_lora_on_4_bits_computes_as_peft_s_own_layer_and_clones_no_output(
    flux: WorkerFamily, *, dora: bool
) -> None:
    targets, settings = flux.lora_targets(), LoraSettings(rank=4, alpha=4.0, dora=dora)
    clones: list[int] = []
    tensors: list[list[torch.Tensor]] = []
    for own in (False, True):
        denoiser: Any = packed(flux, "nf4")
        denoiser.is_loaded_in_4bit = True  # as after diffusers' quantization
        if own:
            add_lora(denoiser, settings, targets=targets, seed=0)
        else:
            denoiser.requires_grad_(False)
            config = LoraConfig(r=4, lora_alpha=4, target_modules=targets, use_dora=dora)
            denoiser.add_adapter(config, ADAPTER)
        random = torch.Generator().manual_seed(0)
        weights = trainable_weights(denoiser)
        for weight in weights:
            weight.data = torch.randn(weight.shape, generator=random) / 8
        with Clones() as counted, torch.autocast("cpu", torch.bfloat16):
            prediction = predict(flux, denoiser)
            prediction.square().mean().backward()
        clones.append(counted.count)
        tensors.append([prediction.detach(), *(cast("torch.Tensor", weight.grad) for weight in weights)])

    assert differing_tensors(*tensors) == []

    # DoRA's output has another dtype in peft's layer, so it keeps that layer.
    num_layers = len(list(lora_modules(denoiser)))
    assert clones[0] - clones[1] == (0 if dora else num_layers)


@pytest.mark.parametrize("kind", KINDS)
def test_no_input_of_a_packed_layer_stays_alive_after_a_checkpointed_forward(
    flux: WorkerFamily, kind: str
) -> None:
    assert alive_inputs(flux, packed(flux, kind)) == 0


@needs_bitsandbytes
def test_int8_is_not_the_kind_of_bitsandbytes_because_that_keeps_all_inputs_despite_checkpointing() -> None:
    import bitsandbytes

    inputs: list[weakref.ref[torch.Tensor]] = []
    states = torch.randn(4, 16, requires_grad=True)
    for _ in range(8):
        layer = bitsandbytes.nn.Linear8bitLt(16, 16, has_fp16_weights=False).requires_grad_(False).to("cpu")
        layer.register_forward_hook(lambda _layer, given, _output: inputs.append(weakref.ref(given[0])))
        states = checkpoint(nn.Sequential(nn.SiLU(), layer), states, use_reentrant=False)
    gc.collect()
    assert [each() is not None for each in inputs] == [True] * 8


def alive_inputs(flux: WorkerFamily, denoiser: nn.Module) -> int:
    """Count the inputs of the blocks' linear layers that a checkpointed forward pass leaves in memory."""
    flux.denoiser.recompute_activations(denoiser)
    denoiser.train()
    inputs: list[weakref.ref[torch.Tensor]] = []
    for name, layer in denoiser.named_modules():
        if "transformer_blocks" in name and isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda _layer, given, _output: inputs.append(weakref.ref(given[0])))
    with torch.autocast("cpu", torch.bfloat16):
        prediction = predict(flux, denoiser)
    gc.collect()
    assert prediction.requires_grad
    assert len(inputs) > 8
    return sum(each() is not None for each in inputs)


@needs_torchao
def test_weights_are_packed_on_the_device_and_on_the_cpu_only_for_the_cpu(
    flux: WorkerFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meta device stands in for a GPU: each process then holds no packed weight on the host."""
    devices: list[str] = []
    quantize = torchao_quantizer.quantize_

    def recording(module: nn.Module, *arguments: Any, **options: Any) -> None:
        devices.append(next(module.parameters()).device.type)
        quantize(module, *arguments, **options)

    monkeypatch.setattr(torchao_quantizer, "quantize_", recording)
    for device in ("meta", "cpu"):
        devices.clear()
        denoiser = flux.denoiser.load(
            "bfloat16", device, quantization=quantization("int8", "bfloat16", device)
        )
        assert set(devices) == {device}
        packed_weights = [weight for weight in denoiser.parameters() if hasattr(weight, "__tensor_flatten__")]
        assert len(packed_weights) == len(devices) > 8
        assert {weight.device.type for weight in denoiser.parameters()} == {device}


@needs_torchao
def test_torchao_without_gradient_checkpointing_takes_more_memory_than_no_packing_and_is_warned_about(
    make_project: Callable[..., Project],
) -> None:
    project = make_project()
    plain, packed_engine = engine_and_input(project), engine_and_input(project, quantize="int8")
    assert bytes_in_use(*packed_engine) > bytes_in_use(*plain)

    training = project.recipe.training
    for quantize, checkpointing, warned in (
        ("int8", False, True),
        ("fp8_torchao", False, True),
        ("int8", True, False),
        ("nf4", False, False),
        ("none", False, False),
    ):
        changed = training.model_copy(update={"quantize": quantize, "gradient_checkpointing": checkpointing})
        assert (memory_warning(changed) is not None) == warned


def bytes_in_use(engine: Engine, micro: MicroInput) -> int:
    """Return the size of the linear layers' frozen weights and of what is stored for the backward pass."""
    weights = {weight.data_ptr() for weight in engine.denoiser.parameters()}
    stored_bytes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            stored_bytes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = engine.objective.losses(micro, engine.denoiser)
    losses.sum().backward()
    return _bytes(engine) + sum(stored_bytes.values())


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


@pytest.mark.parametrize("lora", ADAPTERS_OF_PLAIN_WEIGHTS, ids=str)
def test_adapters_that_need_plain_weights_are_recipe_errors_with_quantisation(lora: dict[str, Any]) -> None:
    smallest = {"datasets": [{"name": "p", "path": "p"}], "output_dir": "o", "model": {"base": "a/b"}}
    actual = find_mistakes({**smallest, "training": {"quantize": "nf4", "lora": lora}})
    assert [dotted(each.path) for each in actual] == ["training.quantize"]
