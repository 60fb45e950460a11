"""Every kind of adapter: the base model with its exported files, read by each program's formulas, equals the
trained model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from peft.tuners.lokr.layer import factorization
from safetensors.torch import load_file

from pipeline.errors import LaunchError, TrainingError
from pipeline.models.worker.family import load_family
from pipeline.recipe import LoraSettings
from pipeline.recipe.lora import lokr_shapes
from pipeline.reporting.findings import CheckContext
from pipeline.storage.tables import Tables
from pipeline.trained_lora import checks as trained_lora
from pipeline.trained_lora.export.lora_files import LoraModule, layout_file, read_lora_file
from pipeline.trained_lora.export.metadata import header_metadata
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.plan.steps import Slot
from pipeline.trained_lora.stage import train_lora
from pipeline.trained_lora.worker.adapter.lora import add_lora, lora_modules
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.export.exporter import Exporter
from pipeline.trained_lora.worker.export.modules import describe_denoiser
from pipeline.trained_lora.worker.loader import MicroBatchMaker
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.trained_lora.adapters import unet_pipeline
from tests.pipeline.trained_lora.project import FEW_MODULES, Project, project_in
from tests.tiny_models import TinyModel

# diffusers' Chroma imports a class from a deprecated path.
pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")

Tensors = dict[str, torch.Tensor]

KINDS: dict[str, dict[str, Any]] = {
    "patterns": {"modules": ["*.attn2.to_?", "mid_block.*.ff.net.2"]},
    "attention": {"targets": "attention"},
    "blocks": {"targets": "blocks", "init": "gaussian"},
    "ranks": {"ranks": [{"modules": "*.attn2.*", "rank": 8}, {"modules": "mid_*", "rank": 2, "alpha": 6.0}]},
    "rslora": {"rslora": True, "ranks": [{"modules": "*.to_k", "rank": 9, "alpha": 3.0}]},
    "locon": {"conv_rank": 4},
    "locon of other alphas": {"conv_rank": 2, "conv_alpha": 3.0, "modules": ["*.conv_shortcut", "*.proj_in"]},
    "locon dora": {"conv_rank": 3, "dora": True},
    "loha": {"kind": "loha", "ranks": [{"modules": "*.attn2.*", "rank": 2}]},
    "loha of convolutions": {"kind": "loha", "conv_rank": 3, "targets": "blocks"},
    "lokr": {"kind": "lokr", "lokr_factor": 4, "rank": 2, "ranks": [{"modules": "*.attn2.*", "rank": 9}]},
    "lokr of convolutions": {"kind": "lokr", "conv_rank": 3, "targets": "blocks", "rank": 3},
    "pissa": {"init": "pissa", "ranks": [{"modules": "*.attn2.*", "rank": 3}]},
    "olora": {"init": "olora"},
    "olora of convolutions": {"init": "olora", "conv_rank": 3, "targets": "blocks", "rslora": True},
    "dora": {"dora": True},
    "dora ranks rslora": {"dora": True, "rslora": True, "ranks": [{"modules": "*.attn2.*", "rank": 3}]},
}

CONTAINED = ("attention", "rslora", "loha", "olora", "dora")
"""Kinds of which another one has all settings, and more."""


class Loose:
    """A denoiser with large adapter weights."""

    def __init__(self, project: Project, kind: str) -> None:
        lora = {"rank": 4, "alpha": 2.0, **KINDS[kind]}
        settings = LoraSettings.model_validate_json(json.dumps(lora))
        self.job = project.changed("kind", lora=settings).job()
        self.denoiser: Any = Engine(self.job, load_family(self.job.base)).denoiser.eval()
        loosen(self.denoiser)

    def export(self, folder: Path) -> None:
        family = load_family(self.job.base)
        Exporter(family, "demo", header_metadata(self.job, family)).export({"": self.denoiser}, folder)

    def modules(self) -> list[LoraModule]:
        return describe_denoiser(load_family(self.job.base), self.denoiser)


def loosen(denoiser: Any) -> None:
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in denoiser.named_parameters():
            if weight.requires_grad:
                change = 0.2 * torch.randn(weight.shape, generator=rng)
                change = change * 2 if "hada" in name or "lokr" in name else change
                weight.copy_(weight * (1 + change) if "magnitude" in name else change)


def output(unet: Any) -> torch.Tensor:
    rng = torch.Generator().manual_seed(5)
    noisy, text = torch.randn(2, 4, 8, 8, generator=rng), torch.randn(2, 77, 32, generator=rng)
    with torch.no_grad():
        return unet(noisy, torch.tensor([5, 700]), text).sample


def loaded(base: Path, folder: Path, name: str | None = None) -> Any:
    pipe = unet_pipeline(base)
    pipe.load_lora_weights(folder, **({"weight_name": name} if name else {}))
    return pipe.unet.eval()


def by_formula(weight: torch.Tensor, tensors: Tensors, key: str, *, base_rows: bool) -> torch.Tensor:
    """Return the base weight with a file's layer applied, by the reader's formula.

    With DoRA ComfyUI's `weight_decompose` divides by the base row's length, LyCORIS's
    `apply_weight_decompose` by the adapted one's.
    """
    down, up = tensors[f"{key}.lora_down.weight"], tensors[f"{key}.lora_up.weight"]
    change = (up.flatten(1) @ down.flatten(1)).reshape(weight.shape)
    adapted = weight + change * (tensors[f"{key}.alpha"].item() / down.shape[0])
    if f"{key}.dora_scale" not in tensors:
        return adapted
    lengths = (weight if base_rows else adapted).flatten(1).norm(dim=1)
    return adapted * (tensors[f"{key}.dora_scale"].flatten() / lengths).reshape(-1, *[1] * (weight.ndim - 1))


def merged(loose: Loose, folder: Path, layout: Any) -> Any:
    """Return the base model with a file's weights merged."""
    unet = UNet2DConditionModel.from_pretrained(loose.job.base / "unet").eval()
    tensors = load_file(folder / layout_file(layout, "demo"))
    for module in loose.modules():
        key = module.kohya if layout == "kohya" else module.comfyui
        weight = unet.get_submodule(module.name).weight.data
        weight.copy_(by_formula(weight, tensors, key, base_rows=layout == "comfyui"))
    return unet


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, tiny_bases: dict[str, Path]) -> Project:
    """A project whose base model and cache tests only read."""
    return project_in(tmp_path_factory.mktemp("project"), tiny_bases)


