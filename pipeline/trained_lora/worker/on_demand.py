"""Tensors by name that are never all in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor


class OnDemand(Mapping[str, Tensor]):
    """Each tensor is computed whenever it is asked for, and not kept."""

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]) -> None:
        """By name what computes each."""
        self._makers = dict(makers)

    def __getitem__(self, name: str) -> Tensor:
        """The tensor, computed anew.

        Raises:
            KeyError: None has that name.
        """
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        """The names; nothing is computed."""
        return iter(self._makers)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._makers)
