from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from pipeline.trained_lora.worker.compiled import RECOMPILE_LIMIT, allow_recompilation, fallbacks_reported


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
