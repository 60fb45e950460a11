"""Names by which runs are found."""

from __future__ import annotations

from dagster import DagsterInstance, Definitions, ScheduleDefinition, asset, define_asset_job, materialize

from resources.run_names import IMPLICIT_JOB, named_job


def test_only_a_job_that_a_person_named_has_a_name() -> None:
    @asset
    def photos() -> None: ...

    nightly = define_asset_job("nightly", [photos])
    morning = ScheduleDefinition(name="morning", cron_schedule="0 3 * * *", target=[photos])
    repository = Definitions([photos], jobs=[nightly], schedules=[morning]).get_repository_def()
    with DagsterInstance.ephemeral() as instance:
        runs = [instance.create_run_for_job(job) for job in repository.get_all_jobs()]
        runs.append(
            instance.get_run_record_by_id(materialize([photos], instance=instance).run_id).dagster_run
        )
    names = {run.job_name: named_job(run) for run in runs}
    assert names.pop("nightly") == "nightly"
    assert IMPLICIT_JOB in names
    assert [*names.values()] == [None] * 3, names