@pytest.fixture(scope="module")
def plain(project: Project) -> torch.Tensor:
    """The output of the base model."""
    return output(UNet2DConditionModel.from_pretrained(Path(project.recipe.model.base) / "unet").eval())


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in CONTAINED)) for kind in KINDS]
)
def test_R06_the_base_model_with_any_file_equals_the_trained_model(
    project: Project, plain: torch.Tensor, tmp_path: Path, kind: str
) -> None:
    loose = Loose(project, kind)
    loose.export(tmp_path)
    expected = output(loose.denoiser)
    assert (expected - plain).abs().max() > 0.05
    torch.testing.assert_close(output(loaded(loose.job.base, tmp_path)), expected, rtol=0, atol=1e-4)
    for layout in ("kohya", "comfyui"):
        torch.testing.assert_close(output(merged(loose, tmp_path, layout)), expected, rtol=0, atol=1e-4)
    if kind in {"patterns", "attention", "blocks", "locon"}:  # diffusers reads no DoRA, and one alpha
        kohya = loaded(loose.job.base, tmp_path, "demo_kohya.safetensors")
        torch.testing.assert_close(output(kohya), expected, rtol=0, atol=1e-4)


def test_ranks_and_scales_follow_the_recipe(project: Project) -> None:
    loose = Loose(project, "ranks")
    sizes = {module.name: (module.rank, module.alpha) for module in loose.modules()}
    attn2 = {size for name, size in sizes.items() if ".attn2." in name}
    assert attn2 == {(8, 4.0)}  # the first matching pattern wins; alpha is scaled in proportion
    assert {size for name, size in sizes.items() if "mid" in name and ".attn1." in name} == {(2, 6.0)}
    assert {size for name, size in sizes.items() if "mid" not in name and ".attn1." in name} == {(4, 2.0)}
    roots = Loose(project, "rslora")
    scales = {name: module.scaling["default"] for name, module in lora_modules(roots.denoiser)}
    assert {scale for name, scale in scales.items() if name.endswith("to_k")} == {3.0 / 9**0.5}
    assert {scale for name, scale in scales.items() if name.endswith("to_q")} == {2.0 / 4**0.5}


