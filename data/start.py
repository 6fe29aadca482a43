"""What run.sh does once it has a Python: set up what is missing, then train, sample or test."""

import argparse
import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out
sys.path.append(str(Path(__file__).parent.parent / "records"))
import launch
import machine
from machine import MachineError, say

REPO = machine.REPO
USAGE = """\
usage: ./run.sh [--record NAME] [flags of train_gpt.py]
           train the root, or a record of records/, on all CUDA devices, or the pocket on the CPU;
           a record has a number (53), a label (92h, o36), or the end of its folder's name
       ./run.sh sample [flags of data/sample.py]    print text from the newest checkpoint
       ./run.sh test [flags of pytest]              run the tests

What is missing is set up first: the data, and the packages, in .venv, unless the active Python
(python3, or $PYTHON where that is set) has them. Logs go to logs/ in the current folder.
"""
PACKAGES = ["requirements.txt"]
PACKAGES_OF_TESTS = ["requirements.txt", "requirements-dev.txt"]
# A model that a CPU trains, and that can be sampled
POCKET = ["--preset", "pocket", "--save_every", "120"]
# Flags by which a person says how the script is to fit the GPUs
OWN_PLAN = {"shorten", "sequences_per_step", "sequences_per_forward", "val_seq_len"}


def find_record(name: str) -> Path:
    """The script of the record that this names. Raises MachineError."""
    from ledger.records import record_folders

    word = Path(name).name.removeprefix("#")  # a folder, too, as a shell completes it
    by_name, by_number = [], []
    for folder in record_folders(REPO / "records"):
        if word and f"_{word}_" in f"_{folder.name}_":
            by_name.append(folder / "train_gpt.py")
        if word.isdigit() and (folder / "record.json").exists():
            published = json.loads((folder / "record.json").read_text())["published"] or {}
            if published.get("number") == int(word):
                by_number.append(folder / "train_gpt.py")
    found = by_number or by_name
    if len(found) != 1:
        names = ", ".join(path.parent.name for path in found) or "none"
        raise MachineError(
            f"--record {name}: of the records it names {names}; give a number such as 53, a label "
            "such as 92h or o36, or the end of one folder's name, such as DenseConnections")
    return found[0]


def make(command: str) -> None:
    """Make data by a script of this folder. It ends this program where it cannot."""
    say(f"data: data/{command}")
    name, *words = command.split()
    path = REPO / "data" / name
    done = subprocess.run([sys.executable, launch.__file__, "1", path, *words], stdout=2)
    if done.returncode:
        sys.exit(done.returncode)


class Choice(NamedTuple):
    """What is run, by the words, the machine, and the checkpoint that it goes on from."""

    cfg: object  # the run's settings
    words: list[str]  # flags of the script
    gpus: int
    ranks: int
    commands: list[str]  # that make the data


def choose(script, words: list[str]) -> Choice:
    """Raises MachineError, and the script's UserError."""
    import plan  # which imports torch

    given = script.parse_flags(words)
    gpus = plan.count_gpus(script, given.get("device", "auto"))
    with contextlib.redirect_stderr(io.StringIO()):  # the run says itself what it skips
        found, state = script.find_checkpoint(given.get("resume", ""), given.get("run_id", ""))

    def settings_with(flags):
        all_given = script.parse_flags([*flags, *words]) | {"resume": found}
        return script.hyperparameters(all_given, state["settings"])

    flags = []
    if not gpus and not found and "preset" not in given:
        flags = POCKET
    cfg = settings_with(flags)
    if gpus and cfg.preset == "record" and not found and not OWN_PLAN & given.keys():
        flags = plan.flags_for_gpus(script, cfg, gpus)
        cfg = settings_with(flags)
        if flags:
            what = "; losses of shorter sequences do not compare" if "--shorten" in flags else ""
            say(f"{' '.join(flags)}, for this GPU's memory{what} (docs/gpus.md)")
    cfg = script.shorten(cfg)
    ranks = 1
    if gpus and cfg.preset == "record":
        ranks = plan.most_ranks(cfg, gpus)
        machine.check_shared_memory(ranks)
        if ranks < gpus:
            say(f"{ranks} of {gpus} GPUs: a step has {cfg.sequences_per_step} sequences")
        say(f"the first start compiles for about {plan.compiling_minutes(script, cfg)} minutes "
            "(estimated), later ones for about one")
    commands = []
    # What a checkpoint was trained on is there, and is made again only where it is gone.
    is_there = "train_files" in given or (found and has_data(script, cfg))
    if not is_there and (gpus or cfg.preset == "pocket"):
        commands = plan.scripts_of_data(script, cfg)
    return Choice(cfg, [*flags, *words], gpus, ranks, commands)


