"""Charts have the places of their points, a legend, and a text for those who do not see them."""

from __future__ import annotations

import re

import pytest

from pipeline.page.charts import MAX_POINTS, Line, line_chart


def places(chart: str) -> list[list[tuple[float, float]]]:
    lines = re.findall(r'<polyline class="[^"]+" points="([^"]+)"/>', chart)
    return [[(float(x), float(y)) for x, y in (each.split(",") for each in line.split())] for line in lines]


def test_points_are_placed_in_proportion_to_their_values() -> None:
    chart = line_chart([Line("loss", [(0, 1.0), (25, 3.0), (100, 2.0)])], title="Loss")
    [[(x0, y0), (x1, y1), (x2, y2)]] = places(chart)
    assert (x1 - x0) / (x2 - x0) == pytest.approx(0.25, abs=0.01)
    assert y1 < y2 < y0, "y grows downwards"
    assert (y0 - y2) / (y0 - y1) == pytest.approx(0.5, abs=0.01)


def test_a_logarithmic_chart_places_equal_ratios_at_equal_distances_and_omits_zero() -> None:
    chart = line_chart(
        [Line("loss", [(0, 0.0), (1, 100.0), (2, 10.0), (3, 1.0)])], title="Loss", logarithmic=True
    )
    [[(_, high), (_, middle), (_, low)]] = places(chart)
    assert low - middle == pytest.approx(middle - high, abs=0.2)
    assert ">10<" in chart


def test_the_text_alternative_has_first_last_and_lowest_value() -> None:
    chart = line_chart([Line("validation", [(0, 0.5), (200, 0.2), (400, 0.3)])], title="Loss")
    assert "validation: 0.5 at step 0, 0.3 at step 400, lowest 0.2 at step 200" in chart


def test_a_value_that_is_not_finite_is_omitted_and_a_single_point_gives_no_chart() -> None:
    assert line_chart([Line("loss", [(0, 1.0), (1, float("nan"))])], title="Loss") == ""
    [line] = places(line_chart([Line("loss", [(0, 1.0), (1, float("inf")), (2, 2.0)])], title="Loss"))
    assert len(line) == 2


def test_a_constant_curve_is_drawn_in_the_middle() -> None:
    [[(_, first), (_, last)]] = places(line_chart([Line("rate", [(0, 0.1), (9, 0.1)])], title="Rate"))
    assert first == last
    assert 100 < first < 130


def test_many_points_are_averaged_in_groups() -> None:
    points = [(float(step), float(step % 2)) for step in range(10 * MAX_POINTS)]
    [line] = places(line_chart([Line("loss", points)], title="Loss"))
    assert len(line) == MAX_POINTS
    assert len({y for _, y in line}) == 1, "each group has as many zeros as ones"


def test_labels_are_escaped() -> None:
    points = [(0.0, 1.0), (1.0, 2.0)]
    chart = line_chart([Line('<b onclick="x">', points), Line("b", points)], title="<i>")
    assert "<b" not in chart
    assert "<i>" not in chart
