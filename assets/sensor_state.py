"""The decisions of a recipe's sensor between two ticks: what has settled, and whether a run is due."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from assets.recipe_runs import UnsuccessfulRun
from pipeline.errors import counted
from pipeline.storage.addresses import Address

if TYPE_CHECKING:
    from pipeline.raw_images.scan_fingerprint import ScanPosition

# Dagster ends a tick after 60 s by default.
SLICE_S = 20.0
"""Seconds for which one tick lists files."""

RETRY_DELAYS_S = (60.0, 300.0, 1800.0)
"""Seconds from the end of a run that did not succeed to the next attempt, for each further attempt."""


@dataclass(frozen=True)
class SensorState:
    """State of the sensor between two ticks, stored as JSON in its cursor.

    Attributes:
        seen: State of files and recipe after the last complete listing.
        since: When it was listed first, in seconds since the epoch.
        handled: Last state with which a run has succeeded, or which a gate has rejected; None once another
            one has settled. Files that return to an older state are a change again.
        position: Fields of the `ScanPosition` at which the listing of a large dataset stopped; None between
            two listings.
        listed: Fingerprints of the addresses that a listing in progress has completed.
        observed: Versions of the sources after the last complete listing, by key.
        tables: Versions of the recipe's tables and cache entries in the last tick; None before the first one.
    """

    seen: str | None = None
    handled: str | None = None
    position: dict[str, Any] | None = None
    since: float = 0.0
    listed: dict[str, str] = field(default_factory=dict[str, str])
    observed: dict[str, str] = field(default_factory=dict[str, str])
    tables: str | None = None

    @classmethod
    def from_cursor(cls, cursor: str | None) -> "SensorState":
        """Return the state in a cursor; the first state if there is none, or one of another version."""
        if not cursor:
            return cls()
        try:
            # Also the types, because anybody may edit a cursor in the UI.
            state = TypeAdapter(cls).validate_json(cursor)
            state.scan_position()
        except (TypeError, ValueError, LookupError):
            return cls()
        return state

    def to_cursor(self) -> str:
        """Return the state as the text of a cursor."""
        return json.dumps(asdict(self))

    def scan_position(self) -> "ScanPosition | None":
        """Return the position at which the listing stopped."""
        from pipeline.raw_images.scan_fingerprint import ScanPosition

        if self.position is None:
            return None
        # JSON has no tuples.
        values: Any = {**self.position, "after": tuple(self.position["after"])}
        return ScanPosition(**values)

    def list_further(self, addresses: Sequence[Address]) -> tuple["SensorState", int]:
        """Continue the listing of `addresses` for one tick; also return the number of files of the last one.

        The listing is complete if the new state has no position. Its `listed` then has all addresses.
        """
        from pipeline.raw_images.scan_fingerprint import ScanPosition, scan_slice

        position = self.scan_position()
        end_s = time.monotonic() + SLICE_S
        listed = {str(each): self.listed[str(each)] for each in addresses if str(each) in self.listed}
        for address in addresses:
            if str(address) in listed:
                continue
            result = scan_slice([address], position, seconds=end_s - time.monotonic())
            if isinstance(result, ScanPosition):
                return replace(self, position=asdict(result), listed=listed), result.num_files
            position, listed[str(address)] = None, result
        return replace(self, position=None, listed=listed), 0

    def after_tables(self, tables: str, *, now: float) -> "SensorState":
        """Return the state after a look at the versions of the recipe's tables and cache entries."""
        if self.tables in (None, tables):
            return replace(self, tables=tables)
        # Between two ticks, somebody may have changed files or recipe, started a run, and undone the change.
        # A listing does not show it, so no run that began before now proves that the tables are up to date.
        since = now if self.seen == self.handled else self.since
        return replace(self, tables=tables, handled=None, since=since)

    def settle(self, seen: str, *, now: float) -> tuple["SensorState", str | None]:
        """Return the state after a complete listing, and the reason to skip this tick if there is one."""
        # Somebody may still be copying files (docs/failures.md, O05): two listings, `settle_s` apart, must be
        # equal.
        listed = replace(self, seen=seen, position=None, listed={})
        if seen not in {self.seen, self.handled}:
            reason = f"files or recipe are changing (state {seen}): waiting until they settle"
            return replace(listed, since=now), reason

        since = self.since if seen == self.seen else now
        if seen == self.handled:
            return replace(listed, since=since), "nothing has changed since the last run"
        # From now on a run may replace the results of the handled state, which is a change if it comes back.
        return replace(listed, handled=None, since=since), None

    def after_runs(
        self, *, succeeded: str | None, failed: Sequence[UnsuccessfulRun], now: float
    ) -> tuple["SensorState", str | None]:
        """Return the next state of a settled one, and the reason to skip this tick or None to request a run.

        Args:
            succeeded: Id of a successful run that began after `since`; None if there is none.
            failed: Runs that began after `since` and ended without success, the last one first.
            now: The time, in seconds since the epoch.
        """
        handled = replace(self, handled=self.seen)
        if succeeded is not None:
            # While a new state settles, a change that is made, run and undone between its two listings goes
            # unnoticed, because nothing is known of its tables yet. A run of the job itself reads all files.
            return handled, f"nothing has changed since run {succeeded}"
        if not failed:
            return self, None

        last, attempts = failed[0], counted(len(failed), "run")
        if last.has_closed_gate:
            return (
                handled,
                f"a check stopped run {last.run_id}: a change of dataset or recipe starts the next",
            )

        ended = f"run {last.run_id} {'was cancelled' if last.is_cancelled else 'failed'}"
        if len(failed) > len(RETRY_DELAYS_S):
            return (
                self,
                f"{ended}, the last of {attempts} with this state: repair the cause, then start the job",
            )
        due = last.end_s + RETRY_DELAYS_S[len(failed) - 1]
        if now < due:
            at = datetime.fromtimestamp(due, tz=UTC).strftime("%H:%M:%S")
            return self, f"{ended}: attempt {len(failed) + 1} of {len(RETRY_DELAYS_S) + 1} at {at} UTC"
        return self, None
