"""tests/mutants.py: each of its faults can be planted, and changes the file."""

import mutants
import pytest
from conftest import REPO


@pytest.mark.parametrize("fault", mutants.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_one_place(fault):
    assert (REPO / fault.file).read_text().count(fault.old) == 1 and fault.new != fault.old


def test_faults_have_names_of_their_own_and_tests_that_are_there():
    assert len({fault.name for fault in mutants.FAULTS}) == len(mutants.FAULTS)
    for fault in mutants.FAULTS:
        assert all((REPO / path).exists() for path in mutants.TESTS[fault.part])
