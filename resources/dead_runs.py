"""`python -m resources.dead_runs`: end the runs of this machine that died without reporting it.

deploy/compose.yaml runs it before the code server. When the container of the code server is replaced, the
processes of its runs are killed with it, and the daemon in another container cannot see that. It also creates
the tables of a new database, before several programs could do so at the same time.
"""

from dagster import DagsterInstance

from resources.run_launcher import end_dead_runs

if __name__ == "__main__":
    with DagsterInstance.get() as instance:
        end_dead_runs(instance)
