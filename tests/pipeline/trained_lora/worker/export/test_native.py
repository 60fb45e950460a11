"""Files of LoHa and LoKr in their own format have the trained delta weights for their readers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.errors import TrainingError
from pipeline.models.worker.family import load_family
from pipeline.recipe import LoraSettings
from pipeline.trained_lora.export.lora_files import LoraModule, native_file_name
from pipeline.trained_lora.worker.adapter.lora import add_lora, delta_weights, trainable_weights
from pipeline.trained_lora.worker.export.exporter import Exporter
from pipeline.trained_lora.worker.export.modules import describe_networks
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.trained_lora.runs import run
from tests.readers import golden

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

NATIVE = native_file_name("demo")

KINDS: dict[str, dict[str, Any]] = {
    "loha": {"kind": "loha", "rank": 3, "alpha": 2.0},
    # A small factor leaves large second matrices, which are products of two; of the large one, some are not.
    "lokr": {"kind": "lokr", "rank": 2, "alpha": 3.0, "lokr_factor": 2},
    "lokr-full": {"kind": "lokr", "rank": 4, "alpha": 3.0, "lokr_factor": 8},
}
BASES = {"epsilon": "kohya", "klein": "comfyui"}
"""Layout of the keys, by base model: UNets have kohya's, which ComfyUI reads too."""


class Trained:
    """A denoiser with random weights in its adapter."""

    def __init__(self, base: Path, settings: Mapping[str, Any]) -> None:
        self.family = load_family(base)
        lora = LoraSettings.model_validate(dict(settings))
        denoiser = cast("Any", self.family.denoiser.load("float32", "cpu"))
        add_lora(denoiser, lora, targets=self.family.lora_targets(), seed=1)
        draw = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for weight in trainable_weights(denoiser):
                weight.copy_(torch.randn(weight.shape, generator=draw))
        self.networks = {"": denoiser}
        self.modules = describe_networks(self.family, self.networks)
        self.deltas = {name: delta().flatten(1) for name, delta in delta_weights(denoiser).items()}

    def exporter(self, save_dtype: str = "float32") -> Exporter:
        return Exporter(self.family, "demo", {}, save_dtype=save_dtype, native={"ss_network_dim": "3"})


