from __future__ import annotations

import json
import os
import shutil
import stat
import weakref
from collections.abc import Callable, Iterable, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import load_file, save_file

from pipeline.errors import TrainingError
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.trained_lora.export.lora_files import (
    ADAPTER_METADATA_KEY,
    LAYOUTS,
    Layout,
    is_factor,
    layout_file,
    module_scale,
    read_lora_file,
)
from pipeline.trained_lora.export.metadata import READERS_KEY, header_metadata
from pipeline.trained_lora.worker.adapter import lora, to_lora
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.export import exporter, layouts
from pipeline.trained_lora.worker.export.exporter import Exporter
from pipeline.trained_lora.worker.export.modules import describe_networks
from pipeline.trained_lora.worker.export.read_back import loaded_weights
from tests.pipeline.trained_lora.adapters import delta_weights
from tests.pipeline.trained_lora.project import ALL_MODULES, project_in
from tests.tensor_differences import differing_tensors

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


class Trained:
    """An engine with a nonzero adapter, as after training, and its exporter."""

    def __init__(self, project: Project) -> None:
        self.job = project.job()
        self.family: WorkerFamily = load_family(self.job.base)
        self.engine = Engine(self.job, self.family)
        rng = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for weight in self.engine.weights:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=rng))
        self.exporter = Exporter(self.family, "demo", header_metadata(self.job, self.family))

    def export(self, folder: Path) -> list[exporter.ExportedFile]:
        return self.exporter.export(self.engine.networks, folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_bases: dict[str, Path]) -> Trained:
    """An adapter of all modules, which tests do not change."""
    return Trained(project_in(tmp_path_factory.mktemp("trained"), tiny_bases, lora=ALL_MODULES))


@pytest.fixture(scope="module")
def exported_once(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    trained.export(folder)
    return folder


@pytest.fixture
def files(exported_once: Path, tmp_path: Path) -> Path:
    """A folder with the files of `trained`, which the test may change."""
    return shutil.copytree(exported_once, tmp_path / "files")


def picture(base: Path, lora: Path | None, weight_name: str | None = None) -> np.ndarray[Any, Any]:
    pipe = StableDiffusionPipeline.from_pretrained(base, safety_checker=None)
    pipe.set_progress_bar_config(disable=True)
    if lora is not None:
        pipe.load_lora_weights(lora, **({"weight_name": weight_name} if weight_name else {}))
    rng = torch.Generator().manual_seed(1)
    image = pipe("a cat", height=64, width=64, num_inference_steps=4, generator=rng, output_type="np")
    return image.images[0]


def test_R06_load_lora_weights_draws_the_same_picture_from_folder_and_kohya_file(
    trained: Trained, files: Path
) -> None:
    base = trained.job.base
    plain = picture(base, None)
    adapted = picture(base, files)
    kohya = picture(base, files, "demo_kohya.safetensors")
    assert np.abs(adapted - plain).max() > 0.02
    np.testing.assert_allclose(kohya, adapted, atol=1e-4)


def test_R06_each_file_has_the_trained_alpha(trained: Trained, tmp_path: Path) -> None:
    files = trained.export(tmp_path)
    modules = describe_networks(trained.family, trained.engine.networks)
    assert [file.name for file in files] == [layout_file(layout, "demo") for layout in LAYOUTS]
    assert {file.num_modules for file in files} == {32} == {len(modules)}
    for layout in LAYOUTS:
        file = read_lora_file(tmp_path / layout_file(layout, "demo"))
        scale = 1.0 if layout == "comfyui" else 0.5
        assert {module_scale(file, module, layout) for module in modules} == {scale}
        assert file.metadata["ss_network_dim"] == "4"
        assert file.metadata["ss_network_alpha"] == "2.0"
        assert file.metadata["modelspec.architecture"].endswith("/lora")
    adapter = json.loads(
        read_lora_file(tmp_path / "pytorch_lora_weights.safetensors").metadata[ADAPTER_METADATA_KEY]
    )
    assert (adapter["unet.r"], adapter["unet.lora_alpha"]) == (4, 2.0)
    assert adapter["unet.target_modules"] == sorted(adapter["unet.target_modules"])
    assert {"unet.rank_pattern", "unet.use_dora", "unet.lora_dropout"} <= set(adapter)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_exported_files_follow_the_umask(trained: Trained, tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        trained.export(tmp_path / "lora")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "lora").iterdir()}
    assert len(modes) == len(LAYOUTS)
    assert {*modes.values()} == {mode}