def has_data(script, cfg) -> bool:
    """Whether the files are there that a run was trained on."""
    try:
        return bool(script.find_shards(cfg.train_files) and script.find_shards(cfg.val_files))
    except script.UserError:
        return False


def keep_kernels() -> None:
    """Let compiled kernels survive a reboot, where a folder for them can be made."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "train_gpt")
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))


def train(words: list[str]) -> None:
    """Train a script on all GPUs or on the CPU, or list its flags. Raises MachineError."""
    def refuse(message):
        raise MachineError(f"{message}; --help lists the flags")

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = refuse
    parser.add_argument("--record")
    parser.add_argument("--device")
    parser.add_argument("--help", "-h", action="store_true")
    own, words = parser.parse_known_args(words)
    path = REPO / "train_gpt.py" if own.record is None else find_record(own.record)
    if own.help:
        has_packages = machine.find_packages(PACKAGES)
        print(USAGE, flush=True)
        if has_packages:  # else the flags are listed after the set-up
            launch.main(1, [str(path), "--help"])
        return
    if own.device:
        words = ["--device", own.device, *words]
    machine.set_up(PACKAGES, on_gpu=own.device != "cpu")

    from shards import load_script  # which needs packages

    script = load_script(path)
    version, pinned = script.torch.__version__, machine.pinned_torch()
    if machine.numbers(version) != machine.numbers(pinned):
        say(f"using torch {version} of {sys.executable}; the project pins {pinned}")
    try:
        choice = choose(script, words)
    except (script.UserError, OSError) as error:  # the second names the file
        raise MachineError(error) from None
    for command in choice.commands:
        make(command)
    run_sh = shlex.quote(os.path.relpath(REPO / "run.sh"))
    run_sh = run_sh if "/" in run_sh else f"./{run_sh}"
    next_words = f"{run_sh} --help lists what can be set; README.md has a first experiment."
    if choice.cfg.save_every:
        next_words = f"{run_sh} sample --prompt 'def ' prints what the model writes."
    os.environ["RUN_SH_NEXT"] = f"Next: {next_words}"  # launch says it when the run has ended
    say(f"training: {shlex.join([str(path.relative_to(REPO)), *choice.words])}")
    words = [str(path), *choice.words]
    if choice.gpus:  # in a process that has no memory of a GPU yet
        keep_kernels()
        os.execv(sys.executable, [sys.executable, launch.__file__, str(choice.ranks), *words])
    if not os.environ.get("OMP_NUM_THREADS"):
        threads = machine.count_threads()
        if threads:
            script.torch.set_num_threads(threads)
    launch.main(1, words)


def main(words: list[str]) -> None:
    """Do what the words say. Raises MachineError."""
    if not machine.MALLOC.keys() <= os.environ.keys():  # read when a process begins
        os.environ.update(machine.MALLOC | os.environ)
        machine.start_anew(sys.executable)
    first = words[0] if words else ""
    if first == "test":
        machine.set_up(PACKAGES_OF_TESTS)
        make("pocket.py")
        os.chdir(REPO)
        pytest = ["-m", "pytest", "-n", "auto", "--maxprocesses", "8", *words[1:]]
        os.execv(sys.executable, [sys.executable, *pytest])
    elif first == "sample":
        machine.set_up(PACKAGES)
        launch.main(1, [str(REPO / "data" / "sample.py"), *words[1:]])
    elif first and not first.startswith("-"):
        refuse = f"{first}: give test, sample, or flags of train_gpt.py; --help lists them"
        raise MachineError(refuse)
    else:
        train(words)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except MachineError as error:
        print("run.sh:", *str(error).split(), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("run.sh: interrupted", file=sys.stderr)
        sys.exit(130)
