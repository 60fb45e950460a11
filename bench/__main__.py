"""`python -m bench`: measure, print the table, store the JSON, and list slower figures.

python -m bench                               everything, in minutes
python -m bench scan "latents cold"           figures whose names start with these
python -m bench growth                        how time and memory grow with the number of samples
python -m bench --full                        the sizes that docs/benchmarks.md quotes
python -m bench --compare bench/results/X.json    compare with an earlier run; exit status 1 if slower
python -m bench --gpu                         the figures that need a GPU, into bench/results/gpu.json
python -m bench --gpu --folder /data/bench    the same, and keep the models for the next call
python -m bench --gpu --tiny "SDXL LoRA"      the same code with tiny models, on the CPU without a GPU
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import bench.figures
from bench import results
from bench.growth import measure as growth
from bench.measure import Figure, Measured, Workplace, measure

RESULTS = Path(__file__).parent / "results"

GROWTH_ROUNDS = 3


def main() -> int:
    """Run the command line and return the exit status."""
    options = _options()
    if options.gpu:
        from bench.gpu.session import measure_all

        out = options.out or (_timed_file() if options.tiny else RESULTS / "gpu.json")
        return measure_all(
            options.names, tiny=options.tiny, rounds=options.rounds, out=out, folder=options.folder
        )
    chosen = [figure for figure in all_figures() if _is_wanted(figure, options.names)]
    stages = growth.chosen_stages(options.names)
    if not chosen and not stages:
        names = [
            *(each.name for each in all_figures()),
            *(f"growth: {stage.name}" for stage in growth.STAGES),
        ]
        sys.exit(f"no figure name starts with any of {options.names}; available: {names}")
    measured = list[Measured]()
    for number, figure in enumerate(chosen, 1):
        print(
            f"[{number}/{len(chosen)}] {figure.name}: {figure.ours}, compared with {figure.limit}", flush=True
        )
        with tempfile.TemporaryDirectory(prefix="latentline-bench-") as folder:
            measured.append(measure(figure, Workplace(Path(folder), options.full), rounds=options.rounds))
    run = results.as_json(measured, full=options.full)
    print(results.table(run))
    if stages:
        run["growth"] = _growth(stages, options)
        print(growth.table(run["growth"]))
    out = options.out or _timed_file()
    results.save(run, out)
    print(f"stored in {out}")
    return _compared(options.compare, run) if options.compare else 0


def _timed_file() -> Path:
    return RESULTS / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.json"


def _growth(stages: Sequence[growth.Stage], options: argparse.Namespace) -> dict[str, Any]:
    counts = growth.FULL_COUNTS if options.full else growth.COUNTS
    with tempfile.TemporaryDirectory(prefix="latentline-bench-") as folder:
        # Three rounds are enough: an exponent depends on much larger differences than a ratio.
        rounds = min(options.rounds, GROWTH_ROUNDS)
        return growth.as_json(growth.measure(stages, Path(folder), counts, rounds=rounds))


def all_figures() -> list[Figure]:
    """Return the figures of all modules in bench/figures, sorted by module name."""
    modules = sorted(module.name for module in iter_modules(bench.figures.__path__))
    return [figure for name in modules for figure in import_module(f"bench.figures.{name}").FIGURES]


def _is_wanted(figure: Figure, names: list[str]) -> bool:
    return not names or any(figure.name.startswith(name) for name in names)


def _compared(file: Path, run: dict[str, object]) -> int:
    changes = results.compare(results.load(file), run)
    for change in changes:
        verdict = "SLOWER" if change.slower else ""
        print(f"{change.name:34} ratio {change.before:.2f} -> {change.after:.2f} {verdict}")
    return 1 if any(change.slower for change in changes) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Compare Latentline with its limits, in alternating rounds."
    )
    parser.add_argument("names", nargs="*", help="prefixes of figure names; all figures by default")
    parser.add_argument("--full", action="store_true", help="the sizes that docs/benchmarks.md quotes")
    parser.add_argument("--rounds", type=int, default=5, help="number of measured rounds per side")
    parser.add_argument("--out", type=Path, help="JSON file; bench/results/<time>.json by default")
    parser.add_argument("--compare", type=Path, help="JSON file of an earlier run")
    parser.add_argument("--gpu", action="store_true", help="measure only the figures that need a GPU")
    parser.add_argument("--tiny", action="store_true", help="with --gpu: use tiny models to test the code")
    parser.add_argument("--folder", type=Path, help="with --gpu: folder whose models later calls use again")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
