"""The same project on two machines."""

from __future__ import annotations

from dataclasses import dataclass

from dagster import DagsterInstance

from tests.machines.counting_proxy import CountingProxy
from tests.machines.project import Project


@dataclass(frozen=True)
class Pair:
    """A project on two machines, with a cache and a database in common.

    Attributes:
        a: Project on the first machine.
        b: Project on the second machine, at the same paths.
        instance: Dagster's instance, opened by the test.
        proxy: Proxy through which both machines reach the S3 gateway.
    """

    a: Project
    b: Project
    instance: DagsterInstance
    proxy: CountingProxy
