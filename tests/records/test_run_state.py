"""What a run on the way to #92 has beside weights and moments: averages, sweeps, signs, and the
rows of a table."""

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lineage import (
    BF16_STEP,
    SIGNS,
    TABLE,
    for_each_slowly,
    held_since,
    in_float64,
    load,
    make_model,
    since,
    tiny_flags,
)

FLAGS = """--preset pocket --device cpu --val_tokens 512 --val_seq_len 256 --num_iterations 6
    --extension_steps 2 --save_every 4 --sequences_per_step 2 --sequences_per_forward 2""".split()


@pytest.fixture
def script(record, tmp_path, monkeypatch, pocket_data):
    monkeypatch.chdir(tmp_path)
    return load(record.folder, block=128)


@for_each_slowly(since("92e"))
def test_warm_up_and_resuming_leave_no_trace(record, script, tmp_path, capsys):
    """Runs end with the same weights, averages, sweeps and rows, to the bit. One that is resumed
    where it has ended validates the same weights: averages are written once."""
    def final_state(run_id, *flags):
        assert script.main([*FLAGS, f"--run_id={run_id}", *flags]) == 0
        state = script.load_checkpoint(tmp_path / "logs" / run_id / "step-000006.pt")
        parts = state["optimizers"] | dict(model=state["model"])
        found = {(part, name): x for part, of in parts.items() for name, x in of.items()}
        (found["loss"],) = re.findall("^val_loss: (.*)", capsys.readouterr().out, re.M)
        return found

    cold = final_state("cold", "--warmup_steps=0")
    others = [
        final_state("warm", "--warmup_steps=3"),
        final_state("warm", "--warmup_steps=3", "--resume=logs/warm/step-000004.pt"),
        final_state("cold", "--warmup_steps=0", "--resume=logs/cold/step-000006.pt"),
    ]
    if record in since("92f"):
        first = script.GPT(script.parse_args(FLAGS)).offsets
        assert not cold["model", "offsets"].equal(first)
    loss = cold.pop("loss")
    for other in others:
        assert other.pop("loss") == loss
        for name, x in cold.items():
            assert x.equal(other[name]), name


@held_since(83)
def test_the_signs_that_were_drawn_are_saved(record):
    """A model that is given a checkpoint's weights draws none, as where it is to write text."""
    script = load(record.folder)
    cfg = tiny_flags(script)
    model, again = make_model(script, cfg), script.GPT(cfg)
    again.load_state_dict(model.state_dict())
    (name,) = [name for name in SIGNS if hasattr(model, name)]
    signs = getattr(model, name)
    assert signs.unique().tolist() == [-1, 1] and getattr(again, name).equal(signs)


@held_since("92f")
def test_more_targets_than_classes_end_a_run(record, script, capsys):
    stages = script.parse_args(FLAGS).stages
    few = script.show(tuple(dataclasses.replace(row, classes=16) for row in stages))
    assert script.main([*FLAGS, "--warmup_steps=0", f"--stages={few}"]) == 2
    error = capsys.readouterr().err
    assert "--stages: 16 classes are fewer than the " in error and error.count("\n") == 1
    # A sequence may have as many. Its first token is none of them.
    rows = [np.arange(17)] * 2
    assert script.stack_rows(rows, SimpleNamespace(classes=16)).tolist() == [[*range(17)]] * 2
    with pytest.raises(script.UserError, match="15 classes are fewer than the 16 targets"):
        script.stack_rows(rows, SimpleNamespace(classes=15))


@held_since(92)
@pytest.mark.parametrize("flag", [
    "--sweep_stride=34", "--stages=1:128:64:32:1:3:128:24", "--ngram_rows=1000002",
    "--ngram_rows=9", "--init=a.pt"])
def test_what_sweeps_and_table_cannot_have_is_refused(record, script, capsys, flag):
    assert script.main([*FLAGS, flag]) == 2
    error = capsys.readouterr().err
    assert flag[2:].partition("=")[0] in error and " must " in error and error.count("\n") == 1


# ---- The table of n-grams, which is no parameter


def table_of(script, rows, width):
    """The optimizer of a table on one rank, its rows and moments zero."""
    cfg, size = script.Hyperparameters(device="cpu"), dict(ngram_rows=rows, model_dim=width)
    group = script.parameter_groups(cfg)["n-grams"]
    return script.NgramTable("n-grams", group, SimpleNamespace(**size), script.Ranks(cfg))


def expected_rows(station, rows, grads, step):
    """The rows after one event, by the oracle, of the sums of their gradients."""
    p = rows.double().clone()
    state = dict(sum=grads.double(), count=0, square=torch.zeros(len(p), 1).double())
    station.adam_step(TABLE, p, state, step, station.rate(TABLE, p.shape))
    return p


@held_since(92)
def test_an_event_steps_more_rows_than_one_piece_has(record):
    """Of 400,000 rows 340,000, which it takes in pieces of 131,072."""
    script, station, step = load(record.folder), record.station, 339
    generator = torch.Generator().manual_seed(0)
    with in_float64():
        table, grads = table_of(script, 400_000, 2), torch.zeros(400_000, 2)
        rows = table.state["rows"].normal_(std=0.01, generator=generator).clone()
        order = torch.randperm(400_000, generator=generator)
        for ids in (order[:200_000], order[140_000:340_000]):
            read = table.read(ids[None])
            assert read[0].equal(rows[ids])
            read.grad = torch.randn(read.shape, generator=generator)
            grads[ids] += read.grad[0]
            table.keep_gradients()
        table.update(script.schedule(step, script.Hyperparameters()), divisor=8)
        expected = expected_rows(station, rows, grads / 8, step)
    torch.testing.assert_close(table.state["rows"], expected, rtol=1e-12, atol=1e-12)
    assert table.state["rows"][order[340_000:]].equal(rows[order[340_000:]])


@held_since(92)
def test_gradients_of_bf16_rows_are_summed_in_fp32(record, monkeypatch):
    """As on a GPU, whose rows are bf16: those of a pass, and those of the passes of an event.

    A step then has the errors of three roundings: of a pass's sums, of the row, and of both in its
    second moment. A CPU adds up bf16 in fp32 within one call, so the types of sums are noted.
    """
    script, station, step = load(record.folder), record.station, 1
    generator, types = torch.Generator().manual_seed(0), set()
    table, grads = table_of(script, 64, 16), torch.zeros(64, 16).double()
    table.state["rows"] = table.state["rows"].bfloat16()
    add = torch.Tensor.index_add_
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "index_add_",
                      lambda x, *args: types.add(x.dtype) or add(x, *args))
        for _ in range(40):
            read = table.read(torch.arange(64).repeat(30))
            read.grad = (1 + torch.randn(read.shape, generator=generator)).bfloat16()
            grads += read.grad.double().view(30, 64, 16).sum(0)
            table.keep_gradients()
        table.update(script.schedule(step, script.Hyperparameters()), divisor=8)
    assert types == {torch.float32}
    found, rows = table.state["rows"], torch.zeros(64, 16)
    expected = expected_rows(station, rows, grads / 8, step)
    assert found.dtype == torch.bfloat16
    assert ((found.double() - expected).abs() <= 3 * BF16_STEP * expected.abs()).all()
