"""Load files of every family in the code of ComfyUI, sd-scripts and musubi-tuner, and compare delta weights.

    python -m tests.readers.real --comfyui <folder> --sd-scripts <folder> --musubi <folder>

Each folder is a checkout of the program. Its Python requirements must be installed next to those of this
project.

The script writes a tiny model of each kind with random adapters, exports it, and lets the program apply the
file. It prints how many modules got the delta weight that diffusers applies. The exit status is 1 if a module
that gets an adapter by default is misread, or if a program reads a file in another way than its map in
`golden/` states. `--write` replaces the maps: all of them, or the ones of `--kind`, which may be of another
version of the program than the others.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.trained_lora.export.lora_files import Layout
from tests.readers import golden
from tests.readers.exported import Exported, export
from tests.readers.readings import Finding, findings, unexplained

NAMES = {"comfyui": "ComfyUI", "sd_scripts": "sd-scripts", "musubi": "musubi-tuner"}
"""Readers by the name of their module in this package."""

LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "comfyui": ("comfyui", "kohya"),
    "sd_scripts": ("kohya",),
    "musubi": ("kohya",),
}
"""Layouts to try, first the one that is written for the reader."""


class Result(NamedTuple):
    """What a reader did with one file.

    Attributes:
        reader: Name of the reader's module.
        kind: Kind of model.
        layout: Layout of the file.
        findings: One finding per module.
        unexplained: Weights that the reader changed outside of the adapted modules.
        default: Modules that get an adapter by default.
    """

    reader: str
    kind: str
    layout: Layout
    findings: list[Finding]
    unexplained: list[str]
    default: set[str]

    def problems(self) -> list[str]:
        """Return what is wrong with the file, one line each."""
        lines = [f"{weight} changed outside of the adapted modules" for weight in self.unexplained]
        for each in self.findings:
            if not each.is_read and each.module in self.default:
                where = "no weight" if each.place is None else each.place.weight
                got = each.target or "nothing"
                lines.append(
                    f"{each.module}: key {each.key} changes {got}, expected {where}, error {each.error:.2g}"
                )
        return [f"{NAMES[self.reader]}, {self.kind}, {self.layout} file: {line}" for line in lines]

    def summary(self) -> str:
        """Return the number of modules read correctly, and the largest error among them."""
        read = [each for each in self.findings if each.is_read]
        error = max((each.error for each in read), default=0.0)
        return f"{len(read)} of {len(self.findings)}, error {error:.0e}"


def main() -> int:
    """Run the readers whose folders are given, and return the exit status."""
    options = _arguments()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)

    readers = {name: getattr(options, name) for name in NAMES if getattr(options, name)}
    for name, folder in readers.items():
        # After this project, so that a package of its name is not replaced.
        sys.path.append(str(folder / "src" if name == "musubi" else folder))
    results = [result for name in readers for result in _run(name, options.kind)]

    _print_table(results)
    problems = [line for result in results if _is_own(result) for line in result.problems()]
    if options.write:
        (name,) = readers
        maps = {result.kind: golden.key_map(result.findings) for result in results if _is_own(result)}
        complete = golden.Golden(NAMES[name], options.write, maps)
        golden.save(name, golden.load(name).with_maps(maps, options.write) if options.kind else complete)
    else:
        problems += [line for result in results if _is_own(result) for line in _differences(result)]
    print(
        "\n".join(problems) or "All modules that get an adapter by default are read with equal delta weights."
    )
    return 1 if problems else 0


def _arguments() -> Any:
    parser = argparse.ArgumentParser(
        prog="python -m tests.readers.real", description=(__doc__ or "").split("\n")[0]
    )
    for name, title in NAMES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=Path, help=f"folder of {title}")
    parser.add_argument("--kind", action="append", help="kind of model; repeat for several; all without it")
    parser.add_argument(
        "--write", metavar="VERSION", help="store the maps of the one given reader as this version"
    )
    options = parser.parse_args()
    given = [name for name in NAMES if getattr(options, name)]
    if not given:
        parser.error("give the folder of at least one reader")
    if options.write and len(given) > 1:
        parser.error("--write needs exactly one reader")
    return options


def _run(name: str, kinds: list[str] | None) -> list[Result]:
    """Return the results of one reader."""
    reader: Any = import_module(f"tests.readers.{name}")
    results: list[Result] = []
    for kind in kinds or reader.MODELS:
        if not reader.supports(kind):
            print(f"{NAMES[name]}: no {kind} in this version", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as folder:
            exported = export(kind, Path(folder))
            results += [_result(name, kind, exported, layout) for layout in LAYOUTS[name]]
    return results


def _result(name: str, kind: str, exported: Exported, layout: Layout) -> Result:
    reader: Any = import_module(f"tests.readers.{name}")
    reading, where = reader.read(kind, exported, layout)
    found = findings(exported, layout, where, reading)
    default = {module.name for module in exported.modules if exported.is_default(module)}
    return Result(name, kind, layout, found, list(unexplained(where, found, reading)), default)


def _is_own(result: Result) -> bool:
    """Return whether the file is the one that is written for its reader."""
    return result.layout == LAYOUTS[result.reader][0]


def _differences(result: Result) -> list[str]:
    """Return the differences from the golden map, one line each."""
    stored = golden.load(result.reader).maps.get(result.kind, {})
    read = golden.key_map(result.findings)
    where = f"{NAMES[result.reader]}, {result.kind}"
    return [
        f"{where}, {module}: reads {read.get(module)}, golden is {stored.get(module)}"
        for module in {**stored, **read}
        if read.get(module) != stored.get(module) or module not in stored
    ]


def _print_table(results: list[Result]) -> None:
    """Print the results by kind and file."""
    print("| kind | reader | file | modules read | not read |\n|---|---|---|---|---|")
    for result in results:
        ignored = [each.module for each in result.findings if not each.is_read]
        by_default = sum(module in result.default for module in ignored)
        note = f"{len(ignored)}, {by_default} of them by default: {', '.join(ignored[:3])}" if ignored else ""
        print(f"| {result.kind} | {NAMES[result.reader]} | {result.layout} | {result.summary()} | {note} |")


if __name__ == "__main__":
    sys.exit(main())
