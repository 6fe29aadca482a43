"""What the pages say of the code: functions, flags, presets, files, measures of the pages."""

import ast
import json
import re
import shlex
from operator import attrgetter

import pytest
from conftest import REPO
from page_text import PAGES, blocks_of, prose_of, text_of

import train_gpt

MOST_LINES = {"README.md": 150, "records/README.md": 130}  # without the generated tables
CLAIMS = {path.parent.name[11:]: json.loads(path.read_text())["published"]
          for path in REPO.glob("records/*/record.json")}
RECORDS = {f"#{published['number']} {name}" for name, published in CLAIMS.items() if published}

SCRIPT_FLAGS = {f"--{name}" for name in train_gpt.Hyperparameters.__dataclass_fields__}
SCRIPT_FLAGS |= {"--preset"}
TAKE_THEM_TOO = ("./run.sh", "torchrun", "tests/bench.py")
SOURCES = {"./run.sh sample": "data/sample.py", "records/ledger": "records/ledger/__main__.py"}
OTHER_FLAGS = {  # those of programs that are not ours, as far as the pages name them
    "./run.sh": {"--record"},
    "./run.sh test": {"-m", "--random-order"},
    "torchrun": {"--standalone", "--nproc_per_node", "--nnodes", "--rdzv_backend",
                 "--rdzv_endpoint", "--max-restarts", "--shutdown-timeout"}}
OURS = ["train_gpt.py", *SOURCES, *OTHER_FLAGS,
        *map(str, [*REPO.glob("data/*.py"), *REPO.glob("tests/*.py")])]


def flags_of(command: str) -> set[str]:
    """What a command takes: of our scripts, the names in quotation marks that begin with --."""
    flags = {"--help"} | OTHER_FLAGS.get(command, set())
    if command == "train_gpt.py" or command in TAKE_THEM_TOO:
        flags |= SCRIPT_FLAGS
    source = REPO / SOURCES.get(command, command)
    if source.suffix == ".py":
        flags |= set(re.findall(r"[\"'](--[a-z][\w-]*)[\"']", source.read_text()))
    return flags


def command_of(words: list[str]) -> str:
    """What a line of a shell starts, if it is ours: a script, or run.sh with its verb."""
    line = " ".join(words)
    for start in ("./run.sh sample", "./run.sh test", "./run.sh", "torchrun"):
        if line.startswith(start):
            return start
    return words[1] if words[0] in ("python", "python3") and len(words) > 1 else ""


def commands_on_pages():
    """Each command of a block or in backticks that starts something of ours."""
    found = set()
    for page in PAGES:
        lines = [line for block in blocks_of(page) for line in block.commands()]
        lines += re.findall(r"`((?:python3?|torchrun|\./run\.sh)(?: [^`]*)?)`", prose_of(page))
        found |= {(page, line) for line in lines if command_of(shlex.split(line))}
    return sorted(found)


@pytest.mark.parametrize("page, line", commands_on_pages(), ids=lambda value: value)
def test_commands_name_flags_and_scripts_that_exist(page, line):
    words = shlex.split(line, comments=True)
    named = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert named <= flags_of(command_of(words))
    for given in re.findall(r"train_gpt\.py:([\w=.,]+)", line):  # of `ledger run SCRIPT:name=value`
        assert {f"--{one.partition('=')[0]}" for one in given.split(",")} <= SCRIPT_FLAGS


@pytest.mark.parametrize("page", PAGES)
def test_flags_in_the_text_exist(page):
    known = set().union(*map(flags_of, OURS))
    script = (REPO / page).with_name("train_gpt.py")
    if script.exists():  # a record has flags of its own
        known |= {f"--{name}" for name in re.findall(r"^    (\w+): ", script.read_text(), re.M)}
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", prose_of(page))) <= known


TECHNIQUES = re.findall(r"^\| (?!Technique )(.*) \|$", text_of("docs/techniques.md"), re.MULTILINE)


@pytest.mark.parametrize("row", TECHNIQUES, ids=lambda row: row.partition(" | ")[0])
def test_a_technique_has_a_function_an_author_and_a_record(row):
    _, meaning, functions, author, effect, record = row.split(" | ")
    assert meaning.endswith(".") and author and effect
    named = re.findall(r"`([^`]+)`", functions)
    assert bool(named) == (functions != "–")
    assert all(callable(attrgetter(name)(train_gpt)) for name in named)
    records = re.findall(r"#\d+ \w+", record)
    assert records and set(records) <= RECORDS


@pytest.mark.parametrize("page", MOST_LINES)
def test_a_page_is_no_longer_than_promised(page):
    text = re.sub("<!-- ledger: begin.*?ledger: end -->", "", text_of(page), flags=re.DOTALL)
    assert len(text.splitlines()) <= MOST_LINES[page]


def test_the_front_page_has_the_presets_targets_and_the_scripts_sections():
    front = text_of("README.md")
    assert "<!-- ledger: begin gpus -->" in "\n".join(front.splitlines()[:14])
    words = " ".join(front.split())
    record, pocket = (train_gpt.parse_args(["--preset", name]) for name in ("record", "pocket"))
    assert f"validation loss of {record.target_loss}" in words
    assert f"{pocket.target_loss} nats per byte" in words
    assert f"{pocket.val_tokens:,} validation tokens" in words
    source = (REPO / "train_gpt.py").read_text()
    for part in source.split("\n# ==== Harness"):
        assert ", ".join(re.findall(r"^# ---- (.*?) -+$", part, re.MULTILINE)) in words


def test_the_front_pages_table_of_results_has_the_ledgers_columns():
    line = next(line for line in text_of("README.md").splitlines() if line.startswith("Contestant"))
    pages = text_of("records/ledger/pages.py")
    columns = re.search(r"^CONTEST = (.*)$", pages, re.MULTILINE)
    assert re.split(r"\s{2,}", line) == list(ast.literal_eval(columns[1]))
