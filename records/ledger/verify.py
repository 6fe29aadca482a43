"""Verification: each claim of a record is held to its logs, its script, the table and the rules."""

import itertools
import re
from collections import Counter
from pathlib import Path

from ledger import pages, table
from ledger.diff import BANNER, own_part
from ledger.logs import FOLDERS, LedgerError, Log, read_log, read_text, seed_files, sha256
from ledger.run import settings_of
from ledger.table import SEEDS, TABLE, Record

# What a run may have other than its preset says: the seed, and what the script finds out itself.
FREE = {"seed", "device", "run_id", "head_chunks"}
CHANGE = re.compile(r'^Parent: \S+ Change: (.*?)(?:\n\n|""")', re.M | re.S)


def script_findings(record: Record, root: Path):
    """A harness that is not the root's, or has another meaning; a docstring that is not its own."""
    above, _, harness = record.script.partition(BANNER)
    found, wanted = [], record.claim["parent"] or "none"
    if f"\nParent: {wanted}. " not in above:
        found.append(f"train_gpt.py's docstring does not say `Parent: {wanted}.`")
    if record.parent:
        change = CHANGE.findall(above)
        if not change or change == CHANGE.findall(record.parent.script):
            found.append("train_gpt.py's docstring does not say `Change: …` in words of its own")
    if not harness or harness != read_text(root).partition(BANNER)[2]:
        found.append("train_gpt.py is not the root's, byte for byte, from its banner on")
    names = re.findall(r"^(?:def |class )?(\w+)(?:\(|:| =)", harness, re.M)
    for name in names:
        again = (rf"^(def|class) {name}\b|^{name}(:.*)? =|^\s*(global|import) .*\b{name}\b"
                 rf"|\b{name}\.\w+ = |setattr\({name}\b")
        if re.search(again, above, re.M):
            found.append(f"train_gpt.py gives {name}, which the harness defines, another meaning")
    return found


def log_findings(log: Log, settings: dict):
    """What is wrong with one finished log by itself, and against its preset and the rules."""
    found, final, header = [], log.final, log.header
    loss, ms = log.val[log.last_step]
    final_ms = max(1, float(final["train_time_ms"]))
    rate = 1000 * float(final["tokens"]) / final_ms
    # All are rounded. The clock stops after the last step's line: on a busy machine, some ms later.
    for name, shown, slack in (("val_loss", loss, 5.06e-5), ("steps", log.last_step, 0),
                               ("train_time_ms", ms, 1 + final_ms / 1000),
                               ("tokens_per_second", rate, 0.51 + 0.51 * rate / final_ms)):
        if not abs(float(final[name]) - shown) <= slack:
            found.append(f"its final {name} is {final[name]}, its steps say {shown:g}")
    if log.resumed:
        found.append("is a resumed run, which is no measurement")
    if log.simulated:
        found.append(f"was made on a {header['device']}, which measures nothing")
    for wanted, words in ((final, "its final block has"), (settings, "its preset has"),
                          (table.RULES[header["preset"]], "by the rules it is")):
        names = wanted.keys() & header.keys() if wanted is final else wanted.keys() - FREE
        for name in sorted(names):
            if wanted[name] not in (None, header.get(name)):
                found.append(f"has {name} {header.get(name)}, {words} {wanted[name]}")
    return found


def source_findings(log: Log, script: str, first: Log, notes: list):
    """Where a log's source is not its record's above the banner; a note where it is not below."""
    found = []
    if log is first and not log.source:
        return ["has no source; the first seed's log is kept whole"]
    if log.source_sha256 not in (first.source_sha256, sha256(script)):
        found.append("was not written by the source that the first seed's log has")
    if log.source and own_part(log.source) != own_part(script):
        found.append("was not written by this train_gpt.py: it differs above the banner")
    elif log is first and log.source.partition(BANNER)[2] != script.partition(BANNER)[2]:
        notes.append(f"{log.path.parts[-3]}: the harness is newer than its logs; "
                     "`verify --replay N` runs N seeds again")
    return found


