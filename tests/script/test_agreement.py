"""Ranks that agree, the length of a resumed run, other versions, the source that ran."""

import re
from pathlib import Path

import pytest
import tiny_runs
import torch
from conftest import script_module
from tiny_runs import one_error, tiny

import train_gpt

run, data_flags = tiny_runs.run, tiny_runs.data_flags  # fixtures


# ---- What ranks must have in common


@pytest.fixture
def facts_of(run, monkeypatch):
    """`facts_of(**flags)`: what a rank that is started with these flags tells the others."""
    told = []

    def tell(ranks, facts):
        told.append(facts)
        raise KeyboardInterrupt  # it does not train

    def facts_of(**flags):
        with monkeypatch.context() as patch:
            patch.setattr(train_gpt.Ranks, "agree", tell)
            assert run(**flags).code == 130
        return told[-1]

    return facts_of


@pytest.fixture
def agree(monkeypatch):
    """`agree(*facts)` holds those of several ranks against each other."""
    def agree(*of_ranks):
        ranks = object.__new__(train_gpt.Ranks)
        ranks.world_size = len(of_ranks)
        monkeypatch.setattr(train_gpt.dist, "all_gather_object",
                            lambda found, facts: found.__setitem__(slice(None), of_ranks))
        ranks.agree(of_ranks[0])

    return agree


@pytest.mark.parametrize("flags, named", [
    (dict(seed=5), "--seed: rank 0 has 0, rank 1 has 5;"),
    (dict(muon_lr=0.3), "--muon_lr: rank 0 has 0.08, rank 1 has 0.3;"),
    (dict(train_files="other*.bin"), "--train_files: ")])
def test_ranks_that_differ_do_not_start(facts_of, agree, tiny_shards, flags, named):
    tiny_shards([9000], name="other")
    facts = facts_of()
    agree(facts, facts)
    agree(facts, facts_of(head_chunks=2))  # each card takes its own, and computes the same
    with pytest.raises(train_gpt.UserError, match=f"ranks differ in {re.escape(named)}"):
        agree(facts, facts_of(**flags))


def test_files_of_one_name_must_be_of_one_content(
    run, facts_of, agree, tiny_shards, tmp_path, monkeypatch
):
    """Data, also at their ends, weights to begin with, checkpoints, the script."""
    run(save_every=2, num_iterations=2)
    weights = Path("logs/x/step-000002.pt")
    flags = dict(run_id="y", init=weights)
    facts = facts_of(**flags)
    other = torch.load(weights, weights_only=True)
    other["model"]["smear_lambda"] += 1
    torch.save(other, weights)
    with pytest.raises(train_gpt.UserError, match="ranks differ in the weights of --init: "):
        agree(facts, facts_of(**flags))
    resumed = dict(resume="auto", num_iterations=2)
    facts = facts_of(**resumed)
    other["model"]["smear_lambda"] += 1
    torch.save(other, weights)
    with pytest.raises(train_gpt.UserError, match="ranks differ in the checkpoint: "):
        agree(facts, facts_of(**resumed))
    for name, what in (("tiny_train_000001.bin", "training"), ("tiny_val_000001.bin", "valid")):
        facts = facts_of(run_id="z")
        shard = bytearray((tmp_path / name).read_bytes())
        shard[-6] ^= 1  # of the third token from the end
        (tmp_path / name).write_bytes(shard)
        with pytest.raises(train_gpt.UserError, match=f"ranks differ in the {what}"):
            agree(facts, facts_of(run_id="z"))
    facts = facts_of(run_id="z")
    monkeypatch.setattr(train_gpt, "SOURCE", train_gpt.SOURCE + b"# another commit\n")
    with pytest.raises(train_gpt.UserError, match="ranks differ in script: "):
        agree(facts, facts_of(run_id="z"))


# ---- Going on


def test_a_run_that_saved_nothing_starts_over_and_its_log_is_kept(run):
    run(num_iterations=1)
    log = Path("logs/x/log.txt")
    log.write_text("another source\n")
    assert run(resume="auto").code == 0
    (left,) = Path("logs/x").glob("left-*-log.txt")
    assert left.read_text() == "another source\n"
    assert f"its log is now {left}" in log.read_text()


def test_data_that_cannot_suffice_are_refused_at_once(run, tiny_shards):
    line = one_error(run(train_files=tiny_shards([900], name="few"), repeat_data="false"))
    assert re.search(r"few_\*\.bin: the run trains on \d+ tokens, and these are 900; add s", line)


