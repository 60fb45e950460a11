"""Warnings and errors are coloured on a terminal, and nowhere else."""

from __future__ import annotations

import io

import pytest

from pipeline.reporting.colours import coloured

TEXT = """\
small_train: failed after 3 s
  warning  captions_fit: 3 captions failed
  raw_images         warning: no GPU
a warning in a sentence
StoreError: warning"""

COLOURED = """\
small_train: \x1b[31mfailed\x1b[0m after 3 s
  \x1b[33mwarning\x1b[0m  captions_fit: 3 captions failed
  raw_images         \x1b[33mwarning\x1b[0m: no GPU
a warning in a sentence
\x1b[31mStoreError\x1b[0m: warning"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_mark_warnings_and_errors_on_a_terminal_unless_they_are_turned_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert coloured(TEXT, Terminal()) == COLOURED
    assert coloured(TEXT, io.StringIO()) == TEXT
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert coloured(TEXT, Terminal()) == TEXT
    monkeypatch.setenv("NO_COLOR", "")
    assert coloured(TEXT, Terminal()) == COLOURED, "an empty value does not count"
