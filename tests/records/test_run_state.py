"""What a run on the way to #92 has beside weights and moments: averages, sweeps, signs, and the
rows of a table."""

import dataclasses
import gc
import re
from types import SimpleNamespace

import golden
import numpy as np
import pytest
import torch
from record_folders import for_each, for_each_slowly, having, load, one_of_each_kind

BF16_STEP = 2.0**-8  # largest relative error of rounding to bf16's 8 significant bits
FLAGS = """--preset pocket --device cpu --val_tokens 512 --val_seq_len 256 --num_iterations 6
    --extension_steps 2 --save_every 4 --sequences_per_step 2 --sequences_per_forward 2""".split()
TABLES = for_each(one_of_each_kind(having("NgramTable"), "NgramTable"))


@pytest.fixture
def script(record, tmp_path, monkeypatch, pocket_data):
    monkeypatch.chdir(tmp_path)
    return load(record)


@pytest.mark.slow
@for_each(one_of_each_kind(having("averages"), "ShardedOptimizer", "NgramTable", "Place"))
def test_warm_up_and_resuming_leave_no_trace(record, script, tmp_path, capsys):
    """Runs end with the same weights, averages, sweeps and rows, to the bit. One that is resumed
    where it has ended validates the same weights: averages are written once."""
    def final_state(run_id, *flags):
        gc.freeze()  # the run's search for cycles leaves out what is imported
        assert script.main([*FLAGS, f"--run_id={run_id}", *flags]) == 0
        state = script.load_checkpoint(tmp_path / "logs" / run_id / "step-000006.pt")
        parts = state["optimizers"] | dict(model=state["model"])
        found = {(part, name): x for part, of in parts.items() for name, x in of.items()}
        log = (tmp_path / "logs" / run_id / "log.txt").read_text()
        found["loss"] = re.findall("^val_loss: (.*)", log, re.M)[-1]
        return found, state["place"]

    cold, place = final_state("cold", "--warmup_steps=0")
    whole = final_state("warm", "--warmup_steps=1")
    (tmp_path / "logs" / "warm" / "step-000006.pt").unlink()  # a run does not go back beside it
    others = [
        whole,
        final_state("warm", "--warmup_steps=1", "--resume=logs/warm/step-000004.pt"),
        final_state("cold", "--warmup_steps=0", "--resume=logs/cold/step-000006.pt"),
    ]
    loss = cold.pop("loss")
    for other, other_place in others:
        assert other.pop("loss") == loss and other_place == place
        for name, x in cold.items():
            assert x.equal(other[name]), name
    if hasattr(script, "first_sweeps"):  # they go on from step to step
        sweeps = script.Place(*place).sweeps
        assert len(sweeps) == 2 and sweeps != tuple(script.first_sweeps(272, 2))


@for_each(one_of_each_kind(having("next_batches"), "train")[-1:])
def test_a_run_that_plans_ahead_saves_all_steps_that_had_data(
    record, script, tmp_path, write_shard, capsys, monkeypatch
):
    """The planner meets the end of the data a step early. With more of them the run goes on."""
    draw = np.random.default_rng(0)
    for index in range(2):
        tokens = draw.integers(0, 50, 2500)  # few, as the head draws few classes
        tokens[::150] = 256
        write_shard(tmp_path / f"some_{index}.bin", tokens)
    flags = [*FLAGS, "--run_id=x", "--warmup_steps=0", "--save_every=100", "--resume=auto"]
    with monkeypatch.context() as patch:  # they are not refused at once
        patch.setattr(script, "check_data", lambda *args: None)
        assert script.main([*flags, f"--train_files={tmp_path}/some_0.bin"]) == 2
    assert "the data end before the run" in capsys.readouterr().err
    log = (tmp_path / "logs" / "x" / "log.txt").read_text()
    trained = re.findall(r"^step:(\d+)/\d+ train_loss", log, re.M)
    (saved,) = (tmp_path / "logs" / "x").glob("step-*.pt")
    assert saved.name == f"step-{int(trained[-1]):06d}.pt" and len(trained) == int(trained[-1]) > 1
    assert script.main([*flags, f"--train_files={tmp_path}/some_*.bin"]) == 0


@for_each(one_of_each_kind(having("sign_rows"), "hash_signs"))
def test_the_signs_that_were_drawn_are_saved(record, tmp_path):
    """A model that is given a checkpoint's weights draws none, as where it is to write text."""
    script = load(record)
    golden.write_tables(tmp_path)
    cfg = golden.tiny(script, tmp_path)
    model, again = golden.make_model(script, cfg), script.GPT(cfg)
    again.load_state_dict(model.state_dict())
    (name,) = [name for name, _ in model.named_buffers() if name.endswith("signs")]
    signs = getattr(model, name)
    assert signs.unique().tolist() == [-1, 1] and getattr(again, name).equal(signs)


