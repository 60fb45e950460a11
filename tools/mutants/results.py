"""Results of mutants, one JSON line each, and the survivors that are accepted as equivalent."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Result:
    """What the tests did about a mutant.

    Attributes:
        module: Path of the changed file.
        line: Number of the first changed line.
        operator: Name of the mutation operator.
        was: The changed lines before the change.
        becomes: The changed lines after it.
        outcome: "killed", "survived" or "time limit"; the latter counts as killed.
        by: The first failing test.
        seconds: Duration of the tests.
    """

    module: str
    line: int
    operator: str
    was: str
    becomes: str
    outcome: str
    by: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.operator}\n    - {self.was}\n    + {self.becomes}"


def read(file: Path) -> list[Result]:
    """Return the stored results, the last one of each mutant; an incomplete last line is ignored."""
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
    results = [Result(**json.loads(line)) for line in lines]
    return list({(each.module, each.line, each.operator, each.becomes): each for each in results}.values())


def append(file: Path, result: Result) -> None:
    """Add a result at the end of the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(asdict(result), ensure_ascii=False) + "\n")


def accepted() -> dict[str, str]:
    """Return the reason of each accepted survivor by its key; see `accepted_key`."""
    return tomllib.loads((FOLDER / "accepted.toml").read_text(encoding="utf-8"))


def accepted_key(function: str, was: str, becomes: str) -> str:
    """Return the key of a mutant in `accepted.toml`, which contains no path, because files move."""
    return f"{function}: {was} → {becomes}"


def tests_by_module() -> dict[str, list[str]]:
    """Return the test files of each module: its own, then those that `modules.toml` names."""
    groups = tomllib.loads((FOLDER / "modules.toml").read_text(encoding="utf-8"))
    modules = {module: tests for group in groups.values() for module, tests in group.items()}
    return {
        module: [*_own_tests(module), *(f"tests/{each}" for each in tests)]
        for module, tests in modules.items()
    }


def _own_tests(module: str) -> list[str]:
    path = Path(module)
    own = Path("tests") / path.parent / f"test_{path.name}"
    return [own.as_posix()] if (FOLDER.parents[1] / own).is_file() else []
