"""The summary shows a run in a few lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.reporting.summary import CheckResult, RunResult, run_summary

REPORTS = {
    "raw_images": {"in": 1200, "kept": 1190, "rejected": 10, "rejected_by_reason": {"undecodable": 10}},
    "validated_dataset": {
        "in": 1190,
        "kept": 1189,
        "rejected": 1,
        "rejected_by_reason": {"caption_empty": 1},
    },
    "aspect_buckets": {"in": 1189, "kept": 1189, "rejected": 0, "num_buckets": 7},
    "vae_latents": {"in": 1189, "kept": 1188, "rejected": 1, "encoded": 1100, "reused": 88, "failed": 1},
    "text_embeddings": {"kept": 1188, "encoded": 5, "reused": 1184, "failed": 0},
    "trained_lora": {
        "run": "2da5c7e01b2a4f3d",
        "steps": 2000,
        "launched": True,
        "resumed_from": 500,
        "first_loss": 0.25,
        "last_loss": 0.125,
    },
}

NEXT = [
    "  next      latentline sample flowers --step all   draws pictures at each saved step",
    "            latentline export flowers --step N   publishes the best step in lora/",
]

CHECKS = [
    CheckResult("raw_images", "images_found", passed=True, gate=True, closes=False, text="1,200 images"),
    CheckResult("raw_images", "oddities", passed=False, gate=False, closes=False, text="2 wrong suffixes"),
    CheckResult(
        "validated_dataset", "captions_present", passed=False, gate=True, closes=False, text="1 lacks"
    ),
]


def test_a_complete_run_shows_images_caches_gates_loss_and_output_folder() -> None:
    text = run_summary(RunResult("flowers", Path("/out"), REPORTS, CHECKS))
    assert text.splitlines() == [
        "  images    1,200 found, 12 rejected (undecodable 10, caption_empty 1), 1,188 kept",
        "  buckets   7",
        "  latents   1,100 encoded, 88 reused, 1 failed",
        "  captions  5 encoded, 1,184 reused",
        "  gates     1 passed, 2 warnings",
        "  warning   raw_images, oddities: 2 wrong suffixes",
        "  warning   validated_dataset, captions_present: 1 lacks",
        "  training  2,000 steps, loss 0.2500 (first) to 0.1250 (last); resumed from step 500",
        "  run       2da5c7e01b2a4f3d",
        "  LoRA      /out/lora",
        *NEXT,
    ]


def test_pages_that_the_run_wrote_are_named(tmp_path: Path) -> None:
    for page in ("index.html", "dataset/index.html", "trained_lora/samples.jpg"):
        (tmp_path / "reports" / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "reports" / page).touch()
    lines = run_summary(RunResult("flowers", tmp_path, REPORTS, [])).splitlines()
    assert lines[-5:-2] == [
        f"  page      {tmp_path}/reports/index.html",
        f"  dataset   {tmp_path}/reports/dataset/index.html",
        f"  pictures  {tmp_path}/reports/trained_lora/samples.jpg",
    ]


def test_after_a_cache_job_the_next_command_trains() -> None:
    reports = {name: report for name, report in REPORTS.items() if name != "trained_lora"}
    last = run_summary(RunResult("flowers", Path("/out"), reports, [])).splitlines()[-1]
    assert last == "  next      latentline run flowers   trains the LoRA"


def test_steps_that_did_not_run_have_no_lines() -> None:
    closed = CheckResult("raw_images", "images_found", passed=False, gate=True, closes=True, text="none")
    text = run_summary(RunResult("flowers", Path("/out"), {"raw_images": REPORTS["raw_images"]}, [closed]))
    assert text.splitlines() == [
        "  images  1,200 found, 10 rejected (undecodable 10), 1,190 kept",
        "  gates   0 passed, 1 closed, 0 warnings",
    ]
    assert run_summary(RunResult("flowers", Path("/out"), {}, [])) == ""


@pytest.mark.parametrize("difference", ["it differs from 0123 in caption of holiday/brick.jpg", None])
def test_a_new_run_states_how_it_differs_from_the_run_before_it(difference: str | None) -> None:
    trained = {"run": "2da5", "steps": 1, "launched": True, "resumed_from": 0, "first_loss": None}
    trained |= {"difference": difference}
    text = run_summary(RunResult("flowers", Path("/out"), {"trained_lora": trained}, []))
    run = "  run       2da5" if difference is None else f"  new run   2da5; {difference}"
    assert text.splitlines() == ["  training  1 step", run, "  LoRA      /out/lora", *NEXT]


def test_a_lora_from_a_checkpoint_is_marked() -> None:
    trained = {"steps": 2, "launched": False, "from_checkpoint": True, "resumed_from": 2, "first_loss": None}
    text = run_summary(RunResult("flowers", Path("/out"), {"trained_lora": trained}, []))
    assert text.splitlines()[0] == "  training  2 steps; from the checkpoint of this step, without training"


def test_a_run_that_was_already_finished_is_marked() -> None:
    trained = {"steps": 1, "launched": False, "resumed_from": 500, "first_loss": None, "last_loss": None}
    text = run_summary(RunResult("flowers", Path("/out"), {"trained_lora": trained}, []))
    assert text.splitlines()[0] == "  training  1 step; already finished and unchanged"
