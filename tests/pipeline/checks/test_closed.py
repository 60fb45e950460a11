"""Closed gates as one error."""

from __future__ import annotations

from pipeline.checks.closed import closed_gates_error
from pipeline.checks.findings import Finding


def finding(name: str, fix: str, rows: list[dict[str, object]], num_rows: int) -> Finding:
    numbers = {"num_rows": num_rows}
    return Finding(name, False, "error", f"{num_rows} problems", fix, rows, numbers)


def test_every_gate_is_named_with_its_first_rows_and_one_fix_for_those_that_share_it() -> None:
    rows: list[dict[str, object]] = [
        {"sample_id": f"photos/{i}.png", "bytes": None, "fix": "x"} for i in range(7)
    ]
    error = closed_gates_error(
        {
            "small/vae_latents": [
                finding("completeness", "run it", rows, 1234),
                finding("other", "run it", [], 1),
            ],
            "small/text_embeddings": [finding("captions", "write one", [], 0)],
        }
    )
    assert error.what.splitlines() == [
        "completeness: 1234 problems",
        "other: 1 problems",
        "captions: 0 problems",
    ]
    assert error.where.splitlines() == [
        "asset small/vae_latents",
        *(f"photos/{i}.png" for i in range(5)),
        "and 1,229 more for completeness",
        "and 1 more for other",
        "asset small/text_embeddings",
    ]
    assert error.fix.splitlines() == ["completeness, other: run it", "captions: write one"]
