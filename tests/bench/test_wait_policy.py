"""The table of the measured steps."""

from __future__ import annotations

from bench.wait_policy import LOADS, POLICIES, Taken, table

FEW, MANY = [policy for policy in POLICIES if policy != "PASSIVE"]


def measured(few: tuple[float, ...], many: tuple[float, ...]) -> dict[str, dict[str, list[Taken]]]:
    """Measurements of all loads, with these ratios to PASSIVE."""
    return {
        load: {
            "PASSIVE": [Taken(0.5, 0.9)],
            FEW: [Taken(0.5 * few[number], 0.9)],
            MANY: [Taken(0.5 * many[number], 0.9)],
        }
        for number, load in enumerate(LOADS)
    }


def test_the_table_has_the_median_step_of_each_load_and_policy() -> None:
    steps = measured((0.8, 1.0, 1.0), (0.6, 1.0, 1.0))
    steps["one process"]["PASSIVE"] += [Taken(0.7, 1.1), Taken(9.0, 9.0)]
    assert table(steps)[2] == "| one process | 0.7000 s (1.1000) | 0.4000 s (0.9000) | 0.3000 s (0.9000) |"