def test_the_header_of_each_file_names_the_step(trained: Trained, tmp_path: Path) -> None:
    trained.exporter.export(trained.engine.networks, tmp_path, step=3)
    steps = [
        read_lora_file(tmp_path / layout_file(layout, "demo")).metadata["ss_steps"] for layout in LAYOUTS
    ]
    assert steps == ["3"] * 3


@pytest.mark.parametrize(
    "lora",
    [
        {"rank": 4, "alpha": 2.0, "ranks": [{"modules": "*.attn1.*", "rank": 6}]},
        {"rank": 4, "alpha": 4.0, "ranks": [{"modules": "*.attn2.*", "rank": 4, "alpha": 1.0}]},
        {"rank": 4, "alpha": 4.0, "rslora": True, "ranks": [{"modules": "*.to_v", "rank": 9}]},
    ],
    ids=str,
)
def test_E09_diffusers_gives_kohyas_file_the_trained_strength_with_several_alphas(
    make_project: Callable[..., Project], tmp_path: Path, lora: dict[str, Any]
) -> None:
    """diffusers takes one alpha for all layers of a UNet."""
    trained = Trained(make_project(lora=lora))
    trained.export(tmp_path)
    modules = {each.name: each for each in describe_networks(trained.family, trained.engine.networks)}
    assert len({module.alpha for module in modules.values()}) == 2
    read = loaded_weights(
        tmp_path / "demo_kohya.safetensors",
        StableDiffusionPipeline,
        trained.engine.networks,
        {},
        denoiser_name="unet",
    )
    deltas = delta_weights(trained.engine.networks[""])
    assert read.keys() == deltas.keys()
    for name, delta in deltas.items():
        torch.testing.assert_close(read[name].delta(), delta.flatten(1), rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("settings", "misread"),
    [
        ({"alpha": 4.0}, set()),
        ({"alpha": 2.0}, {"diffusers"}),
        ({"alpha": 4.0, "dora": True}, {"kohya"}),
        ({"alpha": 2.0, "dora": True}, {"kohya", "diffusers"}),
    ],
    ids=["alpha 4", "alpha 2", "alpha 4, DoRA", "alpha 2, DoRA"],
)
def test_E09_a_file_that_comfyui_applies_with_another_strength_says_so(
    make_project: Callable[..., Project], tmp_path: Path, settings: dict[str, Any], misread: set[str]
) -> None:
    project = make_project()
    lora = project.recipe.training.lora.model_copy(update=settings)
    Trained(project.changed("misread", lora=lora)).export(tmp_path)
    files = {layout: read_lora_file(tmp_path / layout_file(layout, "demo")) for layout in LAYOUTS}
    assert "diffusers does not apply" in files["comfyui"].metadata[READERS_KEY]
    del files["comfyui"]
    assert {layout for layout, file in files.items() if READERS_KEY in file.metadata} == misread
    notes = {layout: files[layout].metadata[READERS_KEY] for layout in misread}
    assert {layout: note for layout, note in notes.items() if "ComfyUI" not in note} == {}


