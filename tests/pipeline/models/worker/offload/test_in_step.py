from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

import pytest

from pipeline.models.worker.offload.in_step import Block, is_in_step, run_in_step, wait_in_step


class Blocks:
    """Blocks that record when they are loaded and used."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._loaded = ""

    def use(self, name: str, user: str) -> None:
        wait_in_step(Block(name, partial(self._load, name)))
        assert self._loaded == name
        self.log.append(f"{user}{name}")

    @contextmanager
    def _load(self, name: str) -> Generator[None]:
        self.log.append(f"load {name}")
        self._loaded = name
        yield
        self._loaded = ""


def test_each_block_is_loaded_once_for_all_passes() -> None:
    blocks = Blocks()

    def work(user: str) -> str:
        assert is_in_step()
        for name in "01":
            blocks.use(name, user)
        return user.lower()

    assert run_in_step([partial(work, user) for user in "ABC"]) == ["a", "b", "c"]
    assert blocks.log == ["load 0", "A0", "B0", "C0", "load 1", "A1", "B1", "C1"]
    assert not is_in_step()


def test_passes_may_need_different_blocks() -> None:
    """An encoder may compute the empty caption twice, or not at all."""
    blocks = Blocks()

    def work(user: str, names: str) -> int:
        for name in names:
            blocks.use(name, user)
        return len(names)

    works = [partial(work, "A", "0101"), partial(work, "B", ""), partial(work, "C", "01")]
    assert run_in_step(works) == [4, 0, 2]
    assert blocks.log == ["load 0", "A0", "C0", "load 1", "A1", "C1", "load 0", "A0", "load 1", "A1"]


@pytest.mark.parametrize("fails_at", ["start", "block"])
def test_an_error_ends_all_passes_and_is_raised(fails_at: str) -> None:
    blocks, ended = Blocks(), list[str]()

    def work(user: str, *, fails: bool) -> None:
        try:
            if fails and fails_at == "start":
                raise ValueError("broken")
            blocks.use("0", user)
            if fails:
                raise ValueError("broken")
            blocks.use("1", user)
        finally:
            ended.append(user)

    works: list[Callable[[], None]] = [partial(work, user, fails=user == "B") for user in "ABC"]
    with pytest.raises(ValueError, match="broken"):
        run_in_step(works)
    assert sorted(ended) == (["A", "B"] if fails_at == "start" else ["A", "B", "C"])
    assert [thread for thread in threading.enumerate() if thread.name == "pass in step"] == []
    assert "load 1" not in blocks.log
