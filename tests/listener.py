"""A listener of worker processes that collects what they report."""

from __future__ import annotations


class Listener:
    """Collects messages, and progress in lines such as `3/7 latents 1 failed`."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, text: str) -> None:
        self.lines.append(text)

    def phase(self, text: str) -> None: ...

    def progress(self, done: int, total: int, text: str, *, note: str = "") -> None:
        self.lines.append(f"{done}/{total} {text} {note}".rstrip())