def test_each_layout_has_the_keys_of_its_loader(files: Path) -> None:
    keys = {layout: set(read_lora_file(files / layout_file(layout, "demo")).tensors) for layout in LAYOUTS}
    path = "attentions.0.transformer_blocks.0.attn2.to_k"
    assert f"unet.down_blocks.0.{path}.lora_A.weight" in keys["diffusers"]
    assert f"lora_unet_down_blocks_0_{path.replace('.', '_')}.lora_down.weight" in keys["kohya"]
    below = path.removeprefix("attentions.0.")
    for block in ("input_blocks.1.1", "middle_block.1", "output_blocks.2.1", "output_blocks.3.1"):
        for end in ("lora_down.weight", "lora_up.weight", "alpha"):
            assert f"diffusion_model.{block}.{below}.{end}" in keys["comfyui"]
    assert len(keys["diffusers"]) == 64
    assert len(keys["kohya"]) == len(keys["comfyui"]) == 96


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_files_of_half_size_hold_the_rounded_factors(
    make_project: Callable[..., Project], tmp_path: Path, name: str, *, dora: bool
) -> None:
    project = make_project()
    lora = project.recipe.training.lora.model_copy(update={"save_dtype": name, "dora": dora})
    trained = Trained(project.changed("half", lora=lora))
    dtype = getattr(torch, name)
    files = Exporter(
        trained.family, "demo", header_metadata(trained.job, trained.family), save_dtype=name
    ).export(trained.engine.networks, tmp_path / "half")
    trained.export(tmp_path / "full")

    eps = torch.finfo(dtype).eps
    errors = {file.name: file.max_error for file in files}
    assert [name for name, error in errors.items() if not 0 < error <= 1.01 * eps] == [], errors
    for layout in LAYOUTS:
        half, full = (tmp_path / each / layout_file(layout, "demo") for each in ("half", "full"))
        exact, rounded = load_file(full), load_file(half)
        assert rounded.keys() == exact.keys()
        as_numpy = read_lora_file(half).tensors
        for key, tensor in rounded.items():
            assert tensor.dtype == (dtype if is_factor(key) else torch.float32)
            assert np.array_equal(as_numpy[key], tensor.float().numpy())
            # ComfyUI's magnitudes are multiplied by norms, which depend on the exact factors.
            assert torch.equal(tensor, exact[key].to(tensor.dtype)), key
        assert read_lora_file(half).metadata["modelspec.architecture"].endswith("/lora")
    if not dora:
        drawn = picture(trained.job.base, tmp_path / "half")
        np.testing.assert_allclose(drawn, picture(trained.job.base, tmp_path / "full"), atol=0.1)


@pytest.mark.parametrize("number", [0, 1], ids=["down", "up"])
def test_a_number_beyond_float16_is_an_error_and_not_an_infinity(
    make_project: Callable[..., Project], tmp_path: Path, number: int
) -> None:
    trained = Trained(make_project())
    with torch.no_grad():
        trained.engine.weights[number][0, 0] = 1e6
    metadata = header_metadata(trained.job, trained.family)
    half = Exporter(trained.family, "demo", metadata, save_dtype="float16")
    with pytest.raises(TrainingError, match="is too large for float16") as raised:
        half.export(trained.engine.networks, tmp_path / "half")
    assert "save_dtype: bfloat16" in raised.value.fix
    wider = Exporter(trained.family, "demo", metadata, save_dtype="bfloat16")
    assert len(wider.export(trained.engine.networks, tmp_path / "wide")) == 3


def damage_file(path: Path, damage: str) -> None:
    """Damage a LoRA file; `damage` is one of `DAMAGES`."""
    metadata, tensors = read_lora_file(path).metadata, load_file(path)
    ups = sorted(name for name in tensors if name.endswith(("lora_up.weight", "lora_B.weight")))
    same_shape = [name for name in ups if tensors[name].shape == tensors[ups[0]].shape]
    module, other = (name.rsplit(".lora_", 1)[0] for name in same_shape[:2])
    if damage == "scaled":
        tensors[ups[0]] *= 1.001
    elif damage == "missing module":
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{module}.")}
    elif damage == "missing key":
        del tensors[ups[0]]
    elif damage == "swapped modules":
        for name in list(tensors):
            if name.startswith(f"{module}.lora_"):
                twin = other + name.removeprefix(module)
                tensors[name], tensors[twin] = tensors[twin], tensors[name]
    elif damage == "wrong alpha" and path.name == layout_file("diffusers", ""):
        adapter = json.loads(metadata[ADAPTER_METADATA_KEY])
        key = next(name for name in adapter if name.endswith("lora_alpha"))
        metadata[ADAPTER_METADATA_KEY] = json.dumps({**adapter, key: 1.25 * adapter[key]})
    elif damage == "wrong alpha":
        tensors[f"{module}.alpha"] = 1.25 * tensors[f"{module}.alpha"]
    save_file(tensors, path, metadata=metadata)


