"""The records, for the tests of the website."""

import functools

import pytest
from conftest import REPO
from ledger import records


@functools.cache
def find_ladder():
    """All records, without their logs, which take longer to read than all else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "read_run", lambda path: None)
        found = records.find_records(REPO / "records")
        return [record for record in found if record.ladder == "time"]
