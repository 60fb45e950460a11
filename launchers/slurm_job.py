"""How a job of Slurm ended: its state, exit status and node, as `scontrol` and `srun` report them.

`.ci/clusters` tests it with Slurm 22.05.8, except for the output of sacct, which tests write by hand.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pipeline.errors import LatentlineError, LaunchError
from pipeline.processes.launch import OUTPUT_TAIL_LINES, describe_status, error_in_output

RESUME = "start the job again: the run resumes from its last checkpoint"
"""Fix in the error of a training that failed or was cancelled."""

SUBMITTED = "Submitted batch job"
"""Beginning of the line that `sbatch` prints when Slurm has accepted the job; the id follows."""

COMMAND_S = 20.0
"""Longest wait for an answer of one of Slurm's commands."""

# A lost node never confirms the end of a job.
COMPLETING_S = 60.0
"""Longest wait for the nodes of a job to confirm its end."""

POLL_S = 1.0

_COMPLETING = "COMPLETING"

_SACCT_COLUMNS = ("State", "ExitCode", "NodeList", "Timelimit")

_CAUSES = {
    "BOOT_FAIL": ("ended because a node did not start", ""),
    "CANCELLED": ("was cancelled", ""),
    "DEADLINE": ("reached its deadline", "change --deadline in launcher.options"),
    "NODE_FAIL": ("ended because a node failed", "exclude a broken node with --exclude in launcher.options"),
    "OUT_OF_MEMORY": (
        "ran out of memory",
        "raise --mem in launcher.options of the deployment file, or lower batch_size",
    ),
    "PREEMPTED": ("was stopped in favour of another job", ""),
    "TIMEOUT": ("reached its time limit", "raise --time in launcher.options of the deployment file"),
}
"""States of a job that did not end by itself: what happened, and what else than a repetition may help."""

_TASK_FAILED = re.compile(r"srun: error: ([^\s:]+): tasks? [\d,-]+: (.+)")
_NODE_FAILED = re.compile(
    r"(?:srun: error: Node failure on|Job/step already completing or completed on) (\S+)"
)
_STEP_CANCELLED = re.compile(
    r"error: \*\*\* (?:JOB|STEP) \S+ ON (\S+) (CANCELLED|FAILED) AT \S+ (DUE TO .+?) ?\*\*\*"
)


@dataclass(frozen=True)
class JobEnd:
    """How a job ended.

    Attributes:
        state: State such as "FAILED" or "CANCELLED"; empty if Slurm no longer knows the job.
        status: Exit status, or minus the number of the signal that ended the job.
        nodes: Nodes of the job in Slurm's compact form, such as "n[1-2]".
        time_limit: Time limit, such as "04:00:00".
        silent_nodes: Nodes that have not confirmed the end of the job.
    """

    job_id: str
    state: str = ""
    status: int = 1
    nodes: str = ""
    time_limit: str = ""
    silent_nodes: str = ""


def job_id_in(submission: Iterable[str]) -> str | None:
    """Return the id of a job from the output of `sbatch`; None if Slurm has not accepted it."""
    for line in submission:
        if line.startswith(SUBMITTED):
            return line.removeprefix(SUBMITTED).split()[0]
    return None


def read_job_end(job_id: str, status: int) -> JobEnd:
    """Return how a job ended, from `scontrol` or else `sacct`; only its exit status if neither knows it."""
    # scontrol knows a job for some minutes after its end (`MinJobAge`), sacct for as long as the cluster
    # keeps records, if it keeps any.
    end = _end_known_to_scontrol(job_id)
    if end is not None and end.state != _COMPLETING:
        return end
    columns = f"--format={','.join(_SACCT_COLUMNS)}"
    _, recorded = answer("sacct", "--parsable2", "--noheader", "--allocations", f"--jobs={job_id}", columns)
    if (recorded_end := end_in_sacct(job_id, recorded)) is not None:
        return recorded_end if end is None else replace(recorded_end, silent_nodes=end.silent_nodes)
    return JobEnd(job_id, status=status) if end is None else end


def _end_known_to_scontrol(job_id: str) -> JobEnd | None:
    # The last state is known only when the nodes have confirmed the end.
    end_s = time.monotonic() + COMPLETING_S
    while True:
        _, shown = answer("scontrol", "show", "job", "--oneliner", job_id)
        end = end_in_scontrol(job_id, shown)
        if end is None or end.state != _COMPLETING or time.monotonic() > end_s:
            return end
        time.sleep(POLL_S)


