"""Verification: every claim of a record is held to its logs, its script, the table and the rules."""

import datetime
import re
from dataclasses import dataclass, field
from pathlib import Path

from ledger import pages, table
from ledger.logs import (
    LedgerError,
    Log,
    docstring,
    own_part,
    read_log,
    read_text,
    sha256,
    split_banner,
)
from ledger.run import settings_of
from ledger.table import FOLDERS, RULES, SEEDS, TABLE, Record, seed_files

FREE = ("seed", "device", "run_id")  # what a run may have other than its preset says
PINNED = ("target_loss", "train_files", "val_files", "val_tokens", "val_digest")


@dataclass
class Report:
    """What `verify` found: each finding is a claim that does not hold; notes are no findings."""

    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    records: int = 0

    def add(self, record: Record, findings: list[str]) -> None:
        self.findings += [f"{record.folder.name}: {text}" for text in findings]


def form_findings(record: Record, root: Path) -> list[str]:
    """What keeps a record from being verified at all."""
    folder, parent = record.folder, record.claim["parent"]
    found = table.claim_findings(record.claim)
    try:
        named = table.FOLDER_NAME.fullmatch(folder.name)
        datetime.date.fromisoformat(folder.name[:10] if named else "")
    except ValueError:
        found.append("the folder's name is not a date and a name, YYYY-MM-DD_Name")
    if parent and not record.parent:
        found.append(f"its parent {parent}/record.json is missing")
    elif parent and parent >= folder.name:
        found.append(f"its parent {parent} is not older")
    needed = [folder / "train_gpt.py", folder / "README.md", root]
    if record.parent:
        needed.append(record.parent.folder / "train_gpt.py")
    for path in needed:
        if not path.is_file():
            found.append(f"{path.parent.name}/{path.name} is missing")
    return found


def script_findings(record: Record, root: Path) -> list[str]:
    """A harness that is not the root's, or has another meaning; a docstring that is not its own."""
    script, found = read_text(record.folder / "train_gpt.py"), []
    above, harness = split_banner(script)
    words = docstring(script)
    change = words.partition("Change: ")[2]
    if f"Parent: {record.claim['parent'] or 'none'}." not in words:
        found.append("train_gpt.py's docstring does not say `Parent: "
                     f"{record.claim['parent'] or 'none'}.`")
    if record.parent:
        theirs = docstring(read_text(record.parent.folder / "train_gpt.py"))
        if not change:
            found.append("train_gpt.py's docstring does not say `Change: …`")
        elif change == theirs.partition("Change: ")[2]:
            found.append("train_gpt.py's docstring tells its parent's change")
    if not harness or harness != split_banner(read_text(root))[1]:
        found.append("train_gpt.py is not the root's, byte for byte, from its banner on")
    for name in re.findall(r"^(?:(?:async )?def |class )?(\w+)(?:\(|:| =)", harness, re.M):
        again = (rf"^(def|class) {name}\b|^{name}(:.*)? =|^\s*(global|import) .*\b{name}\b"
                 rf"|\b{name}\.\w+ = |setattr\({name}\b")
        if re.search(again, above, re.M):
            found.append(f"train_gpt.py gives {name}, which the harness defines, another meaning")
    return found


def log_findings(log: Log, wanted: dict[str, str]) -> list[str]:
    """What is wrong with one finished log by itself, and against its preset and the rules."""
    found, final, header = [], log.final, log.header
    loss, ms = log.val[log.last_step]
    rate = 1000 * float(final["tokens"]) / max(1, float(final["train_time_ms"]))
    # The step's line rounds further: by half its last digit, and the clock's last millisecond.
    for name, shown, slack in (("val_loss", loss, 5.06e-5), ("train_time_ms", ms, 1),
                               ("steps", log.last_step, 0), ("tokens_per_second", rate, 1)):
        if not abs(float(final.get(name, "nan")) - shown) <= slack:
            found.append(f"its final {name} is {final.get(name)}, its steps say {shown:g}")
    for name in final.keys() & header.keys():
        if final[name] != header[name]:
            found.append(f"its final {name} is {final[name]}, its header says {header[name]}")
    if log.resumed:
        found.append("is a resumed run, which is no measurement")
    if log.simulated:
        found.append(f"was made on a {header.get('device')}, which measures nothing")
    for name, value in wanted.items():
        if name not in FREE and header.get(name) != value:
            found.append(f"has {name} {header.get(name)}, its preset has {value}")
    rule = RULES.get(header.get("preset"))
    if not rule:
        return [*found, f"has preset {header.get('preset')}, which the rules do not have"]
    for name in PINNED:
        pinned = getattr(rule, name)
        if pinned is not None and header.get(name) != str(pinned):
            found.append(f"has {name} {header.get(name)}, by the rules it is {pinned}")
    return found


