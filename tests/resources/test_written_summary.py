"""Where a summary is written; test_recipe_executor.py has when and where a `dagster` command prints it."""

from pathlib import Path

import pytest

from pipeline.errors import RecipeError, TableError
from pipeline.recipe import Recipe
from resources.failures import Problem
from resources.run_summary import RunSummary
from resources.written_summary import write_parts, write_summary
from tests.resources.small_runs import raises

GOOD = RunSummary(["demo_train: done \u2714"], [])
BAD = RunSummary(
    ["demo_train: failed"], [Problem("StoreError: one", "a", "b"), Problem("StoreError: two", "c", "d")]
)


def test_a_good_run_is_written_to_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    write_summary(GOOD)
    assert capfd.readouterr() == ("\ndemo_train: done \u2714\n", "")


def test_all_of_a_bad_run_is_written_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    write_summary(BAD)
    assert capfd.readouterr() == ("", f"\ndemo_train: failed\n\n{BAD.problems[0]}\n\n{BAD.problems[1]}\n")


@pytest.mark.parametrize("summary", [GOOD, BAD])
def test_a_step_of_github_actions_shows_the_summary_on_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, summary: RunSummary
) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Steps before\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    write_summary(summary)
    text = "\n\n".join([*summary.numbers, *map(str, summary.problems)])
    assert page.read_text("utf-8") == f"# Steps before\n```text\n{text}\n```\n"


def test_no_text_of_a_dataset_leaves_the_code_block_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    write_summary(
        RunSummary(
            [], [Problem("DatasetError: a\n```\n<img src=x> https://me:secret@host/x\u202e", "x", "y")]
        )
    )
    shown = page.read_text("utf-8")
    assert shown.startswith("````text\n")
    assert shown.endswith("\n````\n")
    assert "secret" not in shown
    assert "\u202e" not in shown


@pytest.fixture
def github(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


def annotations(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("::")]


@pytest.mark.usefixtures("github")
def test_M6_a_failed_step_annotates_its_section_of_the_recipe(
    run_step, small: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    small.source.parent.mkdir(parents=True, exist_ok=True)
    small.source.write_text("datasets: []\n\ntraining: {}\n", encoding="utf-8")
    write_summary(run_step(raises(TableError("no, 100%", where="tables/a.parquet", fix="train"))))
    (line,) = annotations(capfd.readouterr().err)
    file = str(small.source).replace(":", "%3A").replace(",", "%2C")
    text = "TableError: no, 100%25%0A  where: tables/a.parquet%0A  fix:   train"
    assert line == f"::error file={file},line=3,title=Latentline::{text}"


@pytest.mark.usefixtures("github")
def test_M6_an_error_in_a_recipe_annotates_its_own_line(run_step, capfd: pytest.CaptureFixture[str]) -> None:
    error = RecipeError(
        "rank must be at least 1", where="configs/small.yaml:7, training.lora.rank", fix="use 1"
    )
    write_summary(run_step(raises(error)))
    (line,) = annotations(capfd.readouterr().err)
    assert line.startswith("::error file=configs/small.yaml,line=7,title=Latentline::RecipeError")


@pytest.mark.usefixtures("github")
def test_a_problem_without_a_place_is_annotated_without_one_and_no_text_becomes_a_command(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_summary(RunSummary([], [Problem("LaunchError: a\n::set-env name=A::b\r", "x", "y")]))
    lines = annotations(capfd.readouterr().err)
    assert lines[-1].startswith("::error title=Latentline::LaunchError: a%0A::set-env")
    assert "%0D%0A" in lines[-1] or "\\r" in lines[-1]


def test_only_github_actions_gets_annotations(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    write_summary(BAD)
    assert annotations(capfd.readouterr().err) == []


def test_a_page_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
    write_summary(GOOD)
    assert capfd.readouterr().out


def test_characters_that_the_terminal_cannot_show_are_escaped(tmp_path: Path) -> None:
    with (tmp_path / "terminal").open("w", encoding="ascii") as stream:
        write_parts(GOOD.numbers, stream)
    assert (tmp_path / "terminal").read_text() == "\ndemo_train: done \\u2714\n"


def test_a_closed_stream_is_not_an_error(tmp_path: Path) -> None:
    with (tmp_path / "terminal").open("w") as stream:
        pass
    write_parts(GOOD.numbers, stream)


@pytest.mark.parametrize("name", ["\x1b[2J", "\x9b2J", "\u202egnp", "\x07"])
def test_a_name_in_the_error_of_a_bug_has_escapes(
    run_step, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    def fail() -> None:
        raise ValueError(f"no {name} at sftp://me:pass@host")

    summary = run_step(fail)
    # Dagster's own logger, which jobs do not use, has printed the error as it is.
    capfd.readouterr()
    write_summary(summary)
    error = capfd.readouterr().err
    assert f"no {name.encode('unicode_escape').decode()} at sftp://***@host" in error
    assert name not in error