def end_in_scontrol(job_id: str, text: str) -> JobEnd | None:
    """Return the end of a job from `scontrol show job --oneliner`; None without a state."""
    values = dict(re.findall(r"(\w+)=(\S*)", text))
    if "JobState" not in values:
        return None
    nodes = values.get("NodeList", "").replace("(null)", "")
    status = _status(values.get("ExitCode", ""))
    state, time_limit = values["JobState"], values.get("TimeLimit", "")
    # Of a completing job, Slurm lists only the nodes that have not confirmed its end.
    return JobEnd(
        job_id, state, status, nodes, time_limit, silent_nodes=nodes if state == _COMPLETING else ""
    )


def end_in_sacct(job_id: str, text: str) -> JobEnd | None:
    """Return the end of a job from the line of `sacct --parsable2`; None without one."""
    fields = text.splitlines()[0].split("|") if text.strip() else []
    if len(fields) != len(_SACCT_COLUMNS) or not fields[0]:
        return None
    state, exit_code, nodes, time_limit = fields
    # A cancelled job has the state "CANCELLED by 1000".
    return JobEnd(
        job_id, state.split()[0], _status(exit_code), nodes.replace("None assigned", ""), time_limit
    )


def job_error(end: JobEnd, name: str, output: Sequence[str]) -> LatentlineError:
    """Return the error of a training that failed or was cancelled.

    It is the error that `latentline train` printed, with the job and the node, otherwise a LaunchError.
    """
    cause, fix = _CAUSES.get(end.state, (f"ended {describe_status(end.status)}", ""))
    if end.state == "TIMEOUT" and end.time_limit:
        cause += f" of {end.time_limit}"
    place = f"Slurm job {end.job_id} ({name}), {_nodes(end, output)}"

    # Processes that Slurm stopped print errors too, which are not the cause.
    error = error_in_output(output)
    if error is not None and end.state not in _CAUSES:
        return type(error)(error.what, where=f"{place}\n{error.where}", fix=f"{error.fix}; {RESUME}")
    lines = [line for line in output if line.strip()][-OUTPUT_TAIL_LINES:]
    return LaunchError(
        f"the Slurm job {end.job_id} {cause}",
        where="\n".join([f"{place}, last output:", *(lines or ["(none)"])]),
        fix=f"{fix}; then {RESUME}" if fix else RESUME,
    )


def first_failed_node(output: Sequence[str]) -> tuple[str, str] | None:
    """Return the node that failed first, and what happened there, from the output of `srun`; or None."""
    for line in output:
        if match := _TASK_FAILED.search(line):
            return match[1], match[2].strip()
        if match := _NODE_FAILED.search(line):
            return match[1], "the node failed"
        if match := _STEP_CANCELLED.search(line):
            return match[1], f"{match[2]} {match[3]}".lower()
    return None


def _nodes(end: JobEnd, output: Sequence[str]) -> str:
    # A lost node also fails the tasks of other nodes, which srun then reports.
    if end.silent_nodes:
        return f"node {end.silent_nodes}: no answer, it may be lost"
    failed = first_failed_node(output)
    if failed is not None:
        return f"node {failed[0]}: {failed[1]}"
    return f"nodes {end.nodes}" if end.nodes else "on no node"


def _status(exit_code: str) -> int:
    """Return the status of Slurm's "<status>:<signal>", or minus the number of the signal."""
    match = re.fullmatch(r"(\d+):(\d+)", exit_code)
    if match is None:
        return 1
    return -int(match[2]) if int(match[2]) else int(match[1])


def answer(*command: str) -> tuple[str | None, str]:
    """Run one of Slurm's commands; return why it failed or None, and its output, empty after a failure."""
    try:
        completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not answer within {COMMAND_S:g} s", ""
    except OSError as err:
        # A cluster without accounting may have no sacct.
        return f"{command[0]}: {err.strerror}", ""
    if completed.returncode == 0:
        return None, completed.stdout.strip()
    return f"{command[0]}: {' '.join(completed.stderr.split()) or completed.returncode}", ""