DAMAGES = ("scaled", "missing module", "missing key", "swapped modules", "wrong alpha")
BOUNDED_DAMAGES = {
    *((layout, "scaled") for layout in LAYOUTS),
    *(("diffusers", damage) for damage in ("swapped modules", "wrong alpha")),
    *(("kohya", damage) for damage in ("missing module", "wrong alpha")),
    ("comfyui", "missing key"),
}
"""Each damage once, one damage in each layout, and both ways to store alpha; the others are slow."""

FLIPPED = (0.0, 0.1, 0.37, 0.8, 1.0)
BOUNDED_FLIPS = {("diffusers", 0.0), ("kohya", 0.37), ("comfyui", 1.0)}


def cases(values: Iterable[Any], bounded: Set[tuple[str, Any]]) -> list[Any]:
    """Return every layout with every value as parameters; those that are not `bounded` are slow."""
    return [
        pytest.param(
            layout,
            value,
            id=f"{layout}-{value}",
            marks=() if (layout, value) in bounded else pytest.mark.slow,
        )
        for layout in LAYOUTS
        for value in values
    ]


@pytest.mark.filterwarnings("ignore:While injecting the PEFT adapters")
@pytest.mark.parametrize(("layout", "damage"), cases(DAMAGES, BOUNDED_DAMAGES))
def test_R06_a_file_that_does_not_reproduce_the_adapter_is_an_error(
    trained: Trained, files: Path, layout: Layout, damage: str
) -> None:
    path = files / layout_file(layout, "demo")
    damage_file(path, damage)
    with pytest.raises(TrainingError) as excinfo:
        trained.exporter.verify(trained.engine.networks, files)
    assert path.name in excinfo.value.where


@pytest.mark.parametrize(("layout", "position"), cases(FLIPPED, BOUNDED_FLIPS))
def test_R06_a_flipped_byte_anywhere_in_the_numbers_is_an_error(
    trained: Trained, files: Path, layout: Layout, position: float
) -> None:
    path = files / layout_file(layout, "demo")
    file = read_lora_file(path)
    content = bytearray(path.read_bytes())
    # The first byte of a little-endian float32 holds its least significant bits.
    num_numbers = (file.num_bytes - file.header_bytes) // 4
    content[file.header_bytes + 4 * int(position * (num_numbers - 1))] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(TrainingError) as excinfo:
        trained.exporter.verify(trained.engine.networks, files)
    assert path.name in excinfo.value.where


@pytest.mark.parametrize("kind", ["dora", "loha", "lokr", "pissa"])
def test_R06_a_damaged_file_of_another_adapter_kind_is_an_error(
    make_project: Callable[..., Project], tmp_path: Path, kind: str
) -> None:
    lora: dict[str, Any] = {"rank": 2, "alpha": 2.0}
    extra = {"dora": {"dora": True}, "pissa": {"init": "pissa"}}
    adapted = Trained(make_project(lora={**lora, **extra.get(kind, {"kind": kind})}))
    files = adapted.export(tmp_path)
    assert max(file.max_error for file in files) < 1e-5
    for layout in LAYOUTS:
        path = tmp_path / layout_file(layout, "demo")
        undamaged = path.read_bytes()
        damage_file(path, "scaled")
        with pytest.raises(TrainingError) as excinfo:
            adapted.exporter.verify(adapted.engine.networks, tmp_path)
        assert path.name in excinfo.value.where
        path.write_bytes(undamaged)


