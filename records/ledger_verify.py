"""Verification: every claim of a record is held to its logs, its script and the rules."""

import contextlib
import datetime
import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path

from ledger_base import LedgerError, read_text, sha256
from ledger_logs import Log, read_log, seed_files
from ledger_records import (
    CLAIM,
    GAINS,
    MODELLED,
    PUBLISHED,
    SAME,
    TIMES,
    Record,
    find_records,
    measure,
    read_record,
    run_facts,
    shows_gain,
)
from ledger_rules import RULES, SIGNIFICANCE
from ledger_sources import (
    SHARED,
    banners,
    own_sections,
    preset_values,
    rebound,
    section_texts,
)
from ledger_stats import is_significant
from ledger_tables import (
    REGION,
    RULES_REGION,
    p_words,
    record_region,
    rules_region,
    split_region,
    table_region,
)

FOLDER_NAME = re.compile(r"\d{4}-\d{2}-\d{2}_[A-Za-z0-9]+")
# What a run may have other than its preset says: the seed, and what the script itself finds out.
FREE = ("seed", "device", "run_id", "head_chunks")


@dataclass
class Report:
    """What `verify` found: each finding is a claim that does not hold; notes are no findings."""

    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    records: int = 0

    def add(self, folder: Path, findings: list[str]) -> None:
        self.findings += [f"{folder.name}: {text}" for text in findings]


def flatten(value, path: str = "") -> dict[str, object]:
    """Leaves of nested dicts and lists by dotted path."""
    if not isinstance(value, (dict, list)) or not value:
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {leaf: v for key, item in items for leaf, v in flatten(item, f"{path}.{key}").items()}


def claim_findings(claim: dict) -> list[str]:
    """What is wrong with a record.json's `claim` by itself."""
    found = [f"claim.{name} is {claim[name]!r}, not a usable value"
             for name, kind in CLAIM.items()
             if not isinstance(claim[name], kind) or name == "gain" and claim[name] not in GAINS]
    found += [f"claim.{name} is not a field of a claim" for name in claim if name not in CLAIM]
    if claim["gain"] and not claim["parent"]:
        found.append("claim.gain is made without a parent")
    return found + [f"claim.{part}.{name} is missing or of another kind"
                    for part, kinds in {"published": PUBLISHED, "modelled": MODELLED}.items()
                    for name, kind in kinds.items() if isinstance(claim[part], dict)
                    and not isinstance(claim[part].get(name), kind)]


# -----------------------------------------------------------------------------
# Scripts
# -----------------------------------------------------------------------------


def docstring(source: str) -> str:
    """The text between a script's first triple quotes, on one line."""
    match = re.search(r'"""(.*?)"""', source, re.S)
    return " ".join(match[1].split()) if match else ""


def change_of(source: str) -> str:
    """What a docstring says after `Change:`."""
    return docstring(source).partition("Change: ")[2]


def script_findings(record: Record, script: str, skeleton: Path, parent: Path | None) -> list[str]:
    """What is wrong with a record's script: sections not the skeleton's, a docstring not its own.

    `skeleton` is the root's script, `parent` the parent's, where there is one.
    """
    found, wanted = [], record.claim["parent"] or "none"
    if f"Parent: {wanted}." not in docstring(script):
        found.append(f"train_gpt.py's docstring does not say `Parent: {wanted}.`")
    if parent and not change_of(script):
        found.append("train_gpt.py's docstring does not say `Change: …`")
    elif parent and parent.is_file() and change_of(script) == change_of(read_text(parent)):
        found.append("train_gpt.py's docstring tells its parent's change")
    if not skeleton.is_file():
        return [*found, f"{skeleton.name} is missing beside the records' folder, so nothing shows "
                        "that the shared sections are as they should be"]
    root = read_text(skeleton)
    titles, root_titles = (list(banners(text.split("\n")).values()) for text in (script, root))
    if titles != root_titles:
        found.append(f"train_gpt.py's sections are {', '.join(titles)}, not the root script's")
    texts, root_texts = section_texts(script), section_texts(root)
    found += [f"train_gpt.py's section {title} is not the root script's, byte for byte"
              for title in SHARED if texts.get(title) != root_texts.get(title)]
    return found + [f"train_gpt.py gives {name}, which a shared section defines, another meaning"
                    for name in rebound(script)]


