from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file
from torch import Tensor, nn

from demo.tiny_models import TINY
from pipeline.errors import TrainingError
from pipeline.models.worker.offload import streamed_blocks as module
from pipeline.models.worker.offload.streamed_blocks import (
    StreamedBlocks,
    repeated_blocks,
    streamed_blocks,
    weights_loaded,
)
from pipeline.processes.launch import LocalLaunch
from pipeline.recipe import LoraSettings
from pipeline.recipe.errors import find_mistakes
from pipeline.recipe.yaml_document import dotted
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.worker.adapter.lora import adapter_state, collect
from pipeline.trained_lora.worker.base_model import stream_denoiser
from pipeline.trained_lora.worker.engine import Engine
from tests.pipeline.models.worker.offload.streamed import PoisoningStore
from tests.pipeline.trained_lora.project import PROMPTS
from tests.pipeline.trained_lora.runs import run_until
from tests.pipeline.trained_lora.worker.engine_steps import engine_of, one_step
from tests.tensor_differences import differing_tensors

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

FAMILIES = [
    "Stable Diffusion XL",
    "Stable Diffusion 3 and 3.5",
    "FLUX.1 dev",
    "Z-Image",
    "Chroma",
    "HiDream",
    "Anima",
    "Wan 2.1 (image)",
]

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)

# diffusers and torchao warn about their own deprecated names.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overwrite every evicted copy with NaN, and allow a single slot so that each block is evicted."""
    monkeypatch.setattr(module, "host_store", PoisoningStore)
    monkeypatch.setattr(module, "NUM_SLOTS", 1)


@pytest.fixture
def project_of(
    make_project: Callable[..., Project], tmp_path: Path, tiny_bases: dict[str, Path]
) -> Callable[..., Project]:
    """Return a function that creates a project with a tiny model of a family."""

    def make(kind: str, **training: Any) -> Project:
        TINY[kind](tmp_path / "base")
        tiny_bases[kind] = tmp_path / "base"
        return make_project(prediction=kind, sizes={"64x64": 4}, **training)

    return make


def streamed_of(engine: Engine) -> tuple[StreamedBlocks, PoisoningStore]:
    streamed = streamed_blocks(engine.denoiser)
    assert streamed is not None
    assert isinstance(streamed.store, PoisoningStore)
    return streamed, streamed.store


def trained(project: Project, name: str, steps: int, **training: Any) -> tuple[list[Any], Any, Engine]:
    """Return the outcomes of some steps, the LoRA and the optimizer's moments after them, and the engine."""
    job = project.changed(name, steps=steps, **training).job()
    engine = engine_of(job)
    outcomes = [one_step(engine, job, step) for step in range(steps)]
    optimizer = engine.state(steps).optimizer["optimizer"]["state"]
    moments = [each[key] for each in optimizer.values() for key in ("exp_avg", "exp_avg_sq")]
    return outcomes, [*collect(engine.networks, adapter_state).values(), *moments], engine


def assert_equal(project: Project, *, steps: int = 2, offload: int = 0, **training: Any) -> None:
    """Assert that streamed blocks give the same losses, gradients and LoRA, bit for bit.

    AdamW's moments are equal only if all gradients are.
    """
    outcomes, state, _ = trained(project, "resident", steps, **training)
    streamed_outcomes, streamed_state, engine = trained(
        project, "streamed", steps, offload=offload, **training
    )
    streamed, store = streamed_of(engine)
    assert streamed_outcomes == outcomes
    assert len(state) == len(streamed_state) > 0
    assert differing_tensors(state, streamed_state) == []
    assert max(float(tensor.abs().max()) for tensor in state) > 0
    assert len(streamed.names) == len(repeated_blocks(engine.denoiser)) - offload
    assert store.most_on_device == len(store.slots) == 1
    assert store.num_copies > steps * len(streamed.names)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
def test_streamed_blocks_of_a_unet_train_the_same_lora(
    make_project: Callable[..., Project], checkpointing: bool
) -> None:
    assert_equal(make_project(), gradient_checkpointing=checkpointing)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_streamed_blocks_of_each_family_train_the_same_lora_in_20_steps(
    project_of: Callable[..., Project], kind: str, checkpointing: bool
) -> None:
    assert_equal(project_of(kind), steps=20, gradient_checkpointing=checkpointing)


