"""What a run on the way to #92 has beside weights and moments: sweeps, and the rows of a table."""

import dataclasses

import pytest
from lineage import held_since, load
from test_whole_runs import SAMPLED

FLAGS = """--preset pocket --device cpu --val_tokens 4096 --sequences_per_forward 4
    --num_iterations 6 --extension_steps 2 --save_every 4""".split()


@pytest.fixture
def script(record, tmp_path, monkeypatch, pocket_data):
    monkeypatch.chdir(tmp_path)
    script = load(record.folder, block=128)
    monkeypatch.setattr(script.signal, "signal", lambda *args: None)  # the tests keep theirs
    return script


@held_since(SAMPLED)
def test_warm_up_and_resuming_leave_no_trace(record, script, tmp_path):
    """Three runs end with the same weights, sweeps and rows, to the bit."""
    def final_state(run_id, *flags):
        assert script.main([*FLAGS, f"--run_id={run_id}", *flags]) == 0
        state = script.load_checkpoint(tmp_path / "logs" / run_id / "step-000006.pt")
        parts = state["optimizers"] | dict(model=state["model"])
        return {(part, name): x for part, of in parts.items() for name, x in of.items()}

    cold = final_state("cold", "--warmup_steps=0")
    warm = final_state("warm", "--warmup_steps=3")
    resumed = final_state("warm", "--warmup_steps=3", "--resume=logs/warm/step-000004.pt")
    first = script.GPT(script.parse_args(FLAGS)).offsets
    assert not cold["model", "offsets"].equal(first)
    for name, x in cold.items():
        assert x.equal(warm[name]) and x.equal(resumed[name]), name


@held_since(SAMPLED)
@pytest.mark.parametrize("max_document_tokens", [128, 0], ids=["documents", "one text"])
def test_more_targets_than_classes_end_a_run(record, script, capsys, max_document_tokens):
    rows = script.parse_args(FLAGS).stages
    few = dict(classes=16, max_document_tokens=max_document_tokens)
    rows = script.show(tuple(dataclasses.replace(row, **few) for row in rows))
    assert script.main([*FLAGS, "--warmup_steps=0", f"--stages={rows}"]) == 2
    error = capsys.readouterr().err
    assert "--stages: 16 classes are fewer than the " in error and error.count("\n") == 1


@held_since(SAMPLED)
@pytest.mark.parametrize("flag", ["--sweep_stride=34", "--stages=1:128:64:32:1:3:128:24"])
def test_sweeps_that_miss_ids_are_refused(record, script, capsys, flag):
    assert script.main([*FLAGS, flag]) == 2
    error = capsys.readouterr().err
    assert flag.partition("=")[0] in error and error.count("\n") == 1


@held_since(92)
@pytest.mark.parametrize("flags", ["--ngram_rows=1000002", "--ngram_rows=9", "--init=a.pt"])
def test_what_a_table_cannot_have_is_refused(record, script, capsys, flags):
    assert script.main([*FLAGS, flags]) == 2
    error = capsys.readouterr().err
    assert " must be " in error and error.count("\n") == 1