def header_texts(value) -> tuple[str, str]:
    """How a log's header may show a hyperparameter, as far as the first line goes."""
    return str(value).partition("\n")[0], repr(value)


def source_findings(script: str, log: Log) -> list[str]:
    """Where the source in a log is not this script, in the sections that are the record's own."""
    if log.source is None:
        return ["has no source; the first seed's log is kept whole"]
    before, now = own_sections(log.source), own_sections(script)
    return [f"was not written by this train_gpt.py: {title} differs"
            for title in {**before, **now} if before.get(title) != now.get(title)]


# -----------------------------------------------------------------------------
# Logs
# -----------------------------------------------------------------------------


def log_findings(log: Log, script: str) -> list[str]:
    """What is wrong with one finished log by itself, and against the script and the rules."""
    found, final, header = [], log.final, log.header
    loss, ms = log.val[log.last_step]
    # The step's line rounds further: by half its last digit, and the clock's last millisecond.
    for name, shown, slack in (("val_loss", loss, 5.06e-5), ("train_time_ms", ms, 1),
                               ("steps", log.last_step, 0)):
        if abs(float(final[name]) - shown) > slack:
            found.append(f"its final {name} is {final[name]}, its last step says {shown:g}")
    found += [f"its final {name} is {final[name]}, its header says {header.get(name)}"
              for name in (*SAME, "seed") if final.get(name, "") not in ("", header.get(name))]
    if log.resumed:
        found.append("is a resumed run, which is no measurement")
    if log.simulated:
        found.append(f"was made on a {header.get('device')}, which measures nothing")
    preset = header.get("preset", "")
    wanted = preset_values(script, preset)
    if wanted is None:
        found.append(f"was made with --preset {preset}, which train_gpt.py does not have")
    for name, value in (wanted or {}).items():
        same = value is None or header.get(name) in header_texts(value)
        if not same and name not in FREE:
            found.append(f"has {name} {header.get(name)}, its preset today has {value}")
    return found + rule_findings(preset, header)


def rule_findings(preset: str, header: dict[str, str]) -> list[str]:
    """Where a run's target and validation set are not those of its preset's rules."""
    if preset not in RULES:
        return [f"was made with --preset {preset}, which the rules do not have"]
    rule = RULES[preset]
    pairs = (("target_loss", str(rule.target_loss)), ("val_files", rule.val_files),
             ("val_tokens", str(rule.val_tokens)))
    return [f"has {name} {header.get(name)}, by the rules it is {wanted}"
            for name, wanted in pairs if header.get(name) != wanted]


def seeds_findings(prefix: str, logs: list[Log], least: int) -> list[str]:
    """Whether the seeds count from 0, none twice and none missing, and are enough."""
    name, seeds = f"logs/{prefix}seed-*.txt", [log.header.get("seed") for log in logs]
    found = [f"{name} has seed {seed} twice"
             for seed in sorted(set(seeds)) if seeds.count(seed) > 1]
    if not found and set(seeds) != set(map(str, range(len(seeds)))):
        found.append(f"{name} has the seeds {', '.join(map(str, seeds))}, not all from 0 on")
    if len(set(seeds)) < least:
        found.append(f"{name} has {len(set(seeds))} seeds, by the rules {least} are the least")
    return found