def test_the_gradient_of_a_blocks_output_loads_a_block_that_has_its_checkpoint_inside(
    project_of: Callable[..., Project],
) -> None:
    """The recomputation of Chroma's blocks does not call the blocks, so no hook of theirs runs before it."""
    assert_equal(project_of("Chroma"), gradient_checkpointing=True)


@needs_torchao
@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("kind", ["int8", "fp8_torchao"])
def test_streamed_packed_weights_train_the_same_lora(
    make_project: Callable[..., Project], kind: str, checkpointing: bool
) -> None:
    assert_equal(make_project(), quantize=kind, gradient_checkpointing=checkpointing)


@needs_torchao
@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
def test_streamed_weights_of_eight_bit_products_train_the_same_lora(
    make_project: Callable[..., Project], checkpointing: bool
) -> None:
    assert_equal(make_project(), compute="int8", gradient_checkpointing=checkpointing)


OTHER_KINDS: dict[str, dict[str, Any]] = {
    "lokr": {"kind": "lokr"},
    "loha": {"kind": "loha"},
    "oft": {"kind": "oft", "rank": 16, "alpha": 16.0},
    "dora": {"dora": True},
    "pissa": {"init": "pissa"},
    "text encoders": {"text_encoders": {}},
}


@pytest.mark.parametrize(
    ("lora", "checkpointing"),
    [
        pytest.param(
            lora,
            checkpointing,
            id=f"{name}-{'recomputed' if checkpointing else 'stored'}",
            marks=() if name == "dora" and not checkpointing else pytest.mark.slow,
        )
        for name, lora in OTHER_KINDS.items()
        for checkpointing in (False, True)
    ],
)
def test_streamed_blocks_train_the_same_adapter_of_other_kinds(
    make_project: Callable[..., Project], lora: dict[str, Any], checkpointing: bool
) -> None:
    settings = LoraSettings.model_validate_json(json.dumps({"rank": 4, "alpha": 2.0, **lora}))
    assert_equal(make_project(), steps=3, lora=settings, gradient_checkpointing=checkpointing)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "training"),
    [
        ("FLUX.1 dev", {}),
        ("FLUX.1 dev", {"gradient_checkpointing": True}),
        pytest.param("Stable Diffusion XL", {"compute": "int8"}, marks=needs_torchao),
        pytest.param("Stable Diffusion XL", {"quantize": "int8"}, marks=needs_torchao),
        ("Stable Diffusion XL", {}),
        ("Stable Diffusion XL", {"gradient_checkpointing": True}),
    ],
    ids=str,
)
def test_streamed_blocks_that_are_compiled_train_the_same_lora(
    project_of: Callable[..., Project], kind: str, training: dict[str, Any]
) -> None:
    assert_equal(project_of(kind), compile=True, **training)


def test_some_blocks_may_stay_on_the_device(make_project: Callable[..., Project]) -> None:
    assert_equal(make_project(), offload=2)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, {"dora": True}], ids=["lora", "dora"])
def test_a_run_with_previews_and_validation_that_resumes_exports_the_same_files(
    make_project: Callable[..., Project], lora: dict[str, Any]
) -> None:
    """Each process of the run keeps another number of blocks on the device."""
    project = make_project(
        sizes={"64x64": 4},
        datasets={"photos": {"validation_fraction": 0.5}},
        lora={"rank": 4, "alpha": 2.0, **lora},
        steps=4,
        sample_every=2,
        sample_prompts=PROMPTS,
        validate_every=2,
        gradient_checkpointing=True,
    )
    resident = project.job()
    assert run_until(resident)[0]
    assert not run_until(project.changed("streamed", offload=0).job(), stop_after=2)[0]
    streamed = project.changed("streamed", offload=1).job()
    assert run_until(streamed)[0]

    expected, actual = RunLayout(resident.folder), RunLayout(streamed.folder)
    result = json.loads(actual.result.read_text(encoding="utf-8"))
    assert result["warnings"] == []
    assert result["resumed_from"] == 2
    assert result["output_change"] == json.loads(expected.result.read_text(encoding="utf-8"))["output_change"]
    previews = sorted(path.name for path in expected.previews.iterdir())
    assert len(previews) > 2
    for name in previews:
        assert (expected.previews / name).read_bytes() == (actual.previews / name).read_bytes()
    assert actual.validation.read_bytes() == expected.validation.read_bytes() != b""

    for path in expected.exported.glob("*.safetensors"):
        before, after = load_file(path), load_file(actual.exported / path.name)
        assert before.keys() == after.keys() != set()
        assert differing_tensors(before, after) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_with_streamed_blocks_train_the_same_lora(make_project: Callable[..., Project]) -> None:
    settings = {"sizes": {"64x64": 4}, "steps": 3, "gradient_accumulation": 1, "dropout": 0.0}
    project = make_project(gradient_checkpointing=True, **settings)
    weights: list[dict[str, Tensor]] = []
    for offload in ("none", 0):
        job = project.changed(f"offload {offload}", num_processes=2, batch_size=1, offload=offload).job()
        LocalLaunch(job.recipe.accelerate)("pipeline.trained_lora.worker", job.write())
        weights.append(load_file(RunLayout(job.folder).exported / "pytorch_lora_weights.safetensors"))
    resident, streamed = weights
    assert resident.keys() == streamed.keys() != set()
    assert differing_tensors(resident, streamed) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")