def test_a_resumed_run_counts_the_tokens_that_it_was_given(run):
    """The stages of the shorter run are shorter, too: it would have had other tokens before."""
    run(save_every=2)
    argv = ["--resume", "logs/x/step-000004.pt", "--num_iterations", "5", "--val_every", "0"]
    shorter = run(argv)
    six, five = (train_gpt.planned_tokens(tiny(num_iterations=steps)) for steps in (6, 5))
    assert six[4] != five[4]
    assert int(shorter.values["tokens"]) == six[4] + five[5] - five[4]
    assert "\nnum_iterations: 5, before 6\nval_every: 0, before 3\n" in shorter.log


def test_a_longer_run_does_not_go_back_to_an_earlier_stage(run):
    """Windows would shrink and rates jump: its weights may begin a new run."""
    run(save_every=4)
    for path, steps in (("6.pt", 12), ("4.pt", 9)):
        path = f"logs/x/step-00000{path}"
        line = one_error(run(["--resume", path, "--num_iterations", str(steps)]))
        assert f"{path} is of a later stage; a new run can begin with its weights, by --in" in line
    same_stage = run(["--resume", "logs/x/step-000004.pt", "--num_iterations", "7"])
    assert same_stage.code == 0 and same_stage.values["steps"] == "7"


def test_shards_may_be_added_to_the_folder_of_a_run(run, tiny_shards):
    tiny_shards([6000, 6000])
    run(save_every=2)
    tiny_shards([6000, 6000, 6000])
    assert run(["--resume", "logs/x/step-000004.pt"]).code == 0
    tiny_shards([6000, 6000, 6000], seed=3)
    assert "not the data of logs/x" in one_error(run(["--resume", "logs/x/step-000004.pt"]))


def test_a_checkpoint_of_another_version_is_told_as_that(run):
    """Keys that are missing, and one that only an older version has."""
    run(save_every=2)
    path = Path("logs/x/step-000006.pt")
    state = torch.load(path, weights_only=True)
    for odd in ("tokens_trained", "process_time_ms", "threads", "place", "script_digest", "loader"):
        other = {key: value for key, value in state.items() if key != odd}
        if odd not in state:
            other[odd] = ()
        torch.save(other, path)
        line = one_error(run(["--resume", str(path), "--run_id", "x"]))
        assert f"of another version of the script, which differs in {odd}; resume it" in line
    again = run(save_every=2, resume="auto")
    assert again.code == 0 and again.err.startswith(f"skipped {path}: of another version")


def test_init_needs_weights_that_fit_and_nothing_else(run):
    run(save_every=6)
    state = torch.load("logs/x/step-000006.pt", weights_only=True)
    torch.save(dict(model=state["model"]), "weights.pt")
    assert run(run_id="tuned", init="weights.pt", num_iterations=1).code == 0


# ---- The source


def test_the_log_has_the_source_that_was_imported(tmp_path, data_flags, monkeypatch):
    """The script is edited after it was started."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train_gpt.py"
    path.write_bytes(train_gpt.SOURCE)
    script = script_module(path)
    path.write_text("# edited\n")
    flags = tiny_runs.to_argv(tiny_runs.FLAGS | data_flags | dict(num_iterations=1))
    assert script.main(flags) == 0
    assert Path("logs/x/log.txt").read_bytes().startswith(train_gpt.SOURCE)


def test_the_source_is_read_before_torch_is_imported():
    source = train_gpt.SOURCE.decode()
    assert source.index("SOURCE = SCRIPT.read_bytes()") < source.index("import torch")
    assert source.index("SOURCE = SCRIPT.read_bytes()") < source.index("import numpy")


def test_the_warm_up_runs_all_that_a_run_runs(run, monkeypatch):
    """Tied and untied steps, steps of Adam and steps without, the last validation."""
    seen = set()
    for name in ("step_tied", "step_optimizers"):
        step = getattr(train_gpt, name)

        def noted(optimizers, now, divisor, name=name, step=step):
            rates = {optimizer.group.lr for optimizer in optimizers}
            seen.add((name, rates == {0.0}))
            return step(optimizers, now, divisor)

        monkeypatch.setattr(train_gpt, name, noted)
    assert run().code == 0
    assert seen == {(name, warms) for name in ("step_tied", "step_optimizers")
                    for warms in (True, False)}


def test_flags_that_messages_name_exist():
    """Of this script, of data/fineweb.py, or what torch.distributed.launch adds."""
    names = {*vars(train_gpt.Hyperparameters()), "name", "help", "local"}
    harness = train_gpt.SOURCE.decode().partition("# ==== Harness")[2]
    for flag in re.findall(r"--(\w+)", harness):
        assert flag in names, flag