def group_findings(folder: Path, prefix: str, script: str, claimed: dict, sources: set[str],
                   least: int) -> tuple[list[str], list[Log]]:
    """Findings on the logs of a record, or on those of its parent; and the finished logs.

    `sources` are what may have written them; the first log of a record's losses has its own.
    """
    found, logs, files = [], [], seed_files(folder, prefix)
    home = f"logs/{prefix}".rpartition("/")[0]
    for file in files:
        try:
            run_facts(file)
            log = read_log(file)
            wrong = log_findings(log, script)
        except LedgerError as error:
            found.append(str(error))
            continue
        logs.append(log)
        if not prefix and file is files[0]:
            wrong += source_findings(script, log)
            sources = {log.sha256}
        elif log.sha256 not in sources:
            whose = ("the parent's folder has" if prefix.endswith("parent-") else
                     "the record's folder has" if prefix else "the first seed was run from")
            wrong.append(f"was not written by the source that {whose}")
        found += [f"{home}/{file.name}: {text}" for text in wrong]
    missing = {run["log"] for run in claimed.get("runs", [])} - {file.name for file in files}
    found += [f"{home}/{name} is claimed and missing" for name in sorted(missing)]
    headers = [log.header for log in logs]
    found += [f"logs/{prefix}seed-*.txt differ in {name}" for name in dict(*headers[:1])
              if name not in ("seed", "run_id") and len({h.get(name) for h in headers}) > 1]
    return found + seeds_findings(prefix, logs, least), logs


# -----------------------------------------------------------------------------
# Records
# -----------------------------------------------------------------------------


def form_findings(record: Record) -> list[str]:
    """What keeps a record from being verified at all."""
    folder, claim, found = record.folder, record.claim, claim_findings(record.claim)
    if found:
        return found
    try:
        datetime.date.fromisoformat(record.date if FOLDER_NAME.fullmatch(folder.name) else "")
    except ValueError:
        found.append("the folder's name is not a date and a name, YYYY-MM-DD_Name")
    if claim["parent"] and claim["parent"] >= folder.name:
        found.append(f"its parent {claim['parent']} is not older")
    needed = [folder / "train_gpt.py", folder / "README.md"]
    needed += [folder.parent / claim["parent"] / "train_gpt.py"] if claim["parent"] else []
    found += [f"{path.parent.name}/{path.name} is missing" for path in needed if not path.is_file()]
    if record.measured is None:
        found.append("record.json has no measured block: use `run`")
    return found


def known_sources(folder: Path) -> set[str]:
    """sha256 of the sources in a record's folder: its script, and what its own logs came from."""
    found = {sha256(read_text(folder / "train_gpt.py"))}
    for file in seed_files(folder):
        with contextlib.suppress(LedgerError):
            found.add(read_log(file).sha256)
    return found


def runs_findings(record: Record, script: str, parent: Path | None, prefix: str,
                  least: int) -> tuple[list[str], list[Log]]:
    """Findings on `logs/<prefix>seed-*.txt` and on the parent's beside them; and the former."""
    claimed = (record.measured.get("times") if prefix else record.measured) or {}
    sources = known_sources(record.folder) if prefix else set()
    found, logs = group_findings(record.folder, prefix, script, claimed, sources, least)
    if not parent:
        return found, logs
    wrong, theirs = group_findings(record.folder, f"{prefix}parent-",
                                   read_text(parent / "train_gpt.py"),
                                   claimed.get("parent") or {}, known_sources(parent), least)
    found += wrong
    for ours, other in zip(logs[:1], theirs[:1]):
        found += [f"its parent was run with another {name}: {other.header.get(name)}"
                  for name in SAME if other.header.get(name) != ours.header.get(name)]
    if theirs and len(theirs) != len(logs):
        found.append(f"its parent was run with {len(theirs)} seeds, itself with {len(logs)}")
    return found, logs


def times_findings(record: Record, script: str, parent: Path | None, least: int) -> list[str]:
    """Findings on the runs that were made for their times."""
    found, logs = runs_findings(record, script, parent, TIMES, least)
    preset = record.measured.get("preset")
    for log in logs:
        if log.header.get("preset") != preset:
            found.append(f"logs/{TIMES}{log.path.name}: was made with --preset "
                         f"{log.header.get('preset')}, the losses with {preset}")
        if "jobs" in log.final:
            found.append(f"logs/{TIMES}{log.path.name}: is one of {log.final['jobs']} runs at "
                         "once, whose time is no measurement")
    return found


