"""Steps to a public record: each computes what the next one does without the next one's idea."""

import dataclasses
import inspect

import golden
import pytest
import torch

STEPS = 8  # of a tiny run
WHOLE = 2 * golden.LENGTH  # tokens: a window that reaches back over a whole sequence


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Train a record's tiny run in float64. Returns its losses, and its weights by their names."""
    def run(name, change, **settings):
        script = golden.load(golden.RECORDS[name])
        golden.shrink_blocks(script)
        change(script)
        cfg = golden.tiny(script, tmp_path, num_iterations=STEPS, **settings)
        tiny = golden.TinyRun(script, cfg)
        tiny.train()
        return torch.tensor([*tiny.losses, tiny.validations[-1:]]), tiny.weights()

    with golden.in_float64():
        yield run


def nothing(script):
    """The script as it is."""


def without_windows(script):
    """In each step a token sees its whole document."""
    schedule = script.schedule

    def with_whole_windows(step, cfg):
        now = schedule(step, cfg)
        fields = ["window"] if hasattr(now, "window") else ["long_window", "short_window"]
        return dataclasses.replace(now, **dict.fromkeys(fields, WHOLE))

    script.schedule = with_whole_windows


def with_open_gates(script):
    """No head of attention is gated."""
    class OpenGate(script.CastedLinear):
        def forward(self, x):
            return torch.full_like(super().forward(x), torch.inf)  # its sigmoid is 1

    source = inspect.getsource(script.CausalSelfAttention.__init__)
    assert source.count("CastedLinear") == 1  # the gate
    script.CastedLinear = OpenGate


@pytest.mark.slow
@pytest.mark.parametrize("step, following, change", [
    ("2025-07-18_TritonMuon", "2025-08-23_28a_ScaledRotary", nothing),
    ("2025-08-23_28a_ScaledRotary", "2025-08-23_SparseAttnGate", with_open_gates),
    ("2025-09-03_29a_PackedDocuments", "2025-09-03_FA3", without_windows),
])
def test_without_the_new_idea_a_step_computes_what_the_one_before_it_does(
        step, following, change, train):
    losses, weights = train(step, change if change is without_windows else nothing)
    new_losses, new_weights = train(following, change)
    torch.testing.assert_close(new_losses, losses, rtol=1e-10, atol=0)
    for name, weight in weights.items():
        error = (new_weights[name] - weight).abs().max()
        assert error <= 1e-9 * weight.abs().max(), name
