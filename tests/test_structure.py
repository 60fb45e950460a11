"""The structure that docs/architecture.md describes: process boundaries, import cycles, inheritance."""

from __future__ import annotations

import ast
import gc
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("latentline", "pipeline", "assets", "resources", "launchers")
TORCH_LIBRARIES = {"torch", "diffusers", "transformers", "accelerate", "peft"}
LIBRARIES_WITH_PRIVATE_MODULES = (
    "dagster",
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "polars",
    "PIL",
)


def module_name(path: Path) -> str:
    """Return the dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")}


def syntax_tree(path: Path) -> ast.Module:
    # In Python 3.11, a finalizer of another test's objects that runs meanwhile ends in a SystemError about
    # the recursion depth.
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.enable()


def imported_names(module: str) -> set[str]:
    """Return the dotted names a module imports anywhere: at the top, in functions, under TYPE_CHECKING."""
    names = set[str]()
    for node in ast.walk(syntax_tree(SOURCES[module])):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def project_module(name: str) -> str | None:
    """Return the project module that an imported dotted name belongs to."""
    if name in SOURCES:
        return name
    parent = name.rpartition(".")[0]
    return parent if parent in SOURCES else None


def package(module: str) -> str:
    """Return the first-level place of a module: `pipeline.cache`, `assets`."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "pipeline" else parts[0]


IMPORTS = {module: imported_names(module) for module in SOURCES}
MODULE_GRAPH = {
    module: {other for name in names if (other := project_module(name)) is not None and other != module}
    for module, names in IMPORTS.items()
}


def test_only_worker_packages_import_torch() -> None:
    wrong = {
        module: sorted(libraries)
        for module, names in IMPORTS.items()
        if module.startswith("pipeline.") and "worker" not in module.split(".")
        if (libraries := {name.split(".")[0] for name in names} & TORCH_LIBRARIES)
    }
    assert wrong == {}


@pytest.mark.parametrize("level", ["modules", "packages"])
def test_imports_have_no_cycle(level: str) -> None:
    graph = MODULE_GRAPH
    if level == "packages":
        graph = {}
        for module, others in MODULE_GRAPH.items():
            graph.setdefault(package(module), set()).update(
                {package(each) for each in others} - {package(module)}
            )
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as err:
        pytest.fail(f"imports form a cycle: {' -> '.join(err.args[1])}")


def test_nothing_imports_a_private_module_of_a_library() -> None:
    # Documented in "Extending PyTorch", https://docs.pytorch.org/docs/stable/notes/extending.html
    documented = "torch.utils._python_dispatch.TorchDispatchMode"
    private = {
        f"{module}: {name}"
        for module, names in IMPORTS.items()
        for name in names
        if name.split(".")[0] in LIBRARIES_WITH_PRIVATE_MODULES
        if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
        if not documented.startswith(name)
    }
    assert private == set()


def test_no_class_has_more_than_three_project_ancestors() -> None:
    bases: dict[str, set[str]] = {}
    for path in SOURCES.values():
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.ClassDef):
                names = (
                    base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
                    for base in node.bases
                )
                bases.setdefault(node.name, set()).update(names)

    def chain(name: str, seen: tuple[str, ...] = ()) -> tuple[str, ...]:
        parents = [base for base in bases[name] if base in bases and base not in (name, *seen)]
        return (name, *max((chain(base, (name, *seen)) for base in parents), key=len, default=()))

    deep = [chain(name) for name in bases if len(chain(name)) > 4]
    assert deep == []


def test_the_first_level_of_the_pipeline_is_the_documented_one() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = {path.parent.name for path in (ROOT / "pipeline").glob("*/__init__.py")}
    assert {name for name in packages if f"| `{name}/` |" in page} == packages
    modules = {path.name for path in (ROOT / "pipeline").glob("*.py")}
    assert modules == {
        "__init__.py",
        "background.py",
        "errors.py",
        "escaping.py",
        "log.py",
        "migrations.py",
        "versions.py",
    }


def test_ids_of_parametrized_tests_name_their_cases(request: pytest.FixtureRequest) -> None:
    numbered = [
        item.nodeid
        for item in request.session.items
        if (case := getattr(item, "callspec", None))
        and any(re.search(rf"(^|-){name}\d+(-|$)", case.id) for name in case.params)
    ]
    assert numbered == [], "give these parameters ids=..., or a representation without an address"
