"""data/start.py: what words mean, what is made before a run, and how it is started."""

import dataclasses
import functools
import json
import os
import sys
from types import SimpleNamespace

import launch
import machine
import plan
import pytest
import shards
import start
import torch
from conftest import REPO, script_module

LOAD = functools.cache(shards.load_script)
POCKET = ["--preset", "pocket", "--save_every", "120"]


class Started(Exception):
    """In place of a program that would take this one's place."""


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What is made and run, in order, by a start in an empty folder on a machine without a GPU."""
    calls = []
    for name, value in machine.MALLOC.items():
        monkeypatch.setenv(name, value)

    def take_place(program, words):
        calls.append(("exec", *words[1:]))
        raise Started

    def run(command, **options):
        calls.append(tuple(map(str, command[2:])))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(os, "execv", take_place)
    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr(machine, "set_up", lambda files, on_gpu=False: calls.append(on_gpu))
    monkeypatch.setattr(machine, "count_threads", lambda: None)
    monkeypatch.setattr(launch, "main", lambda ranks, words: calls.append((ranks, *words)))
    monkeypatch.setattr(shards, "load_script", LOAD)
    monkeypatch.setattr(plan, "count_gpus", lambda script, device: 0)
    monkeypatch.setenv("RUN_SH_NEXT", "")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return calls


@pytest.fixture
def gpus(asked, monkeypatch):
    """`gpus(n, gib)` makes this a machine of n GPUs of such a size."""

    def make(count, gib):
        card = SimpleNamespace(total_memory=int(gib * 2**30))
        monkeypatch.setattr(plan, "count_gpus",
                            lambda script, device: 0 if device == "cpu" else count)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: card)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: (9, 0))
        monkeypatch.setattr(machine, "check_shared_memory", lambda ranks: None)

    return make


def save_checkpoint(flags):
    """A checkpoint of a run with these flags, as the script finds and reads it."""
    script = script_module("train_gpt.py")
    settings = dataclasses.asdict(script.parse_args(flags.split()))
    path = f"logs/{settings['run_id']}/step-000020.pt"
    os.makedirs(os.path.dirname(path))
    torch.save(script.NEW_RUN | dict(settings=settings, model={}, optimizers={}), path)
    return path


# ---- Training ----


@pytest.mark.parametrize(("words", "data", "first"), [
    ("--run_id=ab --val_files x", ["pocket.py"], POCKET),
    ("--preset=pocket --seed 3", ["pocket.py"], []),
    ("--train_files mine/*.bin", [], POCKET),
    ("--run_id x --resume auto", ["pocket.py"], POCKET),  # which is a new run
    ("--preset record", [], [])])  # which the script refuses
def test_without_a_gpu_it_trains_the_pocket(asked, words, data, first):
    start.main(words.split())
    _, *made, run = asked
    assert made == [("1", str(REPO / "data" / name)) for name in data]
    assert run == (1, str(REPO / "train_gpt.py"), *first, *words.split())


def test_a_resumed_run_makes_no_data_but_what_is_gone(asked, monkeypatch):
    """Another torch would make another corpus, in the place of the one that it was trained on."""
    path = save_checkpoint("--preset pocket --run_id x")
    for words in (["--run_id", "x", "--resume", "auto"], ["--resume", path]):
        monkeypatch.setattr(start, "has_data", lambda script, cfg: True)
        start.main(words)
        assert asked[1:] == [(1, str(REPO / "train_gpt.py"), *words)]
        monkeypatch.setattr(start, "has_data", lambda script, cfg: False)
        asked.clear()
        start.main(words)
        assert asked[1][-1].endswith("pocket.py") and len(asked) == 3
        asked.clear()


def test_data_are_there_where_the_script_finds_them(tmp_path, monkeypatch, write_shard):
    script = script_module("train_gpt.py")
    monkeypatch.chdir(tmp_path)
    cfg = script.parse_args(["--train_files", "mine_train*.bin", "--val_files", "mine_val*.bin"])
    write_shard("mine_train.bin", [1, 2])
    assert not start.has_data(script, cfg)
    write_shard("mine_val.bin", [1, 2])
    assert start.has_data(script, cfg)


def test_on_gpus_ranks_run_in_processes_of_their_own(asked, gpus, capsys):
    gpus(3, 15.6)
    with pytest.raises(Started):
        start.main(["--seed", "3"])
    assert asked[0] is True  # its driver is looked at before a torch is fetched
    assert asked[1] == ("1", str(REPO / "data" / "fineweb.py"), "8")
    script = str(REPO / "train_gpt.py")
    assert asked[2] == ("exec", launch.__file__, "2", script, "--shorten", "2", "--seed", "3")
    said = capsys.readouterr().err
    assert "losses of shorter sequences do not compare" in said
    assert "2 of 3 GPUs: a step has 16 sequences" in said
    assert "first start compiles for about 5 minutes" in said
    asked.clear()
    start.main(["--device", "cpu"])
    assert asked[0] is False and asked[-1] == (1, script, *POCKET, "--device", "cpu")
    with pytest.raises(Started):
        start.main(["--preset", "pocket"])
    assert asked[-1] == ("exec", launch.__file__, "1", script, "--preset", "pocket")


@pytest.mark.parametrize("flags", ["--shorten 4", "--sequences_per_forward 1", "--resume auto"])
def test_a_plan_of_ones_own_is_left_alone_and_no_checkpoint_is_none(asked, gpus, flags):
    """--resume auto, with which a run may begin, has to fit the card as any other."""
    gpus(1, 15.6)
    words = ["--run_id", "x", *flags.split()]
    with pytest.raises(Started):
        start.main(words)
    planned = ["--shorten", "2"] if "auto" in words else []
    assert asked[-1][4:] == (*planned, *words)


def test_a_resumed_run_on_a_gpu_keeps_its_lengths(asked, gpus, monkeypatch):
    gpus(1, 15.6)
    monkeypatch.setattr(start, "has_data", lambda script, cfg: True)
    path = save_checkpoint("--run_id x --shorten 4")
    with pytest.raises(Started):
        start.main(["--resume", path])
    assert asked[1:] == [("exec", launch.__file__, "1", str(REPO / "train_gpt.py"),
                          "--resume", path)]


def test_data_that_cannot_be_made_end_it(asked, monkeypatch):
    monkeypatch.setattr("subprocess.run", lambda *words, **options: SimpleNamespace(returncode=7))
    with pytest.raises(SystemExit) as end:
        start.main([])
    assert end.value.code == 7 and len(asked) == 1


def test_threads_are_counted_where_a_person_has_not(asked, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(machine, "count_threads", lambda: 3)
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        start.main([])
        assert torch.get_num_threads() == before
        monkeypatch.delenv("OMP_NUM_THREADS")
        start.main([])
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_what_to_type_next_is_handed_on(asked, capsys, monkeypatch):
    start.main(["--seed", "3"])
    assert os.environ["RUN_SH_NEXT"].endswith("run.sh sample --prompt 'def ' prints what the model "
                                              "writes.")
    assert "run.sh: training: train_gpt.py --preset pocket" in capsys.readouterr().err
    start.main(["--preset", "pocket"])  # which saves nothing
    assert "sample" not in os.environ["RUN_SH_NEXT"]
    monkeypatch.chdir(REPO)
    start.main([])
    assert os.environ["RUN_SH_NEXT"].startswith("Next: ./run.sh ")


def test_kernels_are_kept_where_their_folder_can_be_made(monkeypatch, tmp_path):
    cache = tmp_path / "cache"
    for home, kept in (tmp_path, str(cache / "train_gpt")), (tmp_path / "file", None):
        (tmp_path / "file").touch()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        start.keep_kernels()
        assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == kept
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    start.keep_kernels()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"


# ---- Words ----


@pytest.mark.parametrize(("name", "folder"), [
    ("53", "2025-12-22_MultiTokenPrediction"), ("#53", "2025-12-22_MultiTokenPrediction"),
    ("9a", "2024-11-06_9a_ValueResidual"), ("92h", "2026-08-30_92h_Fp8Products"),
    ("DenseConnections", "2026-04-22_DenseConnections"), ("o36", "2026-06-11_o36_MuonTuned"),
    ("o36_MuonTuned", "2026-06-11_o36_MuonTuned"), ("records/2024-10-10_Muon/", "2024-10-10_Muon")])
def test_a_record_is_named_by_its_number_its_label_or_the_end_of_its_name(name, folder):
    script = start.find_record(name)
    assert script.parent.name == folder and script.is_file()


@pytest.mark.parametrize(("name", "said"), [
    ("", "none"), ("2", "2024-06-06_AdamW"), ("1", "none"), ("Mu", "none"),
    ("Twice", "2025-01-03_Twice, 2025-01-04_o3_Twice")])
def test_a_name_of_no_record_or_of_two_is_refused(monkeypatch, tmp_path, name, said):
    for number, folder in enumerate(["2025-01-03_Twice", "optimizers/2025-01-04_o3_Twice"]):
        path = tmp_path / "records" / folder / "record.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"published": {"number": 2, "result": 1} if number else None}))
    monkeypatch.setattr(start, "REPO", tmp_path)
    if name == "2":
        assert start.find_record(name).parent.name == "2025-01-04_o3_Twice"
    else:
        with pytest.raises(machine.MachineError, match=f"names {said}; give a number such as 53, "):
            start.find_record(name)


def test_a_record_runs_in_place_of_the_root(asked):
    for words in (["--record", "o36", "--seed", "3"], ["--seed", "3", "--record=o36"]):
        start.main(words)
        path = REPO / "records/optimizers/2026-06-11_o36_MuonTuned/train_gpt.py"
        assert asked[-1] == (1, str(path), *POCKET, "--seed", "3")


def test_other_commands_are_handed_their_words(asked, monkeypatch):
    start.main(["sample", "--prompt", "two  words"])
    assert asked[-1] == (1, str(REPO / "data" / "sample.py"), "--prompt", "two  words")
    with pytest.raises(Started):
        start.main(["test", "-k", "muon or adam"])
    assert asked[-2][-1].endswith("pocket.py")
    assert asked[-1][:3] == ("exec", "-m", "pytest") and asked[-1][-2:] == ("-k", "muon or adam")
    assert os.getcwd() == str(REPO)


@pytest.mark.parametrize(("words", "said"), [
    (["tests"], "tests: give test, sample, or flags"),
    (["--record"], "--record: expected one argument; --help"),
    (["--sede", "3"], "--sede 3"),
    (["--resume", "no.pt"], "no.pt")])
def test_wrong_words_are_refused(asked, words, said):
    with pytest.raises(machine.MachineError, match=said):
        start.main(words)
    assert len(asked) <= 1  # nothing is made


@pytest.mark.parametrize("has_packages", [True, False])
def test_help_sets_nothing_up(asked, monkeypatch, capsys, has_packages):
    monkeypatch.setattr(machine, "find_packages", lambda files: has_packages)
    start.main(["--seed", "1", "--help"])
    assert "./run.sh test" in capsys.readouterr().out
    assert asked == [(1, str(REPO / "train_gpt.py"), "--help")] * has_packages


def test_variables_that_are_read_when_a_process_begins_are_set_before(asked, monkeypatch):
    name = next(iter(machine.MALLOC))
    monkeypatch.delenv(name)
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "9")
    monkeypatch.setattr(sys, "argv", ["start.py", "--seed", "3"])
    with pytest.raises(Started):
        start.main(["--seed", "3"])
    assert asked == [("exec", "start.py", "--seed", "3")]
    assert os.environ[name] == machine.MALLOC[name] and os.environ["MALLOC_MMAP_MAX_"] == "9"
    monkeypatch.setenv(name, "")


def test_a_torch_that_is_not_pinned_is_named_once(asked, monkeypatch, capsys):
    monkeypatch.setattr(machine, "pinned_torch", lambda: "2.99.0")
    start.main([])
    assert capsys.readouterr().err.count("the project pins 2.99.0") == 1