def comfyui_delta(tensors: Mapping[str, Tensor], key: str) -> np.ndarray[Any, Any]:
    """Return the delta weight (out, in) as ComfyUI computes it, in float64 and without torch.

    `calculate_weight` in comfy/weight_adapter/loha.py and lokr.py; the kernel of a convolution is flattened.
    """
    own = {
        path.removeprefix(f"{key}."): each.double().numpy()
        for path, each in tensors.items()
        if path.startswith(f"{key}.")
    }
    if "hada_w1_a" in own:
        scale = own["alpha"] / own["hada_w1_b"].shape[0]
        return scale * (own["hada_w1_a"] @ own["hada_w1_b"]) * (own["hada_w2_a"] @ own["hada_w2_b"])
    if "lokr_w2" in own:
        w2, scale = own["lokr_w2"], 1.0
    else:
        w2, scale = own["lokr_w2_a"] @ own["lokr_w2_b"], own["alpha"] / own["lokr_w2_b"].shape[0]
    w1 = own["lokr_w1"].reshape(*own["lokr_w1"].shape, *([1] * (w2.ndim - 2)))
    product = np.kron(w1, w2)
    return scale * product.reshape(len(product), -1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", BASES)
def test_readers_get_the_trained_delta_weights(
    tiny_bases: dict[str, Path], tmp_path: Path, base: str, kind: str
) -> None:
    conv = {"conv_rank": 2} if base == "epsilon" else {}
    trained = Trained(tiny_bases[base], {**KINDS[kind], **conv})
    files = trained.exporter().export(trained.networks, tmp_path)
    assert [file.name for file in files][-1] == NATIVE
    assert files[-1].max_error < 1e-5
    assert files[-1].num_modules == len(trained.modules)

    tensors = load_file(tmp_path / NATIVE)
    keys = {module.name: getattr(module, BASES[base]) for module in trained.modules}
    assert {key.rpartition(".")[0] for key in tensors} == {*keys.values()}
    for name, key in keys.items():
        delta = trained.deltas[name].double().numpy()
        np.testing.assert_allclose(comfyui_delta(tensors, key), delta, atol=1e-5 * np.abs(delta).max())

    # LyCORIS multiplies by alpha / rank twice, ComfyUI once, so it must be 1.
    second = "hada_w1_b" if kind == "loha" else "lokr_w2_b"
    dims = [tensors.get(f"{key}.{second}", torch.ones(1)).shape[0] for key in keys.values()]
    assert [float(tensors[f"{key}.alpha"]) for key in keys.values()] == dims
    converted = (tmp_path / "demo_comfyui.safetensors").stat().st_size
    assert (tmp_path / NATIVE).stat().st_size < converted
    with safe_open(tmp_path / NATIVE, "pt") as opened:
        assert opened.metadata()["ss_network_dim"] == "3"


def test_both_forms_of_the_second_matrix_are_tested(tiny_bases: dict[str, Path], tmp_path: Path) -> None:
    endings = set[str]()
    for kind in ("lokr", "lokr-full"):
        trained = Trained(tiny_bases["epsilon"], {**KINDS[kind], "conv_rank": 2})
        trained.exporter().export(trained.networks, tmp_path / kind)
        shapes = {key: each.ndim for key, each in load_file(tmp_path / kind / NATIVE).items()}
        endings |= {f"{key.rpartition('.')[2]} {ndim}" for key, ndim in shapes.items()}
    assert {"lokr_w2 2", "lokr_w2 4", "lokr_w2_b 2"} <= endings


@pytest.mark.parametrize(("dtype", "largest"), [("float16", 4e-3), ("bfloat16", 4e-2)])
@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_a_smaller_dtype_rounds_the_trained_numbers(
    tiny_bases: dict[str, Path], tmp_path: Path, kind: str, dtype: str, largest: float
) -> None:
    trained = Trained(tiny_bases["epsilon"], KINDS[kind])
    files = trained.exporter(dtype).export(trained.networks, tmp_path)
    assert 0 < files[-1].max_error < largest
    tensors = load_file(tmp_path / NATIVE)
    matrices = {tensor.dtype for key, tensor in tensors.items() if not key.endswith(".alpha")}
    assert matrices == {getattr(torch, dtype)}


@pytest.mark.parametrize("damage", ["number", "key", "text"])
def test_R06_a_damaged_file_is_noticed_before_it_is_published(
    tiny_bases: dict[str, Path], tmp_path: Path, damage: str
) -> None:
    trained = Trained(tiny_bases["epsilon"], KINDS["lokr"])
    exporter = trained.exporter()
    exporter.export(trained.networks, tmp_path)
    tensors = load_file(tmp_path / NATIVE)
    name = next(key for key in tensors if key.endswith(".lokr_w1"))
    if damage == "number":
        tensors[name] *= 1.001
    else:
        del tensors[name]
    save_file(tensors, tmp_path / NATIVE)
    if damage == "text":
        (tmp_path / NATIVE).write_text("nothing")
    with pytest.raises(TrainingError) as excinfo:
        exporter.verify(trained.networks, tmp_path)
    assert excinfo.value.where == str(tmp_path / NATIVE)


@pytest.mark.parametrize("base", ["epsilon", "klein"])
def test_the_keys_are_those_that_comfyui_reads_by_its_golden_map(
    tiny_bases: dict[str, Path], base: str
) -> None:
    trained = Trained(tiny_bases[base], KINDS["lokr"])
    kind = {"epsilon": "Stable Diffusion 1.x and 2.x", "klein": "FLUX.2 klein"}[base]
    reader = "sd_scripts" if base == "epsilon" else "comfyui"
    key_map = golden.load(reader).maps[kind]
    read = {entry[0] for entry in key_map.values() if entry is not None}

    def key(module: LoraModule) -> str:
        return getattr(module, BASES[base])

    assert {key(module) for module in trained.modules} <= read


def test_a_run_publishes_the_file_with_the_others(make_project: Callable[..., Project]) -> None:
    lora = {"rank": 4, "alpha": 2.0, "kind": "lokr", "native_file": True}
    project = make_project(steps=1, lora=lora)
    assert run(project, InProcessLaunch()).report["launched"]
    folder = project.recipe.output_dir / "lora"
    file = folder / NATIVE
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    assert metadata["ss_network_module"] == "lycoris.kohya"
    assert json.loads(metadata["ss_network_args"])["algo"] == "lokr"
    assert NATIVE in (folder / "README.md").read_text()

    # The same run again publishes a missing file, and trains nothing.
    file.unlink()
    assert not run(project, InProcessLaunch()).report["launched"]
    assert file.is_file()