def runs_findings(record: Record, settings: dict, notes: list):
    """Findings on a record's logs: each by itself, together, and beside the parent's."""
    found, first, script = [], None, record.script
    for kind, where in FOLDERS.items():
        seeds, headers = [], {}
        for path in seed_files(record.folder, kind):
            try:
                log = read_log(path)
                first = first or log
                wrong = log_findings(log, settings) + source_findings(log, script, first, notes)
            except (LedgerError, ValueError, KeyError) as error:
                found.append(f"{where}/{path.name} cannot be read: {error!r}")
                continue
            found += [f"{where}/{path.name}: {text}" for text in wrong]
            seeds.append(log.header.get("seed"))
            for name in log.header.keys() - {"seed", "run_id"}:
                headers.setdefault(name, set()).add(log.header[name])
            headers.setdefault("jobs", set()).add(log.final.get("jobs", "1"))
        for name, values in headers.items():
            if len(values) > 1:
                found.append(f"{where}/ has runs that differ in {name}")
        wanted = map(str, range(SEEDS[kind]))
        if seeds and sorted(seeds) != sorted(wanted):
            found.append(f"{where}/ has the seeds {', '.join(seeds)}; by the rules they are 0 to "
                         f"{SEEDS[kind] - 1}, each once")
        theirs = record.parent.runs.get(kind, []) if record.parent else []
        for name in table.MACHINE if seeds and theirs else ():
            if headers.get(name) != {run[name] for run in theirs}:
                found.append(f"{where}/: its parent was run with another {name}: {theirs[0][name]}")
        if kind == "time" and headers.get("jobs", {"1"}) != {"1"}:
            found.append(f"{where}/ has one of several runs at once, whose time is no measure")
    return found


def record_findings(record: Record, root: Path, notes: list):
    """Every claim of a record that its files do not bear; adds to the notes."""
    folder, parent, gain = record.folder, record.claim["parent"], record.claim["gain"]
    found = script_findings(record, root)
    if not table.FOLDER_NAME.fullmatch(folder.name):
        found.append("the folder's name is not a date and a name, YYYY-MM-DD_Name")
    if parent and not record.parent:
        return [*found, f"its parent {parent}/record.json is missing, or not older"]
    if not read_text(folder / "README.md").startswith(f"# {folder.name}\n"):
        found.append(f"README.md's title is not '# {folder.name}'")
    if not record.runs:
        notes.append(f"{folder.name}: no runs yet")
    runs = record.runs.get("loss") or [{"preset": "pocket"}]
    settings = settings_of(folder / "train_gpt.py", {"preset": runs[0]["preset"]})
    found += runs_findings(record, settings, notes)
    if gain and not table.shows_gain(record):
        found.append(f"it claims a gain in {gain} over its parent, and its runs show none")
    return found


def verify(folder: Path, only: str | None):
    """(records, findings, notes): those of a folder, or the one that is meant, and their claims."""
    records, findings, notes = table.find_records(folder), [], []
    chosen = [one for one in records if only in (None, one.folder.name)]
    for record in chosen:
        try:
            found = record_findings(record, folder.parent / "train_gpt.py", notes)
        except (LedgerError, OSError, ValueError) as error:
            found = [str(error)]
        findings += [f"{record.folder.name}: {text}" for text in found]
    try:
        for path, text in pages.blocks(folder, records).items() if records else ():
            if only in (None, path.parent.name) and pages.split_block(path)[1].strip() != text:
                findings.append(f"{path.parent.name}/README.md is not what `list --write` gives")
        if records and not only:
            findings += folder_findings(folder, records)
    except (LedgerError, OSError, ValueError) as error:
        findings.append(str(error))
    return chosen, findings, notes


def folder_findings(folder: Path, records: list):
    """What is wrong with what the records share: the root's script, the table, the numbers."""
    found = []
    if read_text(folder.parent / "train_gpt.py") != records[-1].script:
        found.append(f"{records[-1].folder.name}: train_gpt.py is not the root's")
    said = Counter(read_text(folder / TABLE).splitlines())
    true = Counter(table.table_of(folder).splitlines())
    for row in said - true:
        found.append(f"{TABLE} says {row}, which no log does")
    for row in true - said:
        found.append(f"{TABLE} lacks {row}; `list --write` makes it from the logs")
    for older, newer in itertools.pairwise(records):
        if newer.parent is not older:  # a weaker one would be easier to beat
            found.append(f"{newer.folder.name}: its parent is not {older.folder.name}")
    for path in folder.iterdir():
        if table.FOLDER_NAME.fullmatch(path.name) and not (path / "record.json").exists():
            found.append(f"{path.name}: record.json is missing")
    numbers = [record.claim["number"] for record in records]
    if numbers != sorted(set(numbers)):
        found.append(f"the records' numbers {numbers} do not rise with their dates")
    return found
