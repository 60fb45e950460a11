"""Tables that Dagster writes and reads as the outputs and inputs of assets."""

from __future__ import annotations

import multiprocessing
import threading
import uuid
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest
from dagster import (
    Failure,
    MetadataValue,
    OutputContext,
    asset,
    build_init_resource_context,
    build_input_context,
    build_output_context,
    materialize,
    mem_io_manager,
    op,
)

from pipeline.errors import StoreError
from pipeline.outputs.folder import OutputFolder
from pipeline.storage.addresses import Address, Url
from pipeline.storage.needed_columns import NEEDED, needed_columns
from pipeline.storage.tables import SCHEMAS, SIDE_INPUT_COLUMNS, Tables, empty, frame, pandera_schema
from resources import failures
from resources.run_worker import end_with_code_server
from resources.tables import ASSET, RECIPE, TableIOManager
from tests.small_recipe import small_recipe


def manager_of(folder: Path, address: Address | None = None) -> TableIOManager:
    """Return the IO manager of one recipe, whose output is in `folder` or at an address."""
    values = {"output_dir": folder, "output_address": folder if address is None else address}
    recipe = small_recipe(folder.parent, "demo").model_copy(update=values)
    manager = TableIOManager(recipes=[recipe])
    manager.setup_for_execution(build_init_resource_context())
    return manager


def output(asset: str) -> OutputContext:
    return build_output_context(definition_metadata={RECIPE: "demo", ASSET: asset})


def test_an_input_has_the_columns_in_its_metadata_or_else_all(tmp_path: Path) -> None:
    values = {name: ["a"] if kind == pl.String else [1] for name, kind in SCHEMAS["text_embeddings"].items()}
    table = pl.DataFrame(values, schema=SCHEMAS["text_embeddings"])
    Tables(tmp_path).write("text_embeddings", table)
    manager = manager_of(tmp_path)
    columns = needed_columns("trained_lora", "text_embeddings")
    assert columns is not None

    @op(tags={ASSET: "trained_lora"})
    def train() -> None: ...

    limited = build_input_context(upstream_output=output("text_embeddings"), op_def=train)
    optional = SIDE_INPUT_COLUMNS["references"]["text_embeddings"]
    assert manager.load_input(limited).equals(table.select(name for name in columns if name not in optional))
    assert manager.load_input(build_input_context(upstream_output=output("text_embeddings"))).equals(table)


def test_a_missing_table_is_a_failure_with_a_fix(tmp_path: Path) -> None:
    context = build_input_context(upstream_output=output("raw_images"))
    with pytest.raises(Failure) as failure:
        manager_of(tmp_path).load_input(context)
    fix = "materialize raw_images first: latentline run demo --cache-only"
    assert failure.value.metadata["fix"].value == fix
    assert fix in str(failure.value.description), "Dagster's UI shows it"


def test_every_needed_column_is_in_the_schema_of_its_table() -> None:
    assert needed_columns("text_embeddings", "validated_dataset") is None
    for tables in NEEDED.values():
        for table, columns in tables.items():
            assert set(columns) < set(pandera_schema(table).columns)


def rejected_rows() -> pl.DataFrame:
    columns = empty("rejected").columns
    return frame("rejected", [dict.fromkeys(columns, "a"), dict.fromkeys(columns, "b")])


def test_an_output_is_written_and_its_file_and_number_of_rows_are_recorded(tmp_path: Path) -> None:
    context = output("rejected")
    manager_of(tmp_path).handle_output(context, rejected_rows())
    assert Tables(tmp_path).read("rejected").equals(rejected_rows())
    metadata = {name: value.value for name, value in context.get_logged_metadata().items()}
    assert metadata == {"table": str(tmp_path / "tables" / "rejected.parquet"), "dagster/row_count": 2}


def test_a_table_at_an_address_is_uploaded_when_written_and_fetched_when_read(tmp_path: Path) -> None:
    address = Url(f"memory://{uuid.uuid4().hex}/out")
    one, two = (manager_of(tmp_path / name, address) for name in ("one", "two"))
    context = output("rejected")
    one.handle_output(context, rejected_rows())
    assert context.get_logged_metadata()["table"] == MetadataValue.url(f"{address}/tables/rejected.parquet")
    assert two.load_input(build_input_context(upstream_output=output("rejected"))).equals(rejected_rows())
    one.handle_output(output("rejected"), rejected_rows().head(1))
    assert two.load_input(build_input_context(upstream_output=output("rejected"))).equals(
        rejected_rows().head(1)
    )


def test_an_outage_while_a_table_is_written_or_read_repeats_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "RETRY_DELAY_S", 0)
    outages: list[str] = []

    def away_once(method: str) -> None:
        transfer = getattr(OutputFolder, method)

        def transfer_later(self: OutputFolder, *files: str) -> None:
            if method not in outages:
                outages.append(method)
                error = StoreError("the service does not answer", where="s3://bucket", fix="try later")
                raise error from ConnectionError("refused")
            transfer(self, *files)

        monkeypatch.setattr(OutputFolder, method, transfer_later)

    away_once("upload")
    away_once("fetch")
    executed: list[str] = []

    @asset(metadata={RECIPE: "demo", ASSET: "rejected"})
    def rejected() -> pl.DataFrame:
        executed.append("rejected")
        return rejected_rows()

    @asset(io_manager_key="none")
    def count(rejected: pl.DataFrame) -> None:
        executed.append(f"{rejected.height} rows")

    manager = manager_of(tmp_path, Url(f"memory://{uuid.uuid4().hex}/out"))
    resources = {"io_manager": manager, "none": mem_io_manager}
    assert materialize([rejected, count], resources=resources).success
    assert executed == ["rejected", "rejected", "2 rows"]
    assert outages == ["upload", "fetch"]


def test_reading_a_table_outside_of_a_run_watches_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a child process of another program, which may outlive its parent."""
    Tables(tmp_path).write("rejected", rejected_rows())
    end_with_code_server.cache_clear()
    reader, _ = multiprocessing.Pipe()
    monkeypatch.setattr("multiprocessing.parent_process", lambda: SimpleNamespace(sentinel=reader))
    before = threading.active_count()
    table = manager_of(tmp_path).load_input(build_input_context(upstream_output=output("rejected")))
    assert table.equals(rejected_rows())
    assert threading.active_count() == before