def record_findings(record: Record, newest: bool, notes: list[str]) -> list[str]:
    """Every claim of a record that its files do not bear, one line each; adds to `notes`."""
    folder, claim, found = record.folder, record.claim, form_findings(record)
    if found:
        return found
    script = read_text(folder / "train_gpt.py")
    parent = folder.parent / claim["parent"] if claim["parent"] else None
    parent_script = parent / "train_gpt.py" if parent else None
    found = script_findings(record, script, folder.parent.parent / "train_gpt.py", parent_script)
    title = read_text(folder / "README.md").partition("\n")[0]
    if title != f"# {folder.name}":
        found.append(f"README.md's title is {title!r}, not '# {folder.name}'")
    preset = record.measured.get("preset")
    rule = RULES.get(preset)
    wrong, logs = runs_findings(record, script, parent, "", rule.least_seeds(newest) if rule else 1)
    found += wrong
    if logs and logs[0].source and sha256(logs[0].source) != sha256(script):
        notes.append(f"{folder.name}: the shared sections are newer than its logs; "
                     "`verify --replay N` runs N seeds again")
    if seed_files(folder, TIMES):
        found += times_findings(record, script, parent, rule.seeds if rule else 1)
    return found + claims_against_logs(record)


def claims_against_logs(record: Record) -> list[str]:
    """Where record.json and the README's generated part are not what the logs give."""
    folder, claim = record.folder, record.claim
    try:
        true = Record(folder, claim, measure(record))
        said, shown = flatten(record.measured), flatten(true.measured)
    except LedgerError as error:
        return [f"its logs cannot be measured: {error}"]
    pairs = {key: (said.get(key, "missing"), shown.get(key, "nothing")) for key in said | shown}
    found = [f"measured{key} is {claims}, the logs say {logs}"
             for key, (claims, logs) in pairs.items() if claims != logs]
    p = true.measured["p_target"]
    if claim["meets_target"] and not is_significant(p):
        found.append(f"it claims to meet the target, with {p_words(p)}, not below {SIGNIFICANCE}")
    if claim["gain"] and not shows_gain(true.measured, claim["gain"]):
        found.append(f"it claims a gain in {claim['gain']} over its parent, and its runs show none")
    return found + region_findings(folder / "README.md", record_region(true))


def region_findings(path: Path, wanted: str, region: tuple = REGION) -> list[str]:
    """Whether a README's generated part is what the records give."""
    try:
        lines = split_region(path, region)[1].split("\n")
    except LedgerError as error:
        return [str(error)]
    pairs = itertools.zip_longest(lines, wanted.split("\n"))
    return [f"{path.name} is not what `list --write` gives: {str(old)[:60]!r}"
            for old, new in pairs if old != new][:1]


def verify(folder: Path) -> Report:
    """Hold one record's folder, or all of a folder of records, to what they claim."""
    report = Report()
    if (folder / "record.json").exists() or FOLDER_NAME.fullmatch(folder.name):
        later = [path for path in folder.parent.glob("*/record.json")
                 if path.parent.name > folder.name]
        record = read_record(folder)
        report.add(folder, record_findings(record, not later, report.notes))
        report.records = 1
        return report
    records = find_records(folder)
    report.records = len(records)
    for record in records:
        report.add(record.folder, record_findings(record, record is records[-1], report.notes))
    report.findings += [
        f"{path.name}: record.json is missing; `run` writes it" for path in folder.iterdir()
        if FOLDER_NAME.fullmatch(path.name) and not (path / "record.json").exists()]
    if not records:
        return report
    numbers = [n for record in records if isinstance(n := record.claim["number"], int)]
    if numbers != sorted(set(numbers)):
        report.findings.append(f"the records' numbers {numbers} do not rise with their dates")
    root, newest = folder.parent / "train_gpt.py", records[-1].folder / "train_gpt.py"
    if [root.is_file() and root.read_bytes()] != [newest.is_file() and newest.read_bytes()]:
        report.add(newest.parent, ["train_gpt.py is not the root's, byte for byte"])
    with contextlib.suppress(KeyError, TypeError, ValueError):  # the record's own findings
        report.findings += region_findings(folder / "README.md", table_region(records))
    report.findings += region_findings(folder / "README.md", rules_region(), RULES_REGION)
    return report
