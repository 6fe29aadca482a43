"""Verification: each claim of a record is held to its logs, its script and the rules; and filing.

A log lies in its record's logs/, under a name that is made from what is in it. So it cannot be
changed unseen, and any number of runs from any number of people have a place.
"""

import ast
import contextlib
import re
from pathlib import Path

from ledger import pages, records
from ledger.logs import SETTING, LedgerError, Log, machine_words, read_text, sha256
from ledger.records import FLOOR, FOLDER_NAME, RULES, SEEDS, Record, find_records, read_run
from ledger.scripts import BANNER, above, imports_of, meaning, settings_of

# What a run may have other than its preset says: what changes no loss but by rounding, and what
# the script finds out itself.
FREE = set("""seed device run_id resume save_every val_every warmup_steps sequences_per_forward
    head_chunks""".split())
NAMED = re.compile(r"^Record: (\w[\w-]*)", re.M)  # in a docstring
FILES = {"README.md", "record.json", "train_gpt.py", "logs", "__pycache__"}  # of a record's folder
UNREADABLE = LedgerError, OSError, SyntaxError, ValueError


# ---- What is wrong ----
def folder_findings(record: Record, root: Path):
    """A folder, its page and its script that are not as they have to be."""
    folder, parent, found = record.folder, record.claim["parent"], []
    if not FOLDER_NAME.fullmatch(folder.name):
        found.append("the folder's name is not a date and a name, YYYY-MM-DD_Name")
    if parent and not record.parent:
        found.append(f"its parent {parent}/record.json is missing, damaged or not older")
    if not read_text(folder / "README.md").startswith(f"# {folder.name}\n"):
        found.append(f"README.md's title is not '# {folder.name}'")
    for path in sorted(folder.glob("[!.]*")) + sorted(folder.glob("logs/[!.]*")):
        # Python would import a module that lies beside the script.
        is_log = path.parent != folder and path.suffix == ".txt"
        if not is_log and path.name not in FILES:
            name = path.relative_to(folder)
            found.append(f"its folder has {name}, which no record needs; delete it")

    script, _, harness = record.script.partition(BANNER)
    words = f"Parent: {parent}. Change: " if parent else "Parent: none. "
    if f"\n{words}" not in script:
        found.append(f"train_gpt.py's docstring does not say `{words.strip()}`")
    names = NAMED.findall(ast.get_docstring(ast.parse(script)) or "")
    if names != [folder.name]:
        found.append(f"train_gpt.py's docstring does not say `Record: {folder.name}` in one place")
    if harness != read_text(root).partition(BANNER)[2]:
        found.append("train_gpt.py is not the root's, byte for byte, from its banner on; "
                     "`python records/share_harness.py` copies it")
    settings_of(record.path, preset="pocket")  # raises where it does not run
    return found


def log_findings(log: Log, settings: dict):
    """What is wrong with one finished log by itself, and against its preset and the rules."""
    found, header, floor = [], log.header, FLOOR[log.preset]
    loss, ms = log.val[log.last_step]
    # All are rounded. The clock stops after the last step's line: on a busy machine, some ms later.
    if abs(log.val_loss - loss) > 5.06e-5:
        found.append(f"its final val_loss is {log.val_loss}, its steps say {loss:g}")
    if abs(log.train_time_ms - ms) > 1 + log.train_time_ms / 1000:
        found.append(f"its final train_time_ms is {log.train_time_ms:g}, its steps say {ms:g}")
    steps = [header.get("num_iterations"), str(log.last_step), log.final.get("steps")]
    if len(set(steps)) > 1:
        found.append("began as a run of {} steps and has {}, by its results {}".format(*steps))
    for name in (*SETTING, "val_digest"):  # of the process that it began in, and that it ended in
        began, ended = header.get(name), log.final.get(name)
        if None not in (began, ended) and began != ended:
            found.append(f"was resumed where {name} is {ended}; it began with {began}")
    if re.search("^resumed at .*, which another script wrote$", log.body, re.M):
        found.append("was resumed by another script than the one that began it")
    if header["device"].startswith("host standing in for"):
        found.append(f"was made on a {header['device']}, which measures nothing")
    if log.val_loss < floor:
        found.append(f"says a loss of {log.val_loss:.4f}: no honest model gets below {floor}")
    for wanted, words in ((settings, "its preset has"), (RULES[log.preset], "by the rules it is")):
        for name in sorted(wanted.keys() - FREE):
            if wanted[name] not in (None, header.get(name)):
                found.append(f"has {name} {header.get(name)}, {words} {wanted[name]}")
    return found


def logs_findings(record: Record):
    """What is wrong with a record's logs, each by itself and beside the others."""
    found, runs = list(record.damaged), {}
    sources = {log.source_sha256: log.source for log in record.logs if log.source}
    for log in record.logs:
        wrong = log_findings(log, settings_of(record.path, preset=log.preset))
        source = sources.get(log.source_sha256)
        if not source:
            wrong.append("has no source, nor has another log that has its sha256; one of each is "
                         "kept whole")
        elif meaning(above(source)) != meaning(above(record.script)):
            wrong.append("was not written by this train_gpt.py: it differs above the banner")
        if log.path.name != file_name(log):
            wrong.append(f"is not called {file_name(log)}, which is made from what is in it")
        same = runs.setdefault(log.losses, log)
        if same is not log and is_copy(log, same):
            wrong.append(f"has each loss of {same.path.name}; one run counts once")
        found += [f"logs/{log.path.name}: {words}" for words in wrong]
    return found


def is_copy(log: Log, other: Log) -> bool:
    """Whether they are one run: two CPUs of one kind may have equal losses, but not equal times."""
    if log.losses != other.losses:
        return False
    return log.seed != other.seed or log.setting == other.setting or log.train == other.train


