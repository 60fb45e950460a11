"""Test a random sample of mutants; `make mutants` calls this."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import Queue

import click

from tools.mutants import results
from tools.mutants.copies import ROOT, ProjectCopy
from tools.mutants.places import Mutant, function_at, lines_of_change, mutants_of, sample
from tools.mutants.results import Result

LIMIT_S = 400.0
"""Time limit of one mutant's tests."""


def changed_modules(revision: str) -> set[str]:
    """Return the files that differ from a git revision."""
    diff = subprocess.run(
        ["git", "diff", "--name-only", revision], cwd=ROOT, capture_output=True, check=True, text=True
    )
    return set(diff.stdout.splitlines())


def test_mutant(copy: ProjectCopy, mutant: Mutant, tests: list[str]) -> Result:
    """Run the tests of a mutant's module on the mutant."""
    source = copy.source(mutant.module)
    mutated = mutant.mutated(source)
    run = copy.test(tests, LIMIT_S, {mutant.module: mutated})
    outcome = "time limit" if run.at_limit else "killed" if run.failed else "survived"
    was, becomes = lines_of_change(source, mutated)
    line = mutant.span[0][0]
    return Result(mutant.module, line, mutant.operator, was, becomes, outcome, run.failed, run.seconds)


def run_mutants(mutants: Iterable[Mutant], *, workers: int, file: Path) -> None:
    """Test mutants and append each result to the file."""
    tests = results.tests_by_module()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ExitStack() as stack:
        free = Queue[ProjectCopy]()
        for number in range(workers):
            free.put(stack.enter_context(ProjectCopy(Path(folder) / str(number))))

        def tested(mutant: Mutant) -> None:
            copy = free.get()
            try:
                result = test_mutant(copy, mutant, tests[mutant.module])
            finally:
                free.put(copy)
            results.append(file, result)
            click.echo(
                f"{result.outcome:10} {result.seconds:6.1f} s  {result.module}:{result.line}  {result.by}"
            )

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(tested, mutants))


def check_killers(found: Iterable[Result]) -> str:
    """Run the tests that noticed a mutant on the unchanged project; return the first that fails, or ""."""
    killers = sorted({each.by for each in found if each.outcome == "killed" and "::" in each.by})
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ProjectCopy(Path(folder) / "0") as copy:
        return copy.test(killers, limit_s=3600).failed if killers else ""


def summarize(found: list[Result]) -> list[Result]:
    """Print the totals and the survivors; return the survivors that are not accepted."""
    reasons = results.accepted()
    survivors = [each for each in found if each.outcome == "survived"]
    keys = {each: _accepted_key(each) for each in survivors}
    unexpected = [each for each in survivors if keys[each] not in reasons]
    counted = len(found) - len(survivors) + len(unexpected)
    share = (counted - len(unexpected)) / counted if counted else 1.0
    click.echo(f"{len(found)} mutants, {len(survivors) - len(unexpected)} accepted as equivalent")
    click.echo(f"{counted - len(unexpected)} of {counted} others noticed ({share:.1%})")
    for each in unexpected:
        click.echo(f"survived: {each}\n    {keys[each]}")
    return unexpected


def _accepted_key(result: Result) -> str:
    source = (ROOT / result.module).read_text(encoding="utf-8")
    return results.accepted_key(function_at(source, result.line), result.was, result.becomes)


@click.command()
@click.option("--sample", "size", default=50, help="Number of mutants.")
@click.option("--seed", default=0, help="Seed of the sample.")
@click.option(
    "--module", "chosen", multiple=True, help="File or folder to mutate; may be given several times."
)
@click.option("--since", help="Mutate only files that differ from this git revision.")
@click.option("--workers", default=2, help="Number of mutants that are tested at the same time.")
@click.option("--results", "file", default=ROOT / "build" / "mutants.jsonl", type=click.Path(path_type=Path))
@click.option(
    "--again", is_flag=True, help="Test only survivors in the file, and mutants whose time ran out, again."
)
def main(  # noqa: PLR0913 - one parameter per option
    *,
    size: int,
    seed: int,
    chosen: tuple[str, ...],
    since: str | None,
    workers: int,
    file: Path,
    again: bool,
) -> None:
    """Test a random sample of mutants; mutants with a result in the file are not tested again."""
    modules = list(results.tests_by_module())
    if chosen:
        modules = [each for each in modules if each.startswith(chosen)]
    if since:
        modules = [each for each in modules if each in changed_modules(since)]
    every = [each for name in modules for each in mutants_of(name, (ROOT / name).read_text(encoding="utf-8"))]
    stored = {_identity(each): each for each in results.read(file)}
    places_again = {key[:3] for key, each in stored.items() if each.outcome != "killed"}
    if again:
        drawn = [each for each in every if (each.module, each.span[0][0], each.operator) in places_again]
    else:
        drawn = sample(every, size, seed)
    identities = {mutant: _identity_of(mutant) for mutant in drawn}
    if again:
        pending = [
            each for each in drawn if (old := stored.get(identities[each])) and old.outcome != "killed"
        ]
    else:
        pending = [each for each in drawn if identities[each] not in stored]
    click.echo(f"{len(pending)} mutants to test, of {len(every)} in {len(modules)} modules")
    run_mutants(pending, workers=workers, file=file)

    tested = {_identity(each): each for each in results.read(file)}
    found = [tested[each] for each in (identities.values() if not again else stored) if each in tested]
    unexpected = summarize(found)
    if failed := check_killers(found):
        sys.exit(
            f"This test fails without a mutation, so that the mutants that it noticed do not count: {failed}"
        )
    sys.exit(1 if unexpected else 0)


def _identity(result: Result) -> tuple[str, int, str, str]:
    return result.module, result.line, result.operator, result.becomes


def _identity_of(mutant: Mutant) -> tuple[str, int, str, str]:
    source = (ROOT / mutant.module).read_text(encoding="utf-8")
    return (
        mutant.module,
        mutant.span[0][0],
        mutant.operator,
        lines_of_change(source, mutant.mutated(source))[1],
    )


if __name__ == "__main__":
    main()