def runs_findings(record: Record, kind: str, wanted: dict, report: Report) -> list[str]:
    """Findings on a record's logs of a kind, each by itself, together, and beside the parent's."""
    script = read_text(record.folder / "train_gpt.py")
    found, logs, sources = [], [], {sha256(script)}
    for path in seed_files(record.folder, "loss")[:1]:
        sources.add(read_log(path).source_sha256)
    for path in seed_files(record.folder, kind):
        try:
            log = read_log(path)
            if not log.finished:
                raise LedgerError("; ".join(log.notes))
            wrong = log_findings(log, wanted)
        except (LedgerError, ValueError, KeyError) as error:
            found.append(f"{path.name} cannot be read: {error}")
            continue
        if log.source and own_part(log.source) != own_part(script):
            wrong.append("was not written by this train_gpt.py: it differs above the banner")
        elif log.source and split_banner(log.source)[1] != split_banner(script)[1]:
            report.notes.append(f"{record.folder.name}: the harness is newer than its logs; "
                                "`verify --replay N` runs N seeds again")
        elif not log.source and (kind == "loss" and not logs):
            wrong.append("has no source; the first seed's log is kept whole")
        if log.source_sha256 not in sources:
            wrong.append("was not written by the source that the first seed's log has")
        logs.append(log)
        found += [f"{FOLDERS[kind]}/{path.name}: {text}" for text in wrong]
    headers = [log.header for log in logs]
    for name in headers[0] if headers else ():
        if name not in ("seed", "run_id") and len({one.get(name) for one in headers}) > 1:
            found.append(f"{FOLDERS[kind]}/ has runs that differ in {name}")
    return found + seeds_findings(record, kind, [header.get("seed") for header in headers])


def seeds_findings(record: Record, kind: str, seeds: list[str]) -> list[str]:
    """Whether the seeds are those set before, none twice, on the machine of the parent's runs."""
    found, where = [], FOLDERS[kind]
    for seed in sorted(set(seeds)):
        if seeds.count(seed) > 1:
            found.append(f"{where}/ has seed {seed} twice")
    if sorted(seeds) != sorted(map(str, range(SEEDS[kind]))):
        found.append(f"{where}/ has the seeds {', '.join(seeds)}; by the rules they are 0 to "
                     f"{SEEDS[kind] - 1}")
    theirs = record.parent.runs.get(kind, ()) if record.parent else ()
    for name in table.MACHINE:
        ours = {run[name] for run in record.runs.get(kind, ())}
        if len(ours) > 1:
            found.append(f"{where}/ has runs that differ in {name}")
        elif ours and theirs and ours != {run[name] for run in theirs}:
            found.append(f"{where}/: its parent was run with another {name}: {theirs[0][name]}")
        if name == "jobs" and kind == "time" and ours - {"1"}:
            found.append(f"{where}/ has one of several runs at once, whose time is no measurement")
    return found


def table_findings(folder: Path) -> list[str]:
    """Where the table's rows are not what the logs give."""
    rows, found = table.logs_to_rows(folder)
    said = {}
    for row in table.read_table(folder / TABLE):
        said[row["record"], row["kind"], row["seed"]] = row
    for row in rows:
        where = f"{row['record']}: {TABLE}, {row['kind']}, seed {row['seed']}"
        claims = said.pop((row["record"], row["kind"], row["seed"]), None)
        if claims is None:
            found.append(f"{where} is missing; `list --write` makes it from the logs")
        for name in row if claims else ():
            if claims[name] != row[name]:
                found.append(f"{where}: {name} is {claims[name]}, the log says {row[name]}")
    for record, kind, seed in said:
        found.append(f"{record}: {TABLE}, {kind}, seed {seed} has no log")
    return found


def block_findings(path: Path, wanted: str) -> list[str]:
    """Whether a README's generated lines are what `list --write` gives."""
    try:
        shown = pages.split_block(path)[1].strip()
    except LedgerError as error:
        return [str(error)]
    if shown != wanted:
        return [f"{path.parent.name}/README.md is not what `list --write` gives"]
    return []


def record_findings(record: Record, settings: dict, report: Report, root: Path) -> list[str]:
    """Every claim of a record that its files do not bear; adds to the report's notes."""
    found = script_findings(record, root)
    title = read_text(record.folder / "README.md").partition("\n")[0]
    if title != f"# {record.folder.name}":
        found.append(f"README.md's title is {title!r}, not '# {record.folder.name}'")
    for kind in FOLDERS:
        if record.runs.get(kind) or seed_files(record.folder, kind):
            found += runs_findings(record, kind, settings, report)
    if not record.runs:
        report.notes.append(f"{record.folder.name}: no runs yet")
    if record.claim["gain"] and not table.shows_gain(record):
        found.append(f"it claims a gain in {record.claim['gain']} over its parent, and its runs "
                     "show none")
    return found + block_findings(record.folder / "README.md", pages.record_block(record))


def verify(folder: Path, only: str | None) -> Report:
    """Hold the records of a folder, or one of them, to what they claim."""
    report, records = Report(), table.find_records(folder)
    root, usable, asked = folder.parent / "train_gpt.py", [], []
    for record in records:
        if only in (None, record.folder.name):
            report.records += 1
            wrong = form_findings(record, root)
            report.add(record, wrong)
            if not wrong:
                usable.append(record)
                run = next(iter(record.runs.get("loss", ())), {"preset": "pocket"})
                asked.append((record.folder / "train_gpt.py", ["--preset", run["preset"]]))
    for record, settings in zip(usable, settings_of(asked) if asked else ()):
        report.add(record, record_findings(record, settings, report, root))
    if only or not records:
        return report
    report.findings += table_findings(folder)
    for path in folder.iterdir():
        if table.FOLDER_NAME.fullmatch(path.name) and not (path / "record.json").exists():
            report.findings.append(f"{path.name}: record.json is missing")
    numbers = [record.claim["number"] for record in records]
    if not report.findings and numbers != sorted(set(numbers)):
        report.findings.append(f"the records' numbers {numbers} do not rise with their dates")
    newest = records[-1].folder / "train_gpt.py"
    if not root.is_file() or not newest.is_file() or root.read_bytes() != newest.read_bytes():
        report.add(records[-1], ["train_gpt.py is not the root's, byte for byte"])
    if len(usable) == len(records):
        report.findings += block_findings(folder / "README.md", pages.ladder_block(records, folder))
    return report
