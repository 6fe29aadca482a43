"""Verification: each claim of a record is held to its logs, its script, the table and the rules."""

import re
from pathlib import Path

from ledger import pages, table
from ledger.logs import LedgerError, Log, own_part, parent_and_change, read_log, read_text, sha256
from ledger.logs import split_banner as split
from ledger.run import settings_of
from ledger.table import FOLDERS, SEEDS, TABLE, Record, seed_files

# What a run may have other than its preset says: the seed, and what the script finds out itself.
FREE = ("seed", "device", "run_id", "head_chunks")


def script_findings(record: Record, script: str, root: Path) -> list[str]:
    """A harness that is not the root's, or has another meaning; a docstring that is not its own."""
    above, harness = split(script)
    found = []
    wanted = record.claim["parent"] or "none"
    parent, change = parent_and_change(script)
    if parent != wanted:
        found.append(f"train_gpt.py's docstring does not say `Parent: {wanted}.`")
    if record.parent:
        theirs = parent_and_change(read_text(record.parent.folder / "train_gpt.py"))
        if not change or change == theirs[1]:
            found.append("train_gpt.py's docstring does not say `Change: …` in words of its own")
    if not harness or harness != split(read_text(root))[1]:
        found.append("train_gpt.py is not the root's, byte for byte, from its banner on")
    for name in re.findall(r"^(?:def |class )?(\w+)(?:\(|:| =)", harness, re.M):
        again = (rf"^(def|class) {name}\b|^{name}(:.*)? =|^\s*(global|import) .*\b{name}\b"
                 rf"|\b{name}\.\w+ = |setattr\({name}\b")
        if re.search(again, above, re.M):
            found.append(f"train_gpt.py gives {name}, which the harness defines, another meaning")
    return found


def log_findings(log: Log, settings: dict[str, str]) -> list[str]:
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
    for name in final.keys() & header.keys():
        if final[name] != header[name]:
            found.append(f"its final {name} is {final[name]}, its header says {header[name]}")
    if log.resumed:
        found.append("is a resumed run, which is no measurement")
    if log.simulated:
        found.append(f"was made on a {header['device']}, which measures nothing")
    for name, value in settings.items():
        if name not in FREE and header.get(name) != value:
            found.append(f"has {name} {header.get(name)}, its preset has {value}")
    for name, value in table.RULES[header["preset"]].items():
        if value and header.get(name) != value:
            found.append(f"has {name} {header.get(name)}, by the rules it is {value}")
    return found


def source_findings(log: Log, script: str, first: Log, notes: list[str]) -> list[str]:
    """Where a log's source is not its record's above the banner; a note where it is not below."""
    found = []
    if log is first and not log.source:
        return ["has no source; the first seed's log is kept whole"]
    if log.source_sha256 not in (first.source_sha256, sha256(script)):
        found.append("was not written by the source that the first seed's log has")
    if log.source and own_part(log.source) != own_part(script):
        found.append("was not written by this train_gpt.py: it differs above the banner")
    elif log is first and split(log.source)[1] != split(script)[1]:
        notes.append(f"{log.path.parts[-3]}: the harness is newer than its logs; "
                     "`verify --replay N` runs N seeds again")
    return found


def runs_findings(record: Record, script: str, settings: dict, notes: list[str]) -> list[str]:
    """Findings on a record's logs: each by itself, together, and beside the parent's."""
    found, first = [], None
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
        for name in headers:
            if len(headers[name]) > 1:
                found.append(f"{where}/ has runs that differ in {name}")
        if seeds and sorted(seeds) != sorted(map(str, range(SEEDS[kind]))):
            found.append(f"{where}/ has the seeds {', '.join(seeds)}; by the rules they are 0 to "
                         f"{SEEDS[kind] - 1}, each once")
        runs = record.runs.get(kind, [])
        theirs = record.parent.runs.get(kind, []) if record.parent else []
        for name in table.MACHINE:
            ours = {run[name] for run in runs}
            if len(ours) > 1:
                found.append(f"{where}/ has runs that differ in {name}")
            elif ours and theirs and ours != {run[name] for run in theirs}:
                found.append(f"{where}/: its parent was run with another {name}: {theirs[0][name]}")
            if name == "jobs" and kind == "time" and ours - {"1"}:
                found.append(f"{where}/ has one of several runs at once, whose time is no measure")
    return found


