"""tests/mutants.py: each of its faults can be planted, and changes the file."""

import mutants
import pytest
from conftest import REPO


@pytest.mark.parametrize("fault", mutants.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_one_place(fault):
    assert (REPO / fault.file).read_text().count(fault.old) == 1 and fault.new != fault.old
