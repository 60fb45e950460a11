"""The lists of mutated modules and of accepted survivors, and the file of results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tools.mutants import results
from tools.mutants.copies import ROOT
from tools.mutants.places import function_at, lines_of_change, mutants_of
from tools.mutants.results import Result

RESULT = Result(
    module="pipeline/cache/keys.py",
    line=7,
    operator="NumberReplacer",
    was="x = 1",
    becomes="x =  2",
    outcome="survived",
    by="",
    seconds=1.5,
)


def test_modules_and_tests_of_the_list_exist() -> None:
    tests = results.tests_by_module()
    names = {name.partition("::") for module, files in tests.items() for name in (module, *files)}
    missing = {
        (file, test)
        for file, _, test in names
        if not (ROOT / file).is_file() or test not in (ROOT / file).read_text(encoding="utf-8")
    }
    assert missing == set()
    assert [module for module, files in tests.items() if not files] == [], "modules without tests"


def test_each_accepted_survivor_is_a_mutant_of_today() -> None:
    accepted, found = set(results.accepted()), set[str]()
    lines = {key.partition(": ")[2].partition(" → ")[0] for key in accepted}
    for module in results.tests_by_module():
        source = (ROOT / module).read_text(encoding="utf-8")
        stripped = [line.strip() for line in source.splitlines()]
        # A mutation of several lines has its first line at the start of the key's text.
        near = {
            number
            for number, line in enumerate(stripped, 1)
            if line and any(each.startswith(line) for each in lines)
        }
        for mutant in mutants_of(module, source):
            if mutant.span[0][0] in near:
                was, becomes = lines_of_change(source, mutant.mutated(source))
                found.add(results.accepted_key(function_at(source, mutant.span[0][0]), was, becomes))
    assert sorted(accepted - found) == [], "remove these entries of accepted.toml, or correct them"


def test_each_accepted_survivor_has_a_reason() -> None:
    assert [entry for entry, reason in results.accepted().items() if len(reason.split()) < 4] == []


def test_the_last_result_of_a_mutant_counts_and_an_incomplete_line_does_not(tmp_path: Path) -> None:
    file = tmp_path / "build" / "results.jsonl"
    assert results.read(file) == []
    other = replace(RESULT, line=8)
    for each in (RESULT, other, replace(RESULT, outcome="killed", by="a test")):
        results.append(file, each)
    with file.open("a") as opened:
        opened.write('{"module": "pipe')
    assert results.read(file) == [replace(RESULT, outcome="killed", by="a test"), other]
