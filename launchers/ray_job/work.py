"""Messages between the Ray launcher and the driver of its job, as JSON; tested with the driver."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

RESULT = "latentline-result: "
"""Start of the last line of the job's log, before a `JobResult` as JSON."""


@dataclass(frozen=True)
class RayWork:
    """The commands of one job.

    Attributes:
        argument: Path or address of the encoding, or path of the training's job file.
        number: Number of shards or machines.
        resources: CPUs and GPUs that Ray reserves for each command, such as {"CPU": 1, "GPU": 1}.
        wait_s: Longest wait, in seconds, for nodes that have the resources, and for the machines of a
            training to connect.
        grace_s: Seconds between the stop of a command and the kill of its remaining processes.
    """

    kind: Literal["encode", "train"]
    argument: str
    number: int
    resources: Mapping[str, float]
    wait_s: int
    grace_s: float

    def name(self, index: int) -> str:
        """Return the name of a command in the output."""
        return f"shard {index}/{self.number}" if self.kind == "encode" else f"machine {index}"

    def command(self, index: int, master: str = "") -> list[str]:
        """Return the arguments of a command; `master` is the meeting point of a training."""
        command = [sys.executable, "-m", "pipeline.cli", self.kind, self.argument]
        if self.kind == "encode":
            return [*command, "--shard", f"{index}/{self.number}"]
        command += ["--machines", str(self.number), "--rank", str(index)]
        command += ["--master", master, "--wait", str(self.wait_s)]
        return [*command, "--grace", f"{self.grace_s:g}"]

    def shown_resources(self) -> str:
        """Return the resources as a text such as "CPU 1, GPU 1"."""
        return ", ".join(f"{name} {amount:g}" for name, amount in self.resources.items())

    def to_json(self) -> str:
        """Return the argument of the job's entry point."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RayWork:
        """Return the work of `to_json`."""
        return cls(**json.loads(text))

    def fits(self, nodes: Iterable[Mapping[str, Any]]) -> bool:
        """Return whether `nodes` of `ray.nodes()` could run the commands if they did nothing else."""
        large_enough = [
            node
            for node in nodes
            if node["Alive"]
            and all(node["Resources"].get(name, 0) >= amount for name, amount in self.resources.items())
        ]
        return len(large_enough) >= (1 if self.kind == "encode" else self.number)


@dataclass(frozen=True)
class JobResult:
    """The result of a job.

    Attributes:
        error: Error in the form of `error_to_json`, or None. The shards of an encoding write theirs to the
            folder of the encoding.
        last_output: Last lines of the failed commands.
    """

    error: str | None = None
    last_output: Sequence[str] = ()

    def line(self) -> str:
        """Return the last line of the job's log."""
        return RESULT + json.dumps(asdict(self))


def parse_result(line: str) -> JobResult:
    """Return the result in the last line of a job's log."""
    return JobResult(**json.loads(line.removeprefix(RESULT)))
