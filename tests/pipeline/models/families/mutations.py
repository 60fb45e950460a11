"""Mutations of one family's parts in a copy of the sources, and the test files that notice them.

A mutation replaces a part in the family's declaration by a subclass that changes one method's result, so that
other families keep the part as it is.
"""

from __future__ import annotations

import multiprocessing
import shutil
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

from pipeline.models.families import FamilySpec
from pipeline.models.worker.family import part_class
from pipeline.models.worker.text import CachedPromptConditioner
from pipeline.recipe import project_root
from tests.pipeline.models.families.run_copy import OUTPUT_FILE, run_tests
from tools.docs.families_page import module_of

DECLARED = {
    ("lora", "targets"): "result[1:]",
    ("lora", "kohya_layer"): "type(result)(result.key + 'x', result.modules)",
    ("lora", "comfyui_key"): "result + 'x'",
    ("text", "token_limits"): "{name: limit - 1 for name, limit in result.items()}",
}
"""Mutations of a declaration: part and method, and the expression that replaces the `result`."""

TORCH_SIDE = {
    ("codec", "posterior"): "type(result)(result.mean * 1.01, result.std)",
    ("codec", "normalise"): "result * 1.01",
    ("codec", "denormalise"): "result * 1.01",
    ("codec", "decode"): "result * 0.99",
    ("conditioner", "embed"): "{name: tensor * 1.01 for name, tensor in result.items()}",
    ("conditioner", "embed_with_images"): "{name: tensor * 1.01 for name, tensor in result.items()}",
    ("conditioner", "prompt_arguments"): "{name: changed(name, value) for name, value in result.items()}",
    ("conditioner", "encoded_prompt"): "(result[0].flip(-1), *result[1:])",
    ("conditioner", "count_tokens"): "(*result[:2], result[2] and result[2] + 6)",
    ("conditioner", "stack"): "{name: tensor.flip(-1) for name, tensor in result.items()}",
    ("denoiser", "predict"): "result * 1.01",
    ("process", "shift_sigma"): "result * 0.99",
    ("process", "size_shift"): "result + 0.1",
}
"""Mutations of the torch side.

Embeddings that a pipeline gets are flipped, because a factor is lost where they are normalised. Counts
that a pipeline gets are one less.
"""

_PRELOADED = [
    "accelerate",
    "diffusers.loaders",
    "diffusers.models.autoencoders",
    "peft",
    "torch",
    "transformers",
]
"""Libraries that each process inherits; importing them takes longer than most tests of a family."""

_FIELDS = {
    "codec": "latents=replace({name}.latents, codec={path!r})",
    "conditioner": "text=replace({name}.text, conditioner={path!r})",
    "denoiser": "denoiser_call={path!r}",
    "process": "noise=replace({name}.noise, process={path!r})",
}
"""Arguments of `dataclasses.replace` that put another class into the declaration."""

_DECLARED_CODE = """

class {subclass}(type({name}.{part})):
    def {method}(self, *args, **kwargs):
        result = super().{method}(*args, **kwargs)
        return {expression}


{name} = replace({name}, {part}={subclass}(**vars({name}.{part})))
"""

_TORCH_CODE = """

class {subclass}(part_class({path!r})):
    def {method}(self, *args, **kwargs):
        def changed(name, value):
            if type(value) is int:
                return value - 1
            if "embeds" not in name or name.endswith("mask") or value is None:
                return value
            return [each.flip(-1) for each in value] if isinstance(value, list) else value.flip(-1)

        result = super().{method}(*args, **kwargs)
        return {expression}
"""


@dataclass(frozen=True)
class Mutation:
    """One changed method of one part of a family."""

    spec: FamilySpec
    part: str
    method: str

    def __str__(self) -> str:
        return f"{module_of(self.spec)}-{self.part}-{self.method}"


