"""Each script of the second ladder computes what the reference computes, in float64, to rounding."""

import re

import compare
import golden
import pytest
import reference
import torch

FOLDERS = {}  # label → folder, of those that have a public result's number
for path in sorted(golden.REPO.glob("records/optimizers/20*/train_gpt.py")):
    label = path.parent.name.split("_")[1]
    if re.fullmatch(r"o\d+", label) and label in reference.RESULTS:
        FOLDERS[label] = path.parent.name

ROUNDING = 1e-12  # of the largest entry of a tensor


@pytest.fixture(autouse=True)
def one_thread():
    """Batches of matrices have the bits of single ones."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("label", FOLDERS)
def test_first_steps(label):
    """From the script's own first weights, whose zeros hold gradients back."""
    script = compare.load(FOLDERS[label])
    found = compare.hold(script, label, steps=8, own_init=True)
    assert max(found) < ROUNDING, found