def test_a_loha_is_a_product_of_two_products_and_its_files_hold_a_lora_of_squared_rank(
    project: Project,
) -> None:
    loose = Loose(project, "loha")
    name = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    layer = loose.denoiser.get_submodule(name)
    a, b, c, d = (getattr(layer, f"hada_w{side}")["default"] for side in ("1_a", "1_b", "2_a", "2_b"))
    expected = layer.get_base_layer().weight + 2.0 / 4 * (a @ b) * (c @ d)
    torch.testing.assert_close(effective(layer), expected.detach(), rtol=0, atol=1e-6)
    ranks = {module.rank for module in loose.modules()}
    assert ranks == {16, 4}
    assert sum(weight.numel() for weight in (a, b, c, d)) < 16 * (b.shape[1] + len(a))


def test_a_lokr_is_a_kronecker_product_and_its_files_hold_a_lora_of_the_product_of_ranks(
    project: Project,
) -> None:
    loose = Loose(project, "lokr")
    block = "mid_block.attentions.0.transformer_blocks.0"
    factored, full = (loose.denoiser.get_submodule(f"{block}.{name}.to_q") for name in ("attn1", "attn2"))
    left, a, b = (getattr(factored, f"lokr_{side}")["default"] for side in ("w1", "w2_a", "w2_b"))
    expected = factored.get_base_layer().weight + 2.0 / 2 * torch.kron(left, a @ b)
    torch.testing.assert_close(effective(factored), expected.detach(), rtol=0, atol=1e-6)
    left, right = full.lokr_w1["default"], full.lokr_w2["default"]
    expected = full.get_base_layer().weight + 2.0 / 2 * torch.kron(left, right)
    torch.testing.assert_close(effective(full), expected.detach(), rtol=0, atol=1e-6)
    ranks = {module.name: module.rank for module in loose.modules()}
    assert ranks[f"{block}.attn1.to_q"] == 4 * 2
    assert ranks[f"{block}.attn2.to_q"] == 4 * min(right.shape)


@pytest.mark.parametrize("factor", [2, 8, 16, 100])
def test_a_lokr_splits_every_length_as_peft_does(factor: int) -> None:
    for length in range(1, 700):
        (left, _), (right, columns) = lokr_shapes((length, 1, 3, 3), factor)
        assert (left, right) == factorization(length, factor)
        assert columns == 9


@pytest.mark.parametrize(
    "kind",
    [
        "dora ranks rslora",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("lokr", "loha", "pissa", "olora")),
    ],
)
def test_R01_a_run_of_every_option_passes_its_gates_and_resumes_bit_for_bit(
    make_project: Callable[..., Project], kind: str
) -> None:
    lora = {"rank": 4, "alpha": 2.0, **KINDS[kind], "targets": "blocks"}
    if kind == "dora ranks rslora":
        lora = {**FEW_MODULES, **KINDS[kind], "dropout": 0.2}
    project = make_project(lora=lora, gradient_accumulation=1, steps=4)

    def files(which: Project, stop: int | None = None) -> dict[str, list[bytes]]:
        if stop is not None:
            with pytest.raises(LaunchError, match="stopped"):
                train_lora(which.recipe, which.latents, which.text, launch=InProcessLaunch(stop), log=print)
        train_lora(which.recipe, which.latents, which.text, launch=InProcessLaunch(), log=print)
        paths = (which.recipe.output_dir / "lora").glob("*.safetensors")
        return {path.name: [t.numpy().tobytes() for t in load_file(path).values()] for path in paths}

    uninterrupted = files(project)
    findings = trained_lora.run(CheckContext(project.recipe, Tables(project.recipe.output_dir)))
    assert [finding.name for finding in findings if not finding.passed] == []
    assert files(project.changed("cut"), stop=2) == uninterrupted
    if kind == "loha":
        expected_text = {"trained_as": {"algo": "loha", "dim": 4, "alpha": 2.0}}
    elif kind == "lokr":
        expected_text = {"trained_as": {"algo": "lokr", "dim": 2, "alpha": 2.0, "factor": 4}}
    elif kind in ("pissa", "olora"):
        expected_text = {"init": kind}
    else:
        expected_text = {"dora_wd": True, "dropout": 0.2, "rs_lora": True}
        undropped = project.recipe.training.lora.model_copy(update={"dropout": 0.0})
        assert files(project.changed("undropped", lora=undropped)) != uninterrupted
    header = read_lora_file(project.recipe.output_dir / "lora" / "demo_kohya.safetensors").metadata
    assert json.loads(header["ss_network_args"]) == expected_text


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_R06_the_gates_find_an_adapter_that_never_left_its_initial_weights(
    make_project: Callable[..., Project], init: str
) -> None:
    lora = {**FEW_MODULES, "init": init}
    project = make_project(lora=lora, gradient_accumulation=1, steps=1, learning_rate=1e-60)
    train_lora(project.recipe, project.latents, project.text, launch=InProcessLaunch(), log=print)
    findings = trained_lora.run(CheckContext(project.recipe, Tables(project.recipe.output_dir)))
    closed = {finding.name for finding in findings if not finding.passed}
    assert {"adapter_not_zero", "modules_touched", "output_changed"} <= closed
    assert "reload_equals" not in closed


