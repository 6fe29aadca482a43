"""What the pages say of the code: functions, flags, presets, files, measures of the pages."""

import ast
import json
import re
import shlex

import pytest
from conftest import REPO
from page_text import PAGES, blocks_of, prose_of, tables_of, text_of

import train_gpt

MOST_LINES = {"README.md": 150, "records/README.md": 130}  # without the generated tables
SCRIPT_FLAGS = {f"--{name}" for name in train_gpt.Hyperparameters.__dataclass_fields__}
SCRIPT_FLAGS |= {"--preset", "--help"}
OWN_FLAGS = [*(f"data/{name}.py" for name in ("sample", "text", "pocket", "fineweb", "prefixes")),
             "tests/mutants.py"]
CLAIMS = {path.parent.name[11:]: json.loads(path.read_text())["published"]
          for path in REPO.glob("records/*/record.json")}
RECORDS = {f"#{published['number']} {name}" for name, published in CLAIMS.items() if published}


def flags_in(source: str) -> set[str]:
    """The flags that a script of ours declares: names in quotation marks that begin with --."""
    return set(re.findall(r"[\"'](--[a-z][\w-]*)[\"']", (REPO / source).read_text())) | {"--help"}


FLAGS = {
    "train_gpt.py": SCRIPT_FLAGS,
    **{name: flags_in(name) for name in OWN_FLAGS},
    "tests/bench.py": flags_in("tests/bench.py") | SCRIPT_FLAGS,  # it hands on what it knows not
    "records/ledger": flags_in("records/ledger/__main__.py"),
    "records/share_harness.py": set(),
    "./run.sh sample": flags_in("data/sample.py"),
    "./run.sh": SCRIPT_FLAGS | {"--record"},
    # Programs that are not ours: flags of theirs that the pages name.
    "-m": {"--help"},  # of python -m pytest
    "./run.sh test": {"-m", "--random-order"},
    "torchrun": {"--standalone", "--nproc_per_node", "--nnodes", "--rdzv_backend",
                 "--rdzv_endpoint", "--max-restarts", "--shutdown-timeout"}}


def command_of(words: list[str]) -> str:
    """The key of FLAGS for a command of ours, or an empty text."""
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
    command = command_of(words)
    known = FLAGS[command] | (SCRIPT_FLAGS if command == "torchrun" else set())
    named = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert named <= known
    if command.endswith(".py"):
        assert (REPO / command).exists()
    for given in re.findall(r"train_gpt\.py:([\w=.,]+)", line):  # of `ledger run SCRIPT:name=value`
        assert {f"--{one.partition('=')[0]}" for one in given.split(",")} <= SCRIPT_FLAGS


@pytest.mark.parametrize("page", PAGES)
def test_flags_in_the_text_exist(page):
    known = set().union(*FLAGS.values())
    script = (REPO / page).with_name("train_gpt.py")
    if script.exists():  # a record has flags of its own
        known |= {f"--{name}" for name in re.findall(r"^    (\w+): ", script.read_text(), re.M)}
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", prose_of(page))) <= known


def technique_rows():
    return [row for table in tables_of("docs/techniques.md")
            if table[0][0] == "Technique" for row in table[1:]]


def names_of_the_script():
    names = set()
    for node in ast.parse((REPO / "train_gpt.py").read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{one.name}" for one in node.body
                      if isinstance(one, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("row", technique_rows(), ids=lambda row: row[0])
def test_a_technique_has_a_function_an_author_and_a_record(row):
    _, meaning, functions, author, effect, record = row
    assert meaning.endswith(".") and author and effect
    named = set(re.findall(r"`([^`]+)`", functions))
    assert functions == "–" or named and named <= names_of_the_script()
    records = re.findall(r"#\d+ \w+", record)
    assert records and set(records) <= RECORDS


@pytest.mark.parametrize("page", MOST_LINES)
def test_a_page_is_no_longer_than_promised(page):
    text = re.sub("<!-- ledger: begin.*?ledger: end -->", "", text_of(page), flags=re.DOTALL)
    assert len(text.splitlines()) <= MOST_LINES[page]


def test_the_front_page_says_in_ten_lines_that_no_gpu_has_run_it():
    assert "No GPU has run it yet" in "\n".join(text_of("README.md").splitlines()[:10])


def test_targets_and_validation_sets_are_the_presets():
    record, pocket = (train_gpt.parse_args(["--preset", name]) for name in ("record", "pocket"))
    front = " ".join(text_of("README.md").split())
    assert f"validation loss of {record.target_loss}" in front
    assert f"{pocket.target_loss} nats per byte" in front
    assert f"{pocket.val_tokens:,} validation tokens" in front


def test_shorter_sequences_for_small_cards_keep_the_tokens_of_a_step():
    record = train_gpt.parse_args([])
    lines = re.findall(r"^\| \d+ GB .*?`(python train_gpt.py --seq_lens .*?)`",
                       text_of("docs/gpus.md"), re.MULTILINE)
    assert len(lines) == 3
    for line in lines:
        cfg = train_gpt.parse_args(shlex.split(line)[2:])
        for length, whole in zip(cfg.seq_lens, record.seq_lens, strict=True):
            assert length * cfg.sequences_per_step == whole * record.sequences_per_step
        assert cfg.val_tokens % cfg.val_seq_len == 0


def test_the_sections_that_the_front_page_names_are_the_scripts():
    source = (REPO / "train_gpt.py").read_text()
    above, _, below = source.partition("\n# ==== Harness")
    words = " ".join(text_of("README.md").partition("## Read it")[2].partition("\n## ")[0].split())
    for part in (above, below):
        titles = re.findall(r"^# ---- (.*?) -+$", part, re.MULTILINE)
        assert ", ".join(titles) in words


def test_the_front_pages_table_of_results_has_the_ledgers_columns():
    line = next(line for line in text_of("README.md").splitlines() if line.startswith("Contestant"))
    pages = text_of("records/ledger/pages.py")
    columns = re.search(r"^CONTEST = \(\n    \((.*)\),$", pages, re.MULTILINE)
    assert re.split(r"\s{2,}", line) == list(ast.literal_eval(columns[1]))
