"""Each script of the second ladder computes what the reference does, in float64, to rounding."""

import compare
import golden
import pytest
import reference
import torch
from reference_steps import STEPS

RESULTS = reference.RESULTS | STEPS
FOLDERS = {path.parent.name.split("_")[1]: path.parent.name  # by label
           for path in sorted(golden.REPO.glob("records/optimizers/20*/train_gpt.py"))}

ROUNDING = 1e-12  # of the largest entry of a tensor
NO_QUICK = [label for label in FOLDERS if label not in ("o12", "o46")]


@pytest.fixture(autouse=True)
def one_thread():
    """Batches of matrices have the bits of single ones."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def held(label, **settings):
    found = compare.hold(compare.load(FOLDERS[label]), RESULTS[label], **settings)
    assert max(found) < ROUNDING, (settings, found)


def marked(labels):
    """The labels as parameters; most are slow."""
    return [pytest.param(label, marks=pytest.mark.slow if label in NO_QUICK else ())
            for label in labels]


@pytest.mark.parametrize("label", marked(FOLDERS))
def test_first_steps(label):
    """From the script's own first weights, whose zeros hold gradients back; resumed on the way."""
    held(label, steps=12, own_init=True, resumed=7)


@pytest.mark.parametrize("label", marked(FOLDERS))
def test_first_weights(label):
    """The law of each parameter, and the signs of gains."""
    assert compare.hold_first_weights(compare.load(FOLDERS[label]), RESULTS[label]) < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("label", FOLDERS)
def test_rates_and_momentum_at_all_steps(label):
    assert compare.hold_rates(compare.load(FOLDERS[label]), RESULTS[label]) < ROUNDING


@pytest.mark.cards
@pytest.mark.parametrize("label", FOLDERS)
def test_boundaries(label):
    """A few steps around each step at which something changes, from weights unlike zero."""
    for step in compare.boundaries(RESULTS[label]):
        last = RESULTS[label].steps
        first = max(0, step - 2)
        held(label, first_step=first, steps=min(5, last - first))


@pytest.mark.cards
@pytest.mark.parametrize("label", [label for label in FOLDERS
                                   if label in ("o20", "o30", "o41", "o44", "o46")])
def test_whole_runs(label):
    """All steps, at the smallest size. Each begins with the script's weights."""
    sizes = dict(num_layers=1, model_dim=16, seq_len=16, val_seq_len=16, sequences_per_step=4,
                 sequences_per_forward=4)
    result = RESULTS[label]
    found = compare.hold(compare.load(FOLDERS[label]), result, steps=result.steps, own_init=True,
                         share_weights=True, sizes=sizes)
    assert max(found.losses, found.weights, found.validated) < ROUNDING, found
    assert found.gradients < 100 * ROUNDING, found  # sums over tokens that nearly cancel
