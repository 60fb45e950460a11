from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pipeline.errors import TrainingError
from pipeline.trained_lora.worker.compiled import (
    RECOMPILE_LIMIT,
    allow_recompilation,
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