@pytest.mark.parametrize("quantize", ["none", pytest.param("int8", marks=needs_torchao)])
def test_two_processes_hold_the_streamed_blocks_once(
    make_project: Callable[..., Project], quantize: str
) -> None:
    project = make_project(sizes={"64x64": 4}, gradient_accumulation=1)
    job = project.changed("streamed", num_processes=2, batch_size=1, quantize=quantize, offload=0).job()
    file = job.write()
    LocalLaunch(job.recipe.accelerate)("tests.pipeline.trained_lora.worker.streamed_shares", file)
    one, other = (json.loads(file.with_name(f"rank-{rank}.json").read_text()) for rank in range(2))
    assert one["mapped"].keys() == other["mapped"].keys()
    assert one["blocks"] == other["blocks"]

    for result in (one, other):
        resident, proportional = (
            sum(size[name] for size in result["mapped"].values()) * 1024 for name in ("Rss", "Pss")
        )
        # Whole pages are mapped, at least one for each block.
        assert sum(result["blocks"]) <= resident <= sum(result["blocks"]) + 4096 * len(result["blocks"])
        assert proportional == pytest.approx(resident / 2, rel=0.01)
        assert result["open"] == 0


def test_an_evicted_weight_is_nan_until_it_is_loaded(make_project: Callable[..., Project]) -> None:
    engine = engine_of(make_project().changed("streamed", offload=0).job())
    streamed, _ = streamed_of(engine)
    for name in streamed.names:
        block = engine.denoiser.get_submodule(name)
        frozen = {key: weight for key, weight in block.named_parameters() if not weight.requires_grad}
        assert [key for key, weight in frozen.items() if not weight.isnan().all()] == [], name
        with weights_loaded(engine.denoiser, f"{name}.attn1.to_q"):
            assert [key for key, weight in frozen.items() if weight.isnan().any()] == [], name
        trained = {key: weight for key, weight in block.named_parameters() if weight.requires_grad}
        assert [key for key, weight in trained.items() if weight.isnan().any()] == [], name


class Unlisted(nn.Module):
    """A denoiser that names no repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


def test_a_denoiser_without_repeated_blocks_is_an_error() -> None:
    with pytest.raises(TrainingError, match="a denoiser of repeated blocks, got Unlisted") as excinfo:
        stream_denoiser(Unlisted(), 0, "cpu")
    assert excinfo.value.fix == "set training.offload: none; to save memory, set training.quantize"


SMALLEST: dict[str, Any] = {
    "datasets": [{"name": "p", "path": "p"}],
    "output_dir": "o",
    "model": {"base": "a/b"},
}


@pytest.mark.parametrize(
    ("training", "what"),
    [
        ({"offload": -1}, "must be none, auto or a number, at least 0, got -1"),
        ({"offload": "half"}, 'at least 0, got "half"'),
        ({"offload": True}, "at least 0, got true"),
        ({"offload": 0, "quantize": "nf4"}, "with quantize: nf4 needs gradient_checkpointing: true"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_streamed_are_recipe_errors(training: dict[str, Any], what: str) -> None:
    (mistake,) = find_mistakes({**SMALLEST, "training": training})
    assert dotted(mistake.path) == "training.offload"
    assert what in mistake.what
