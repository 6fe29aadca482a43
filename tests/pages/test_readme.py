"""README.md: its commands are accepted as they stand, and what it names is there.

Commands are the lines of its ```bash blocks. The flags of each go to the parser of the script that
it starts, in this process; what would come after the parsing does not happen.
"""

import argparse
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import REPO

import train_gpt

README = (REPO / "README.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [
    command
    for block in BLOCKS
    for line in block.replace("\\\n", " ").splitlines()
    if (command := shlex.split(line, comments=True))
]


class Parsed(BaseException):
    """Ends a script once its command line is parsed; args[0] is what the parser left over."""


def parse_with_script(script, flags, monkeypatch):
    """Run the script up to the end of its parsing; return the words that its parser left over."""
    parse, depth = argparse.ArgumentParser.parse_known_args, 0

    def parse_and_stop(self, *args, **kwargs):
        nonlocal depth
        depth += 1  # a verb's parser runs within the script's
        try:
            values, rest = parse(self, *args, **kwargs)
        finally:
            depth -= 1
        if depth == 0:
            raise Parsed(rest)
        return values, rest

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [str(script), *flags])
    monkeypatch.syspath_prepend(script.parent)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(Parsed) as parsed:
            runpy.run_path(str(script), run_name="__main__")
    finally:
        signal.signal(signal.SIGTERM, handler)
        monkeypatch.undo()
    return parsed.value.args[0]


def check_pytest(flags, config):
    """The flags are pytest's own, and the markers among them those of pyproject.toml."""
    values = config._parser.parse(flags)  # there is no public way to parse without running
    markers = {line.partition(":")[0] for line in config.getini("markers")}
    assert set(values.markexpr.split()) - {"not", "and", "or"} <= markers
    assert all((REPO / path).exists() for path in values.file_or_dir)


def check_command(words, monkeypatch, config):
    """Fail where a command names what is not there, or flags that are not taken."""
    program, *rest = words
    if program == "source":
        return
    if program in ("./run.sh", ".ci/run"):
        assert os.access(REPO / program, os.X_OK)
        if rest[:1] == ["test"]:
            check_pytest(rest[1:], config)
        elif rest[:1] == ["sample"]:
            check_command(["python", "data/sample.py", *rest[1:]], monkeypatch, config)
        else:
            train_gpt.parse_args(rest)
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        values = get_args_parser().parse_args(rest)
        check_command(["python", values.training_script, *values.training_script_args],
                      monkeypatch, config)  # fmt: skip
    elif rest[:2] == ["-m", "pytest"]:
        check_pytest(rest[2:], config)
    elif rest[:2] == ["-m", "ruff"]:
        done = subprocess.run([sys.executable, *rest, "--show-files"], cwd=REPO, check=False)
        assert done.returncode == 0
    elif rest[0] == "train_gpt.py":
        train_gpt.parse_args(rest[1:])
    else:
        assert program == "python"
        left = parse_with_script(REPO / rest[0], rest[1:], monkeypatch)
        if rest[0] == "tests/bench.py":  # it hands on what it does not know
            train_gpt.parse_args(left)
        else:
            assert left == []


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_command_is_accepted(words, monkeypatch, pytestconfig):
    check_command(words, monkeypatch, pytestconfig)


@pytest.mark.parametrize("line", [
    "./run.sh --sed 3",
    "./run.sh test --no-such-flag",
    "./run.sh test -m slwo",
    "torchrun --standalone --nproc=8 --no_such train_gpt.py",
    "torchrun --standalone train_gpt.py --save 3",
    "python train_gpt.py --head_chunks many",
    "python data/text.py --out data/mine novel.txt",
    "python data/fineweb.py --shards 3",
    "python data/missing.py",
    "python records/ledger.py lsit",
    "python records/ledger.py list --seeds 3",
    "python tests/bench.py pocket --sed 5",
])  # fmt: skip
def test_wrong_command_is_found(line, monkeypatch, pytestconfig):
    wrong = (train_gpt.UserError, pytest.UsageError, SystemExit, OSError, AssertionError,
             pytest.fail.Exception)  # fmt: skip
    with pytest.raises(wrong):
        check_command(shlex.split(line), monkeypatch, pytestconfig)


def test_the_commands_that_matter_are_there():
    lines = {" ".join(words) for words in COMMANDS}
    assert {"./run.sh", "./run.sh test", "python train_gpt.py", "python data/fineweb.py"} <= lines
    assert "torchrun --standalone --nproc_per_node=8 train_gpt.py" in lines
    assert any(line.startswith("torchrun --nnodes=2") for line in lines)


def test_flags_named_in_the_text_exist():
    from torch.distributed.run import get_args_parser

    known = {f"--{name}" for name in train_gpt.Hyperparameters.__dataclass_fields__}
    known |= {"--help", "--jobs", "--preset", "--seeds", "--times", "--tokenizer"}
    known |= set(get_args_parser()._option_string_actions)
    text = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", re.sub(r"<!--.*?-->", "", text)))
    assert {"--head_chunks", "--save_every"} <= named <= known