def mutations_of(spec: FamilySpec) -> list[Mutation]:
    """Return the mutations that the family's own tests should notice.

    A noise process is the family's own matter only if it overrides the method itself.
    """
    applicable = [Mutation(spec, part, method) for part, method in DECLARED]
    for part, method in TORCH_SIDE:
        kind = part_class(_path(spec, part))
        is_own_method = method in vars(kind) and kind.__module__.endswith(f".families.{module_of(spec)}")
        if part == "process" and not is_own_method:
            continue
        if method == "embed_with_images" and (spec.references is None or spec.references.in_text is None):
            continue
        if method == "prompt_arguments" and issubclass(kind, CachedPromptConditioner) and not is_own_method:
            continue
        if hasattr(kind, method):
            applicable.append(Mutation(spec, part, method))
    return applicable


def copy_sources(folder: Path) -> Path:
    """Copy what the tests of the families need into `folder`."""
    for name in ("pipeline", "tests", "configs", "demo", "tools"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(project_root() / name, folder / name, ignore=ignored)
    shutil.copy(project_root() / "pyproject.toml", folder)
    return folder


def apply(sources: Path, spec: FamilySpec, mutations: Iterable[Mutation]) -> None:
    """Write mutations of one family into the copy; several of one part build on each other."""
    name, module = _constant(spec), module_of(spec)
    declared = "\nfrom dataclasses import replace\n"
    torch_side = "\nfrom pipeline.models.worker.family import part_class\n"
    paths = {part: _path(spec, part) for part in _FIELDS}
    for number, mutation in enumerate(mutations):
        part, method, subclass = mutation.part, mutation.method, f"Mutated{number}"
        if (part, method) in DECLARED:
            declared += _DECLARED_CODE.format(
                name=name, part=part, method=method, subclass=subclass, expression=DECLARED[part, method]
            )
            continue
        torch_side += _TORCH_CODE.format(
            path=paths[part], method=method, subclass=subclass, expression=TORCH_SIDE[part, method]
        )
        paths[part] = f"families.{module}:{subclass}"
        declared += f"{name} = replace({name}, {_FIELDS[part].format(name=name, path=paths[part])})\n"

    for folder, code in (("families", declared), ("worker/families", torch_side)):
        file = Path("pipeline/models") / folder / f"{module}.py"
        path = project_root() / file
        original = path.read_text(encoding="utf-8") if path.exists() else ""
        (sources / file).write_text(original + code, encoding="utf-8")


def failing(sources: Path, files: Iterable[str], *, first_only: bool = False) -> set[str]:
    """Return the test files, of `files`, with a test that fails on the copy."""
    report = sources / "report.xml"
    report.unlink(missing_ok=True)
    arguments = [f"--junitxml={report}", f"--rootdir={sources}"]
    # pytest cannot rewrite the assertions of a plugin that the preloaded libraries import, such as anyio.
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    arguments += [f"{sources}/tests/pipeline/models/families/{name}" for name in files]
    if first_only:
        arguments.append("-x")

    exit_status = _runner().submit(_run_in_fork, sources, arguments).result()
    output = (sources / OUTPUT_FILE).read_text(encoding="utf-8")
    assert report.is_file(), output[-2000:]
    assert exit_status in (0, 1), output[-2000:]

    cases = ElementTree.parse(report).getroot().iter("testcase")
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return {f"{case.get('classname', '').rsplit('.', 1)[-1]}.py" for case in failed}


@cache
def _runner() -> ProcessPoolExecutor:
    """Return a process with a fork server of its own; that of this process may have preloaded the project."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _run_in_fork(sources: Path, arguments: list[str]) -> int | None:
    """Run the copy's tests in a new process that inherits `_PRELOADED`, and return its exit status."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(_PRELOADED)
    process = server.Process(target=run_tests, args=(sources, arguments))
    process.start()
    process.join()
    return process.exitcode


def _path(spec: FamilySpec, part: str) -> str:
    """Return the import path of a part of the torch side."""
    paths = {
        "codec": spec.latents.codec,
        "conditioner": spec.text.conditioner,
        "denoiser": spec.denoiser_call,
        "process": spec.noise.process,
    }
    return paths[part]


def _constant(spec: FamilySpec) -> str:
    """Return the name of the declaration in its module."""
    module = sys.modules[f"pipeline.models.families.{module_of(spec)}"]
    return next(name for name, value in vars(module).items() if value is spec)