def test_R06_a_converted_adapter_whose_factors_are_wrong_is_an_error(
    make_project: Callable[..., Project], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal files would hide a wrong conversion, so its delta weights are compared with the adapter's."""
    adapted = Trained(make_project(lora={"rank": 2, "alpha": 2.0, "kind": "loha"}))

    def wrong(*factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        up, down = to_lora_factors(*factors)
        return up, 1.001 * down

    to_lora_factors = to_lora._from_loha
    monkeypatch.setattr(to_lora, "_from_loha", wrong)
    with pytest.raises(TrainingError, match=r"differs from the trained one by 0\.001"):
        adapted.export(tmp_path)


def test_a_converted_lora_of_a_single_module_is_exported(
    make_project: Callable[..., Project], tmp_path: Path
) -> None:
    module = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    lora = {"rank": 2, "alpha": 2.0, "kind": "loha", "modules": [module]}
    adapted = Trained(make_project(lora=lora))
    assert [file.num_modules for file in adapted.export(tmp_path)] == [1] * len(LAYOUTS)


def test_exporting_does_not_change_the_trained_adapter(trained: Trained, tmp_path: Path) -> None:
    before = delta_weights(trained.engine.denoiser)
    trained.export(tmp_path)
    after = delta_weights(trained.engine.denoiser)
    assert differing_tensors(before, after) == []
    assert list(trained.engine.denoiser.peft_config) == ["default"]  # pyright: ignore
    assert [weight.shape for weight in trained.engine.weights if not weight.requires_grad] == []


def test_a_plain_lora_is_compared_without_multiplying_out_its_modules(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLUX.2 dev took 1,505 CPU seconds when each reader's delta weights were multiplied out."""
    products: list[str] = []
    trained_delta, read_delta = lora._delta, layouts.ModuleWeights.delta

    def counted_delta(module: Any, adapter: str) -> torch.Tensor:
        products.append("trained")
        return trained_delta(module, adapter)

    def counted_read_delta(weights: layouts.ModuleWeights) -> torch.Tensor:
        products.append("exported")
        return read_delta(weights)

    monkeypatch.setattr(lora, "_delta", counted_delta)
    monkeypatch.setattr(layouts.ModuleWeights, "delta", counted_read_delta)
    files = trained.export(tmp_path)
    assert {file.num_modules for file in files} == {32}
    assert sorted(products) == ["exported", "trained"], "one module is multiplied out on each side"


def test_only_one_trained_and_one_exported_delta_weight_are_in_memory_at_a_time(
    make_project: Callable[..., Project], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All delta weights of a large model together are larger than the model."""
    adapted = Trained(make_project(lora={"rank": 2, "alpha": 2.0, "kind": "loha"}))
    deltas: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def counting(delta: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def counted(*arguments: Any) -> torch.Tensor:
            alive.append(sum(ref() is not None for ref in deltas))
            result = delta(*arguments)
            deltas.append(weakref.ref(result))
            return result

        return counted

    monkeypatch.setattr(lora, "_delta", counting(lora._delta))
    monkeypatch.setattr(layouts.ModuleWeights, "delta", counting(layouts.ModuleWeights.delta))
    adapted.export(tmp_path)
    assert len(deltas) == 32 * 2
    assert max(alive) <= 2


def test_R06_convolutions_are_compared_exactly_although_a_gpu_multiplies_them_in_tf32(
    make_project: Callable[..., Project], tmp_path: Path
) -> None:
    """peft computes a convolution's product as a convolution, which cuDNN does with 10 bits per factor."""
    adapted = Trained(make_project(lora={"rank": 4, "alpha": 2.0, "conv_rank": 4}))

    def rough(*factors: torch.Tensor) -> torch.Tensor:
        ten_bits = [(each.view(torch.int32) & -(2**13)).view(torch.float32) for each in factors]
        return torch.nn.functional.conv2d(*ten_bits)

    convolutions = [
        module for _, module in lora.lora_modules(adapted.engine.denoiser) if hasattr(module, "conv_fn")
    ]
    assert convolutions
    for module in convolutions:
        module.conv_fn = rough  # pyright: ignore[reportAttributeAccessIssue]
    errors = {file.name: file.max_error for file in adapted.export(tmp_path)}
    assert {name: error for name, error in errors.items() if error > exporter.RELOAD_TOLERANCE} == {}
