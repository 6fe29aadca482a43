"""Verification: each claim of a record is held to its logs, its script and the rules; and filing.

A log lies in its record's logs/, under a name that is made from what is in it. So it cannot be
changed unseen, and any number of runs from any number of people have a place.
"""

import ast
import re
from pathlib import Path

from ledger import pages, records
from ledger.logs import LedgerError, Log, machine_words, read_text, sha256
from ledger.records import FLOOR, RULES, SEEDS, Record, find_records, read_run
from ledger.scripts import BANNER, above, imports_of, meaning, settings_of

# What a run may have other than its preset says: what changes no loss but by rounding, and what
# the script finds out itself.
FREE = set("""seed device run_id resume save_every val_every warmup_steps sequences_per_forward
    head_chunks""".split())
CHANGE = re.compile(r'^Parent: \S+ Change: (.*?)(?:\n\n|""")', re.M | re.S)
NAMED = re.compile(r"^Record: (\w[\w-]*)", re.M)  # in a docstring
FILES = {"README.md", "record.json", "train_gpt.py", "logs"}  # of a record's folder


# ---- What is wrong ----
def script_findings(record: Record, root: Path, notes: list):
    """A harness that is not the root's; a docstring that is not its own. Notes what it imports."""
    script, _, harness = record.script.partition(BANNER)
    found, wanted = [], record.claim["parent"] or "none"
    if f"\nParent: {wanted}. " not in script:
        found.append(f"train_gpt.py's docstring does not say `Parent: {wanted}.`")
    if record.parent:
        change = CHANGE.findall(script)
        if not change or change == CHANGE.findall(record.parent.script):
            found.append("train_gpt.py's docstring does not say `Change: …` in words of its own")
        new = imports_of(script) - imports_of(above(record.parent.script))
        if new:
            notes.append(f"{record.folder.name}: its diff adds imports: {', '.join(sorted(new))}")
    for name in NAMED.findall(ast.get_docstring(ast.parse(script)) or ""):
        if name != record.folder.name:
            found.append(f"train_gpt.py's docstring says `Record: {name}`, which is not its folder")
    if not harness or harness != read_text(root).partition(BANNER)[2]:
        found.append("train_gpt.py is not the root's, byte for byte, from its banner on; "
                     "`python records/share_harness.py` copies it")
    return found


def log_findings(log: Log, settings: dict):
    """What is wrong with one finished log by itself, and against its preset and the rules."""
    found, final, header = [], log.final, log.header
    loss, ms = log.val[log.last_step]
    # All are rounded. The clock stops after the last step's line: on a busy machine, some ms later.
    if abs(log.val_loss - loss) > 5.06e-5:
        found.append(f"its final val_loss is {final['val_loss']}, its steps say {loss:g}")
    if not abs(log.train_time_ms - ms) <= 1 + log.train_time_ms / 1000:
        found.append(f"its final train_time_ms is {final['train_time_ms']}, its steps say {ms:g}")
    if header["device"].startswith("host standing in for"):
        found.append(f"was made on a {header['device']}, which measures nothing")
    if log.val_loss < FLOOR[log.preset]:
        found.append(f"says a loss of {log.val_loss:.4f}: no honest model gets below "
                     f"{FLOOR[log.preset]}")
    for wanted, words in ((settings, "its preset has"), (RULES[log.preset], "by the rules it is")):
        for name in sorted(wanted.keys() - FREE):
            if wanted[name] not in (None, header.get(name)):
                found.append(f"has {name} {header.get(name)}, {words} {wanted[name]}")
    return found


def is_stale(record: Record) -> bool:
    """Whether the harness changed after a log was written."""
    harness = record.script.partition(BANNER)[2]
    return any(log.source and log.source.partition(BANNER)[2] != harness for log in record.logs)


def runs_findings(record: Record, notes: list):
    """What is wrong with a record's logs, each by itself and beside the others."""
    found, script = list(record.damaged), record.script
    sources = {log.source_sha256: log.source for log in record.logs if log.source}
    seen, losses = {}, {}
    for log in record.logs:
        wrong = log_findings(log, settings_of(record.path, {"preset": log.preset}))
        source = sources.get(log.source_sha256)
        if not source:
            wrong.append("has no source, nor has another log that has its sha256; one of each is "
                         "kept whole")
        elif meaning(above(source)) != meaning(above(script)):
            wrong.append("was not written by this train_gpt.py: it differs above the banner")
        if log.path.name != file_name(log):
            wrong.append(f"is not called {file_name(log)}, which is made from what is in it")
        other = seen.setdefault(log.losses, log)
        if other is not log and (other.seed != log.seed or other.setting == log.setting):
            wrong.append(f"has each loss of {other.path.name}; one run counts once")
        found += [f"logs/{log.path.name}: {words}" for words in wrong]
        first = losses.setdefault((log.setting, log.seed), log.val_loss)
        if log.val_loss != first and not log.on_gpu:
            notes.append(f"{record.folder.name}: seed {log.seed} has {first} and {log.val_loss} on "
                         f"{machine_words(log.setting)}: two machines of one name")
    return found