def test_map_has_the_sections_of_the_script():
    script = (REPO / "train_gpt.py").read_text()
    titles = [title.partition(" (")[0] for title in re.findall("^# -{4} (.*) -+$", script, re.M)]
    table = README.partition("| section | what is in it |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| (\w[^|]*) \|", table, re.MULTILINE) == titles


def test_links_and_named_files_are_there():
    links = re.findall(r"\]\((?!https://)([^)#]*)", README)
    named = re.findall(r"`((?:tests|data|records)/[\w./]+\.\w+)`", README)
    assert "train_gpt.py" in links and "tests/test_wire.py" in named
    assert [path for path in links + named if not (REPO / path).exists()] == []


def test_the_target_is_that_of_the_presets():
    record, pocket = (train_gpt.parse_args(["--preset", name]) for name in ("record", "pocket"))
    assert f"until its validation loss is\n{record.target_loss}." in README
    assert f"first {record.val_tokens:,} validation tokens of FineWeb" in README
    assert f"{pocket.target_loss} nats per byte on the first {pocket.val_tokens:,}" in README


def test_each_generated_part_is_marked_once():
    for name in ("output:run", "output:test"):
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        assert README.count(begin) == README.count(end) == 1
        assert README.index(begin) < README.index(end)
    table = re.search(r"<!-- measured:begin -->\n(.*?)<!-- measured:end -->", README, re.DOTALL)
    rows = [line.count("|") for line in table[1].splitlines()]
    assert len(rows) >= 2 and set(rows) == {rows[0]}


def test_a_checkpoint_is_sampled_evaluated_and_loaded_as_it_says(
    pocket_data, tmp_path, monkeypatch, capsys, final_values
):
    """Its commands and its lines of Python, as they stand, on the checkpoint of a short run."""
    section = README.partition("\n## After the run\n")[2].partition("\n## ")[0]
    block = re.search(r"```bash\n(.*?)```", section, re.DOTALL)[1]
    sampling, evaluating = map(shlex.split, block.splitlines())
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    path = Path(sampling[2])
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in train_gpt.Health.SIGNALS}
    flags = f"""--preset pocket --device cpu --num_iterations 2 --val_seq_len 128 --val_tokens 128
        --sequences_per_step 4 --save_every 2 --run_id {path.parent.name}"""
    try:
        assert train_gpt.main(flags.split()) == 0
        (path.parent / "step-000002.pt").rename(path)
        trained = final_values(capsys.readouterr().out)
        assert evaluating[:2] == ["python", "train_gpt.py"]
        assert train_gpt.main(evaluating[2:]) == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert final_values(capsys.readouterr().out)["val_loss"] == trained["val_loss"]
    assert sampling[:2] == ["python", "data/sample.py"]
    done = subprocess.run([sys.executable, REPO / sampling[1], *sampling[2:]], text=True,
                          capture_output=True, check=True)  # fmt: skip
    assert done.stdout.startswith("def main")

    names = {}
    exec(code, names)
    logits, model = names["logits"], names["model"]
    assert f"# {tuple(logits.shape)}, the vocabulary padded to {logits.size(-1)}" in code
    shard = train_gpt.find_shards("data/pocket/pocket_val_*.bin")[0]
    tokens = torch.from_numpy(train_gpt.read_shard(shard, 257)[:129].astype("int64"))
    with torch.no_grad():
        loss = F.cross_entropy(model.logits(model.hidden(tokens[None, :-1]))[0], tokens[1:])
    assert loss.item() == pytest.approx(float(trained["val_loss"]), abs=2e-6)


def test_the_flags_that_may_change_are_the_group_that_it_names(capsys):
    assert "The flags from `--num_iterations` on, which `--help` lists\n  under `Run`" in README
    with pytest.raises(SystemExit):
        train_gpt.main(["--help"])
    groups = re.findall(r"^(\w[^\n]*):\n  (--\w+)", capsys.readouterr().out, re.MULTILINE)
    assert groups[-1] == ("Run", "--num_iterations")


@pytest.mark.slow
def test_own_text_in_three_commands(tmp_path):
    """As they stand, from a copy's folder, and with flags behind them that make the run short."""
    block = next(block for block in BLOCKS if "data/text.py" in block).replace("\\\n", " ")
    activate, prepare, train = block.strip().splitlines()
    assert activate == "source .venv/bin/activate"
    for name in ("data", "train_gpt.py"):
        (tmp_path / name).symlink_to(REPO / name)
    own = tmp_path / "own"
    (tmp_path / "papers").mkdir()
    for number in range(20):
        (tmp_path / "papers" / f"{number}.txt").write_text(f"{number} is a number. " * 2000)
    (tmp_path / "novel.txt").write_text("It was a night like any other. " * 2000)
    prepare = prepare.replace("data/mine", str(own))
    short = " --num_iterations 2 --train_seq_len 128 --val_seq_len 128"
    train = train.replace("data/mine", str(own)) + short
    environment = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    for command in (prepare, train):
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, text=True,
                              capture_output=True, timeout=120)  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert re.search(r"^step:2/2 val_loss:", done.stdout, re.MULTILINE)
    assert re.search(r"^val_loss: ", done.stdout, re.MULTILINE)