@for_each_slowly(one_of_each_kind(having("candidates"), "candidates", "cut_rows"))
def test_more_targets_than_classes_end_a_run(record, script, capsys, monkeypatch):
    rows = [dataclasses.replace(row, classes=16) for row in script.POCKET["stages"]]
    monkeypatch.setitem(script.POCKET, "stages", tuple(rows))
    assert script.main([*FLAGS, "--warmup_steps=0"]) == 2
    error = capsys.readouterr().err
    assert "stages: 16 classes are fewer than the " in error and error.count("\n") == 1


@TABLES
@pytest.mark.parametrize("flag", [
    "--sweep_stride=34", "--ngram_rows=9", "--init=a.pt"])
def test_what_sweeps_and_table_cannot_have_is_refused(record, script, capsys, flag):
    expect_refusal(script, flag, capsys)


@for_each(one_of_each_kind(having("ask_ahead"), "NgramTable"))
def test_a_table_too_large_for_a_checkpoint_is_not_saved(record, script, capsys):
    """From #92 on, whose table is."""
    expect_refusal(script, "--ngram_rows=1000002", capsys)


def expect_refusal(script, flag, capsys):
    assert script.main([*FLAGS, flag]) == 2
    error = capsys.readouterr().err
    assert flag[2:].partition("=")[0] in error and " must " in error and error.count("\n") == 1


# ---- The table of n-grams, which is no parameter


def table_of(script, rows, width, device="cpu", ranks=None):
    """The optimizer of a table, rows and moments zero; on one rank unless `ranks` says which."""
    cfg, size = script.Hyperparameters(device=device), dict(ngram_rows=rows, model_dim=width)
    group = script.parameter_groups(cfg)["n-grams"]
    return script.NgramTable("n-grams", group, SimpleNamespace(**size), ranks or script.Ranks(cfg))


@TABLES
def test_a_rank_may_have_a_single_row(record):
    ranks = SimpleNamespace(rank=3, world_size=4, device=torch.device("cpu"))
    table = table_of(load(record), 4, 2, ranks=ranks)
    assert not table.state["rows"].any() and table.count == 0


def stepped_rows(rows, grads, group, lr):
    """The rows after their first step by the means of these gradients, in float64.

    It is Adam's without a first moment. Its second moment is one number a row.
    """
    rows, grads = rows.double(), grads.double()
    new_share = 1 - group.betas[1]
    square = new_share * grads.square().mean(-1, keepdim=True)
    change = lr * new_share**0.5 * grads / (square.sqrt() + 1e-10)
    shrinking = torch.where(change * rows > 0, rows, 0)
    return rows - change - group.decay * lr**2 * shrinking


@TABLES
def test_an_update_steps_the_rows_that_were_read(record):
    """Of 4,000 rows 3,400, of which 600 were read in both passes."""
    script, step = load(record), 1
    generator = torch.Generator().manual_seed(0)
    now = script.schedule(step, script.Hyperparameters())
    with golden.in_float64():
        table, grads = table_of(script, 4000, 2), torch.zeros(4000, 2)
        rows = table.state["rows"].normal_(std=0.01, generator=generator).clone()
        order = torch.randperm(4000, generator=generator)
        for ids in (order[:2000], order[1400:3400]):
            read = table.read(ids[None])
            assert read[0].equal(rows[ids])
            read.grad = torch.randn(read.shape, generator=generator)
            grads[ids] += read.grad[0]
            table.keep_gradients()
        table.update(now, divisor=8)
        lr = table.group.lr * now.lr_factor
        expected = stepped_rows(rows, grads / 8, table.group, lr)
    found = table.state["rows"]
    read = order[:3400]
    torch.testing.assert_close(found[read], expected[read], rtol=1e-12, atol=1e-12)
    assert found[order[3400:]].equal(rows[order[3400:]])


@TABLES
def test_gradients_of_bf16_rows_are_summed_in_fp32(record, monkeypatch):
    """As on a GPU, whose rows are bf16: those of a pass, and those of the passes of an update.

    A step then has the errors of three roundings: of a pass's sums, of the row, and of both in its
    second moment. A CPU adds up bf16 in fp32 within one call, so the types of sums are noted.
    """
    script, step = load(record), 1
    generator, types = torch.Generator().manual_seed(0), set()
    now = script.schedule(step, script.Hyperparameters())
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
        table.update(now, divisor=8)
    assert types == {torch.float32}
    found, rows = table.state["rows"], torch.zeros(64, 16)
    expected = stepped_rows(rows, grads / 8, table.group, table.group.lr * now.lr_factor)
    assert ((found.double() - expected).abs() <= 3 * BF16_STEP * expected.abs()).all()
