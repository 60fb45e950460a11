from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from demo.tiny_models import make_tiny_sd3
from pipeline.errors import TrainingError
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.trained_lora.worker.compiled import (
    RECOMPILE_LIMIT,
    allow_recompilation,
    compiled_blocks,
    fallbacks_reported,
    missing_for_kernels,
    require_compiler,
)


@pytest.fixture
def limited() -> Iterator[Callable[[int], None]]:
    """Return a function that sets torch's limit; it is restored after the test."""
    config = torch.compiler.config
    before = config.recompile_limit

    def limit(number: int) -> None:
        config.recompile_limit = number

    yield limit
    config.recompile_limit = before
    torch.compiler.reset()


def compiled_for_three_sizes() -> None:
    torch.compiler.reset()
    block = torch.compile(lambda tensor: tensor.sin() + 1, backend="eager", dynamic=False)
    for length in (2, 3, 4):
        block(torch.ones(length))


def test_a_block_that_is_no_longer_compiled_is_reported(limited: Callable[[int], None]) -> None:
    limited(1)
    lines: list[str] = []
    with fallbacks_reported(lines.append):
        compiled_for_three_sizes()
    assert lines
    assert "fall back to eager execution" in lines[0]
    reported = len(lines)
    compiled_for_three_sizes()
    assert len(lines) == reported, "nothing is reported after the context"


def test_all_sizes_are_compiled_within_the_raised_limit(limited: Callable[[int], None]) -> None:
    limited(1)
    allow_recompilation()
    assert torch.compiler.config.recompile_limit == RECOMPILE_LIMIT
    lines: list[str] = []
    with fallbacks_reported(lines.append):
        compiled_for_three_sizes()
    assert lines == []

    limited(1000)
    allow_recompilation()
    assert torch.compiler.config.recompile_limit == 1000


def test_a_gpu_needs_what_compiles_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler("cpu")
    header = tmp_path / "Python.h"
    monkeypatch.setattr("pipeline.trained_lora.worker.compiled.find_spec", lambda _name: object())
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing_for_kernels(header) == "a C compiler"
    with pytest.raises(TrainingError, match="compile: true needs a C compiler") as excinfo:
        require_compiler("cuda:0")
    assert "apt install gcc python3-dev" in excinfo.value.fix

    monkeypatch.setenv("CC", "cc")
    assert missing_for_kernels(header) == f"{header}, the header of Python"
    header.touch()
    assert missing_for_kernels(header) is None


def recipe(base: Path, compile_blocks: object, **values: object) -> Recipe:
    return recipe_from_mapping(
        "demo",
        {
            "datasets": [{"name": "photos", "path": "photos"}],
            "output_dir": "out",
            "model": {"base": str(base)},
            "training": {"compile": compile_blocks, **values},
        },
    )


@pytest.fixture
def tiny(tiny_sdxl: Path) -> WorkerFamily:
    return load_family(tiny_sdxl)


def missing_compiler(monkeypatch: pytest.MonkeyPatch, missing: str | None) -> None:
    monkeypatch.setattr("pipeline.trained_lora.worker.compiled.missing_for_kernels", lambda: missing)


def test_auto_compiles_on_a_gpu_with_a_compiler_only(
    tiny: WorkerFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto = recipe(tiny.model.path, "auto")
    missing_compiler(monkeypatch, None)
    blocks = compiled_blocks(tiny, auto, "cuda:0")
    assert blocks.applies
    assert "auto compiles the blocks" in blocks.reason
    assert blocks.applied(auto).training.compile is True

    on_cpu = compiled_blocks(tiny, auto, "cpu")
    assert not on_cpu.applies
    assert "runs on a CPU" in on_cpu.reason
    assert on_cpu.applied(auto).training.compile is False

    missing_compiler(monkeypatch, "a C compiler")
    without = compiled_blocks(tiny, auto, "cuda:0")
    assert not without.applies
    assert without.reason.endswith("a C compiler is missing")
    with pytest.raises(TrainingError, match="compile: true needs a C compiler"):
        compiled_blocks(tiny, recipe(tiny.model.path, True), "cuda:0")


@pytest.mark.parametrize(
    ("training", "reason"),
    [
        ({"lora": {"timestep_ranks": {}}}, "timestep_ranks is set"),
        ({"quantize": "int8", "gradient_checkpointing": True}, "quantize is set"),
        ({"compute": "int8"}, None),
        ({"offload": 0}, None),
    ],
)
def test_auto_leaves_blocks_that_other_settings_keep_from_being_compiled(
    tiny: WorkerFamily, monkeypatch: pytest.MonkeyPatch, training: dict[str, object], reason: str | None
) -> None:
    missing_compiler(monkeypatch, None)
    blocks = compiled_blocks(tiny, recipe(tiny.model.path, "auto", **training), "cuda:0")
    assert blocks.applies == (reason is None)
    assert reason is None or reason in blocks.reason


def test_auto_leaves_a_model_without_repeated_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_sd3(tmp_path / "sd3")
    missing_compiler(monkeypatch, None)
    blocks = compiled_blocks(load_family(tmp_path / "sd3"), recipe(tmp_path / "sd3", "auto"), "cuda:0")
    assert not blocks.applies
    assert "lists no blocks of SD3Transformer2DModel" in blocks.reason


@pytest.mark.parametrize("value", [False, True])
def test_a_stated_value_needs_no_reason(tiny: WorkerFamily, *, value: bool) -> None:
    blocks = compiled_blocks(tiny, recipe(tiny.model.path, value), "cpu")
    assert blocks.applies == value
    assert blocks.reason == ""