@pytest.mark.usefixtures("any_precision")
@pytest.mark.parametrize("lora", [{"init": "pissa"}, {"init": "olora"}, {}], ids=str)
def test_R06_in_bfloat16_training_changes_the_output_and_svd_initialisation_does_not(
    make_project: Callable[..., Project], lora: dict[str, Any]
) -> None:
    """Autocast caches cast weights, so a change within one context would go unnoticed."""
    project = make_project(lora={**FEW_MODULES, **lora})
    job = project.changed("half", mixed_precision="bf16").job()
    family = load_family(job.base)
    engine = Engine(job, family)
    maker = MicroBatchMaker(job, family, engine.noise_scheduler)
    slot = Slot(job.inputs[0].variant_id, 0, epoch=0, occurrence=0, drop_caption=False)
    micro = maker.make_fixed((slot,), [0.5])
    assert engine.objective.output_change(micro) == 0.0
    loosen(engine.denoiser)
    assert engine.objective.output_change(micro) > 0.01


def engine_error(job: TrainingJob) -> TrainingError:
    with pytest.raises(TrainingError) as excinfo:
        Engine(job, load_family(job.base))
    return excinfo.value


@pytest.mark.parametrize(
    ("lora", "expected_text"),
    [
        ({"modules": ["*.attn7.*"]}, "modules: the pattern *.attn7.* matches no layer"),
        ({"modules": ["*.attn1.to_q", "*.attn7.*"]}, "modules: the pattern *.attn7.* matches no layer"),
        ({"ranks": [{"modules": "*.ff.*", "rank": 2}]}, "ranks: the pattern *.ff.* matches no layer"),
    ],
    ids=str,
)
def test_a_pattern_without_a_match_is_an_error_that_lists_layers(
    make_project: Callable[..., Project], lora: dict[str, Any], expected_text: str
) -> None:
    error = engine_error(make_project(lora={"rank": 4, **lora}).job())
    assert expected_text in error.what
    assert ".to_" in error.fix or "*.attn2.*" in error.fix


def effective(module: Any) -> torch.Tensor:
    """Return the effective weight of an adapted linear layer, from its outputs for unit vectors."""
    plain = module.get_base_layer()
    with torch.no_grad():
        outputs = module.eval()(torch.eye(plain.in_features))
    return (outputs if plain.bias is None else outputs - plain.bias).T


@pytest.mark.parametrize("kind", ["Stable Diffusion 3 and 3.5", "FLUX.1 dev", "Lumina Image 2"])
@pytest.mark.parametrize(
    "lora",
    [
        {"dora": True, "rslora": True},
        {"ranks": [{"modules": "*", "rank": 3}]},
        {"kind": "loha", "rank": 2},
        {"kind": "lokr", "rank": 2, "lokr_factor": 2},
    ],
    ids=str,
)
def test_R06_fused_layers_hold_the_trained_parts(
    tiny_model: TinyModel, tmp_path: Path, kind: str, lora: dict[str, Any]
) -> None:
    family = load_family(tiny_model(kind))
    denoiser: Any = family.denoiser.load("float32", "cpu")
    settings = LoraSettings.model_validate_json(json.dumps({"rank": 4, "alpha": 2.0, **lora}))
    add_lora(denoiser, settings, targets=family.lora_targets(), seed=1)
    loosen(denoiser)
    exporter = Exporter(family, "demo", {})
    exporter.export({"": denoiser}, tmp_path / "lora")
    for layout in ("kohya", "comfyui"):
        tensors = load_file(tmp_path / "lora" / layout_file(layout, "demo"))
        for module in describe_denoiser(family, denoiser):
            key = module.kohya if layout == "kohya" else module.comfyui
            parts = family.kohya_layer(module.name).modules if key == module.kohya else (module.name,)
            layers = [denoiser.get_submodule(part) for part in parts]
            weight = torch.cat([layer.get_base_layer().weight.detach() for layer in layers])
            expected = torch.cat([effective(layer) for layer in layers])
            assert not torch.allclose(expected, weight, atol=1e-2)
            actual = by_formula(weight, tensors, key, base_rows=layout == "comfyui")
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
