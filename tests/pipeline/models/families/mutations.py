"""Slips made on purpose in one family's file, in a copy of the sources, and which test files notice.

A slip is code at the end of the family's file that changes what one of the class's own methods answers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from pipeline.models.families import FAMILIES, Family
from pipeline.recipe import project_root

SLIPS = {
    "predict": "answer * 1.01",
    "embed": "{name: tensor * 1.01 for name, tensor in answer.items()}",
    "posterior": "type(answer)(answer.mean * 1.01, answer.std)",
    "normalise": "answer * 1.01",
    "denormalise": "answer * 1.01",
    "decode": "answer * 0.99",
    "timesteps": "answer * 0.99",
    "lora_targets": "answer[1:]",
    "kohya_layer": "type(answer)(answer.key + 'x', answer.modules)",
    "comfyui_key": "answer + 'x'",
    "prompt_arguments": "{name: flipped(name, value) for name, value in answer.items()}",
    "prompt_answer": "(answer[0].flip(-1), *answer[1:])",
    "token_limits": "{name: limit - 1 for name, limit in answer.items()}",
    "count_tokens": "(*answer[:2], answer[2] and answer[2] + 6)",
    "stack_texts": "{name: tensor.flip(-1) for name, tensor in answer.items()}",
    "shift_sigma": "answer * 0.99",
    "size_shift": "answer + 0.1",
}
"""A method to what its `answer` becomes.

Embeddings are flipped, for a factor is lost where they are normed. Counts given to a pipeline are one less.
"""

_CODE = """

def _slip_{method}(own):
    def flipped(name, value):
        if type(value) is int:
            return value - 1
        if "embeds" not in name or name.endswith("mask") or value is None:
            return value
        return [each.flip(-1) for each in value] if isinstance(value, list) else value.flip(-1)

    def changed(*args, **kwargs):
        answer = own(*args, **kwargs)
        return {slip}
    return changed


{family}.{method} = _slip_{method}({family}.{method})
"""


def module_of(family: type[Family]) -> str:
    """The name of the family's file, without its suffix."""
    return family.__module__.rsplit(".", 1)[-1]


def proving_files() -> list[str]:
    """Of all families; `test_page.py` compares them all, and is none's own."""
    return [f"test_{module_of(family)}.py" for family in FAMILIES]


def own_methods(family: type[Family]) -> list[str]:
    """The methods that the family's file defines and that there is a slip for."""
    return [method for method in SLIPS if method in vars(family)]


def copy_sources(folder: Path) -> Path:
    """What the tests of the families need, in `folder`."""
    for name in ("pipeline", "tests", "configs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(project_root() / name, folder / name, ignore=ignored)
    shutil.copy(project_root() / "pyproject.toml", folder)
    return folder


def slip(sources: Path, family: type[Family], methods: Iterable[str]) -> None:
    """Change what each of `methods` answers, in the copy's file of the family."""
    path = sources / "pipeline" / "families" / f"{module_of(family)}.py"
    code = "".join(
        _CODE.format(family=family.__name__, method=method, slip=SLIPS[method]) for method in methods
    )
    whole = (project_root() / "pipeline" / "families" / path.name).read_text(encoding="utf-8")
    path.write_text(whole + code, encoding="utf-8")


def failing(sources: Path, files: Iterable[str], *, first_only: bool = False) -> set[str]:
    """The test files, of `files`, with a test that fails on the copy."""
    report = sources / "report.xml"
    report.unlink(missing_ok=True)
    paths = [f"tests/pipeline/families/{name}" for name in files]
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}", "-m", "not slow", *paths]
    environment = {**os.environ, "PYTHONPATH": str(sources)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    if first_only:
        command.append("-x")
    done = subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
    cases = ElementTree.parse(report).getroot().iter("testcase")
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return {f"{case.get('classname', '').rsplit('.', 1)[-1]}.py" for case in failed}