def gain_findings(record: Record):
    """A gain that is claimed and not shown."""
    gain = record.claim.get("gain")
    if not gain or records.shows_gain(record):
        return []
    return [f"it claims a gain in {gain} over its parent, and its runs do not show it: "
            f"that needs {SEEDS[gain]} pairs in one setting, of seeds from 0 on"]


def page_findings(folder: Path, known: list, only: str | None):
    """Pages whose generated lines are not what the logs give."""
    found = []
    try:
        blocks = pages.blocks(folder, known)
    except UNREADABLE as error:
        return [f"no page can be compared: {error}"]
    for path, parts in blocks.items():
        if only not in (None, path.parent.name):
            continue
        try:
            if pages.filled(path, parts) != read_text(path):
                name = path.relative_to(folder.parent)
                found.append(f"{name} is not what `list --write` gives")
        except UNREADABLE as error:
            found.append(str(error))
    return found


def copies(known: list):
    """Records that compute what another one does, or have its public number."""
    found, scripts, numbers = [], {}, {}
    for record in known:
        name = record.folder.name
        with contextlib.suppress(*UNREADABLE):  # which is told elsewhere
            same = scripts.setdefault(meaning(above(record.script)), name)
            if same != name:
                found.append(f"{name}: its script computes what that of {same} does")
        if record.published:
            same = numbers.setdefault(record.published["number"], name)
            if same != name:
                found.append(f"{name}: its public number is that of {same}")
    return found


def notes_on(record: Record):
    """What is not wrong, but what a reader of the diff and of the tables should know."""
    found, losses, script = [], {}, record.script
    if record.parent:
        new = imports_of(above(script)) - imports_of(above(record.parent.script))
        if new:
            found.append(f"its diff adds imports: {', '.join(sorted(new))}")
    if record.claim.get("reads"):
        found.append(f"reads beside the data: {record.claim['reads']}")
    if not record.logs:
        found.append("no runs yet")
    for log in record.logs:
        first = losses.setdefault((log.setting, log.seed), log.val_loss)
        if log.val_loss != first and not log.on_gpu:
            found.append(f"seed {log.seed} has {first} and {log.val_loss} on "
                         f"{machine_words(log.setting)}: two machines of one name")
    return [f"{record.folder.name}: {words}" for words in found]


def verify(folder: Path, only: str | None):
    """(records, findings, notes): those of a folder, or the one that is meant, and their claims."""
    known, wrong = find_records(folder)
    findings = [words for words in wrong if only in (None, words.partition("/")[0])]
    chosen = [one for one in known if only in (None, one.folder.name)]
    if not chosen and not findings:
        raise LedgerError(f"{folder / (only or '')} has no record.json; give records/ or a record")
    root, is_one = folder.parent / "train_gpt.py", bool(only)
    notes, stale = [], 0
    for record in chosen:
        try:
            is_one |= record.script == read_text(root)
            found = folder_findings(record, root) + logs_findings(record) + gain_findings(record)
            notes += notes_on(record)
            stale += any(log.source_sha256 != sha256(record.script) for log in record.logs)
        except UNREADABLE as error:
            found = [str(error)]
        findings += [f"{record.folder.name}: {text}" for text in found]
    if stale:
        notes.append(f"harness or comments are newer than logs of {stale} record(s); "
                     "`verify --replay N` runs N seeds again")
    findings += page_findings(folder, known, only)
    if not only:
        findings += copies(known)
    if not is_one:
        findings.append("the root's train_gpt.py has the bytes of no record")
    return chosen, findings, notes


# ---- Logs are filed ----
def file_name(log: Log) -> str:
    return f"{log.preset}-seed-{log.seed}-{sha256(log.body)[:8]}.txt"


def record_of(log: Log, known: list) -> Record:
    """The record whose script wrote a log. Raises LedgerError where it is none."""
    source = log.source
    for record in known:
        for one in record.logs:
            if one.source_sha256 == log.source_sha256:
                source = source or one.source
    if source is None:
        raise LedgerError("has no source, nor has a filed log of its sha256; file one that has it")
    for record in known:
        with contextlib.suppress(*UNREADABLE):  # one that cannot be read wrote none
            if meaning(above(source)) == meaning(above(record.script)):
                return record
    raise LedgerError("its source is no record's; make it one first (records/README.md)")


def file_log(path: Path, folder: Path, known: list) -> str:
    """Copy a log into the folder of its record, and say where it went."""
    log = read_run(path)
    record = record_of(log, known)
    wrong = log_findings(log, settings_of(record.path, preset=log.preset))
    if wrong:
        raise LedgerError("; ".join(wrong))
    for one in record.logs:
        if is_copy(log, one):
            return f"{path} is there: {one.path.relative_to(folder)}"
    target = record.folder / "logs" / file_name(log)
    text = read_text(path).replace("\r\n", "\n")
    if any(one.source_sha256 == log.source_sha256 and one.source for one in record.logs):
        text = f"source sha256: {log.source_sha256}\n{log.body}"  # one whole log is enough
    target.parent.mkdir(exist_ok=True)
    target.write_text(text, encoding="utf-8", newline="")
    record.logs.append(read_run(target))
    no_time = "" if log.measured_ms else ", without its time"
    return f"{path} → {target.relative_to(folder)}{no_time}"


def file_logs(folder: Path, paths: list):
    """(where logs went, what was refused)."""
    (known, refused), took = find_records(folder), []
    for path in sorted(paths):
        try:
            took.append(file_log(path, folder, known))
        except UNREADABLE as error:
            refused.append(f"{path}: refused: {error}")
    return took, refused