def record_findings(record: Record, root: Path, notes: list):
    """Every claim of a record that its files do not bear; adds to the notes."""
    folder, parent, gain = record.folder, record.claim["parent"], record.claim.get("gain")
    found = script_findings(record, root, notes)
    if not records.FOLDER_NAME.fullmatch(folder.name):
        found.append("the folder's name is not a date and a name, YYYY-MM-DD_Name")
    if parent and not record.parent:
        found.append(f"its parent {parent}/record.json is missing, damaged or not older")
    if not read_text(folder / "README.md").startswith(f"# {folder.name}\n"):
        found.append(f"README.md's title is not '# {folder.name}'")
    for path in sorted(folder.glob("[!._]*")):
        if path.name not in FILES:  # Python would import a module that lies beside the script
            found.append(f"its folder has {path.name}, which no record needs; delete it")
    if not record.logs:
        notes.append(f"{folder.name}: no runs yet")
    if record.claim.get("reads"):
        notes.append(f"{folder.name}: reads a file: {record.claim['reads']}")
    settings_of(record.path, {"preset": "pocket"})  # raises where it does not run
    found += runs_findings(record, notes)
    if gain and not records.shows_gain(record):
        found.append(f"it claims a gain in {gain} over its parent, and its runs do not show it: "
                     f"that needs {SEEDS[gain]} pairs in one setting, of seeds from 0 on")
    return found


def page_findings(folder: Path, known: list, only: str | None):
    """Pages whose generated lines are not what the logs give."""
    found = []
    try:
        for path, parts in pages.blocks(folder, known).items():
            if only in (None, path.parent.name):
                name, text = path.relative_to(folder.parent), read_text(path)
                if pages.filled(path, text, parts) != text:
                    found.append(f"{name} is not what `list --write` gives")
    except (LedgerError, OSError, ValueError) as error:
        found.append(str(error))
    return found


def verify(folder: Path, only: str | None):
    """(records, findings, notes): those of a folder, or the one that is meant, and their claims."""
    (known, wrong), notes = find_records(folder), []
    findings = [words for words in wrong if only in (None, words.partition("/")[0])]
    chosen = [one for one in known if only in (None, one.folder.name)]
    if not chosen and not findings:
        raise LedgerError(f"{folder / (only or '')} has no record.json; give records/ or a record")
    root, stale = folder.parent / "train_gpt.py", 0
    for record in chosen:
        try:
            found = record_findings(record, root, notes)
            stale += is_stale(record)
        except (LedgerError, OSError, SyntaxError, ValueError) as error:
            found = [str(error)]
        findings += [f"{record.folder.name}: {text}" for text in found]
    if stale:
        notes.insert(0, f"the harness is newer than logs of {stale} record(s); `verify --replay N` "
                        "runs N seeds again")
    findings += page_findings(folder, known, only)
    if not only:
        same = [record.folder.name for record in known if record.script == read_text(root)]
        if len(same) != 1:
            findings.append("the root's train_gpt.py has the bytes of "
                            f"{' and '.join(same) or 'no record'}; it has to have those of one")
    return chosen, findings, notes


# ---- Logs are filed ----
def file_name(log: Log) -> str:
    return f"{log.preset}-seed-{log.seed}-{sha256(log.body)[:8]}.txt"


def record_of(log: Log, known: list) -> Record:
    """The record whose script wrote a log. Raises LedgerError where it is none, or is not fit."""
    for record in known:
        if log.source_sha256 == sha256(record.script) or (
                log.source and meaning(above(log.source)) == meaning(above(record.script))):
            settings = settings_of(record.path, {"preset": log.preset})
            if wrong := log_findings(log, settings):
                raise LedgerError("; ".join(wrong))
            return record
    raise LedgerError("its source is no record's; make it one first (records/README.md)")


def file_logs(folder: Path, paths: list):
    """Copy logs into the folders of their records: (where they went, what was refused)."""
    (known, refused), took = find_records(folder), []
    for path in sorted(paths):
        try:
            log = read_run(path)
            record = record_of(log, known)
        except (LedgerError, OSError, SyntaxError, ValueError) as error:
            refused.append(f"{path}: refused: {error}")
            continue
        there = [one for one in record.logs
                 if (one.losses, one.seed, one.setting) == (log.losses, log.seed, log.setting)]
        if there:  # once more the same run, or a CPU's of the same machine
            took.append(f"{path} is there: {there[0].path.relative_to(folder)}")
            continue
        target = record.folder / "logs" / file_name(log)
        text = read_text(path).replace("\r\n", "\n")
        if any(one.source_sha256 == log.source_sha256 and one.source for one in record.logs):
            text = f"source sha256: {log.source_sha256}\n{log.body}"  # one whole log is enough
        target.parent.mkdir(exist_ok=True)
        target.write_text(text, encoding="utf-8", newline="")
        record.logs.append(read_run(target))
        no_time = "" if log.measured_ms else ", without its time"
        took.append(f"{path} → {target.relative_to(folder)}{no_time}")
    return took, refused
