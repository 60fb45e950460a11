"""Packages of other projects that Python would import instead of Latentline's."""

from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("pipeline", "assets", "resources", "launchers")
"""Packages that are installed next to `latentline`. Other projects have packages of these names too."""

_FOLDER = Path(__file__).resolve().parents[1]


def shadowed_packages() -> str | None:
    """Return an error that names packages of other projects and their folders, or None without any."""
    # It imports no top-level package. Unlike `PathFinder`, it calls the finders of editable installs too.
    found = {name: _place(find_spec(name)) for name in PACKAGES}
    foreign = [name for name, place in found.items() if place not in (None, _FOLDER / name)]
    if not foreign:
        return None
    places = "\n         ".join(
        f"Python finds {name} at {found[name]} instead of {_FOLDER / name}" for name in foreign
    )
    return (
        f"packages of another project shadow Latentline's: {', '.join(foreign)}\n"
        f"  where: {places}\n"
        "  fix:   install Latentline into an environment of its own, or unset PYTHONPATH"
    )


def _place(spec: ModuleSpec | None) -> Path | None:
    """Return the folder of a package, the file of a module, or None without either."""
    if spec is None:
        return None
    # A folder without __init__.py has no origin.
    folders = list(spec.submodule_search_locations or ())
    return Path(folders[0] if folders else str(spec.origin)).resolve()