def table_findings(folder: Path) -> list[str]:
    """Where the table's rows are not what the logs give."""
    found, said = [], {}
    for row in table.read_table(folder):
        said[f"{row['record']}: {TABLE}, {row['kind']}, seed {row['seed']}"] = row
    for row in table.logs_to_rows(folder):
        where = f"{row['record']}: {TABLE}, {row['kind']}, seed {row['seed']}"
        claimed = said.pop(where, None)
        if claimed is None:
            found.append(f"{where} is missing; `list --write` makes it from the logs")
        for name in row if claimed else ():
            if claimed[name] != row[name]:
                found.append(f"{where}: {name} is {claimed[name]}, the log says {row[name]}")
    return found + [f"{where} has no log" for where in said]


def block_findings(folder: Path, wanted: str) -> list[str]:
    """Whether a README's generated lines are what `list --write` gives."""
    if pages.split_block(folder / "README.md")[1].strip() == wanted:
        return []
    return [f"{folder.name}/README.md is not what `list --write` gives"]


def record_findings(record: Record, root: Path, notes: list[str]) -> list[str]:
    """Every claim of a record that its files do not bear; adds to the notes."""
    folder, parent, gain = record.folder, record.claim["parent"], record.claim["gain"]
    script = read_text(folder / "train_gpt.py")
    found = []
    if not table.FOLDER_NAME.fullmatch(folder.name):
        found.append("the folder's name is not a date and a name, YYYY-MM-DD_Name")
    if parent and (not record.parent or parent >= folder.name):
        return [*found, f"its parent {parent}/record.json is missing, or not older"]
    found += script_findings(record, script, root)
    title = read_text(folder / "README.md").partition("\n")[0]
    if title != f"# {folder.name}":
        found.append(f"README.md's title is {title!r}, not '# {folder.name}'")
    if not record.runs:
        notes.append(f"{folder.name}: no runs yet")
    runs = record.runs.get("loss") or [{"preset": "pocket"}]
    settings = settings_of(folder / "train_gpt.py", {"preset": runs[0]["preset"]})
    found += runs_findings(record, script, settings, notes)
    if gain and not table.shows_gain(record):
        found.append(f"it claims a gain in {gain} over its parent, and its runs show none")
    return found + block_findings(folder, pages.record_block(record))


def verify(folder: Path, only: str | None) -> tuple[int, list[str], list[str]]:
    """(records, findings, notes): the records of a folder, or one of them, held to their claims."""
    records, findings, notes = table.find_records(folder), [], []
    root = folder.parent / "train_gpt.py"
    chosen = [one for one in records if only in (None, one.folder.name)]
    for record in chosen:
        try:
            found = record_findings(record, root, notes)
        except (LedgerError, OSError) as error:
            found = [str(error)]
        findings += [f"{record.folder.name}: {text}" for text in found]
    if only or not records:
        return len(chosen), findings, notes
    try:
        if root.read_bytes() != (records[-1].folder / "train_gpt.py").read_bytes():
            findings.append(f"{records[-1].folder.name}: train_gpt.py is not the root's")
        findings += table_findings(folder)
        findings += block_findings(folder, pages.ladder_block(records, folder))
        if (folder.parent / "README.md").exists():
            findings += block_findings(folder.parent, pages.front_block(records, folder))
    except (LedgerError, OSError) as error:
        findings.append(str(error))
    for path in folder.iterdir():
        if table.FOLDER_NAME.fullmatch(path.name) and not (path / "record.json").exists():
            findings.append(f"{path.name}: record.json is missing")
    numbers = [record.claim["number"] for record in records]
    if numbers != sorted(set(numbers)):
        findings.append(f"the records' numbers {numbers} do not rise with their dates")
    return len(chosen), findings, notes
