"""The commands of a Ray job, and what the launcher and the driver send each other."""

from __future__ import annotations

from typing import Any

import pytest

from launchers.ray_job.work import JobResult, RayWork, parse_result


def work(kind: Any = "encode", number: int = 2, **resources: float) -> RayWork:
    return RayWork(kind, "/cache/encodings/a b", number, resources or {"CPU": 1}, wait_s=9, grace_s=2.5)


def node(*, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"Alive": alive, "Resources": resources}


def test_an_encoding_has_a_command_for_each_shard() -> None:
    commands = [work().command(index)[1:] for index in range(2)]
    assert [command[-3:] for command in commands] == [
        ["/cache/encodings/a b", "--shard", "0/2"],
        ["/cache/encodings/a b", "--shard", "1/2"],
    ]
    assert [work().name(index) for index in range(2)] == ["shard 0/2", "shard 1/2"]


def test_a_training_has_a_command_for_each_machine_with_the_meeting_point_and_the_longest_wait() -> None:
    command = work("train").command(1, "10.0.0.2:31000")
    assert command[1:] == [
        *("-m", "pipeline.cli", "train", "/cache/encodings/a b"),
        *("--machines", "2", "--rank", "1", "--master", "10.0.0.2:31000", "--wait", "9"),
        *("--grace", "2.5"),
    ]
    assert work("train").name(1) == "machine 1"


def test_work_and_result_are_the_same_after_json() -> None:
    assert RayWork.from_json(work(CPU=2, GPU=0.5).to_json()) == work(CPU=2, GPU=0.5)
    result = JobResult("an error\nof two lines", ["a", "b"])
    assert "\n" not in result.line()
    assert parse_result(result.line()) == result


@pytest.mark.parametrize(
    ("kind", "nodes", "expected"),
    [
        ("encode", [], False),
        ("encode", [node(CPU=1)], True),
        ("encode", [node(CPU=0.5), node()], False),
        ("encode", [node(CPU=8, alive=False)], False),
        ("train", [node(CPU=8)], False),
        ("train", [node(CPU=8), node(CPU=1)], True),
        ("train", [node(CPU=8), node(CPU=1, alive=False)], False),
    ],
)
def test_one_node_must_be_large_enough_for_a_shard_and_two_for_two_machines(
    kind: Any, nodes: list[dict[str, Any]], expected: bool
) -> None:
    assert work(kind).fits(nodes) is expected


def test_every_resource_must_be_on_the_same_node() -> None:
    assert not work(CPU=1, GPU=1).fits([node(CPU=4), node(GPU=4)])
    assert work(CPU=1, GPU=1).fits([node(CPU=1, GPU=1)])
