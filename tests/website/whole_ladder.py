"""The records, for the tests of the website."""

import functools

import pytest
from conftest import REPO
from ledger import records


@functools.cache
def find_ladder():
    """All records by time, without their logs, which take longer to read than all else."""
    homes = [home for home in records.record_folders(REPO / "records")
             if records.ladder_of(home) == "time"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "record_folders", lambda folder: homes)
        patch.setattr(records, "read_run", lambda path: None)
        return records.find_records(REPO / "records")
