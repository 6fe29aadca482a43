"""Verification: each claim of a record is held to its logs, its script and the rules; and filing.

A log lies in its record's logs/, under a name that is made from what is in it. So it cannot be
changed unseen, and any number of runs from any number of people have a place. No script is run.
"""

import contextlib
import hashlib
import re
from pathlib import Path

from ledger import pages
from ledger.logs import SETTING, LedgerError, Log, machine_words, read_run, read_text
from ledger.records import CLAIM, FOLDER_NAME, PRESETS, RULES, Record, find_records
from ledger.scripts import above, below, history_reaches, is_same, meaning, settings_of, versions

# What a run may have other than its preset says: what changes no loss but by rounding, and what
# the script finds out itself.
FREE = set("""seed device run_id resume save_every val_every warmup_steps sequences_per_forward
    head_chunks""".split())
FILES = {"README.md", "record.json", "train_gpt.py", "logs"}  # of a record's folder
FOREIGN = "was not written by this train_gpt.py, nor by an earlier version of it or its harness"
UNREADABLE = LedgerError, MemoryError, OSError, RecursionError, SyntaxError, ValueError


# ---- What is wrong: a line for each fault ----
def folder_faults(record: Record, root: Path, seen: dict):
    """Faults of a folder, its claim, its page and its script, beside older ones, the `seen`."""
    folder, parent = record.folder, record.claim["parent"]
    if not FOLDER_NAME.fullmatch(folder.name):
        yield "the folder's name is not a date and a name, YYYY-MM-DD_Name"
    if parent and not record.parent:
        yield f"its parent {parent}/record.json is missing, not older, or comes from this one"
    for key in record.claim.keys() - CLAIM:
        yield f"record.json has {key}; known are {', '.join(CLAIM)}"
    same = seen.setdefault((record.ladder, record.retells or folder), folder)
    if same != folder:
        yield f"its public number is that of {same.name}"
    if record.number and float(record.minutes or 0) != record.published["minutes"]:
        yield f"claims #{record.number}, {record.published['minutes']} min; public.toml does not"
    if record.result and f"_o{record.result}_" not in folder.name:
        yield f"its name is not that of result {record.result}, o{record.result}"
    if not read_text(folder / "README.md").startswith(f"# {folder.name}\n"):
        yield f"README.md's title is not '# {folder.name}'"
    for path in (folder, *sorted(folder.glob("*")), *sorted(folder.glob("logs/*"))):
        # Python would import a module that lies beside the script.
        is_log = path.parent != folder and path.suffix == ".txt" and path.name[0] != "."
        if path.is_symlink() or not (path == folder or is_log or path.name in FILES):
            yield f"its folder has {path.name}, a link or what no record needs; delete it"

    script = record.script
    twin = seen.setdefault(meaning(above(script)), folder)  # SyntaxError where it is no Python
    if twin != folder:
        yield f"its script means the same above the banner as that of {twin.name}"
    words = f"Parent: {parent}. Change: " if parent else "Parent: none. "
    if f"\n{words}" not in above(script):
        yield f"train_gpt.py's docstring does not say `{words.strip()}`"
    if re.findall(r"^Record: ([\w-]*)", above(script), re.M) != [folder.name]:
        yield f"train_gpt.py's docstring does not say `Record: {folder.name}` in one place"
    if below(script) != below(read_text(root)):
        yield ("train_gpt.py is not the root's from its banner on; "
               "run records/ledger/share_harness.py")


def is_foreign(log: Log, record: Record, root: Path) -> bool:
    """Whether a log was written by another script than its record's, now or earlier.

    Each line of a script ran, so an earlier version counts as a whole; but of comments and
    docstrings above the banner. Whether it computes the same is not seen here: golden numbers, and
    the reviews of their changes, hold versions together.
    """
    source = log.source or ""
    harness = below(source)
    if not is_same(source, record.script):
        known = versions(record.path, root.parent, harness)
        return not any(is_same(source, old) for old in known)
    return harness != below(read_text(root)) and not any(versions(root, root.parent, harness))


def log_faults(log: Log, record: Record):
    """Faults of one finished log by itself, and against its preset and the rules."""
    header, final, preset = log.header, log.final, log.header["preset"]
    if preset not in PRESETS:
        yield f"has preset {preset}"
        return
    loss, ms = log.val[log.last_step]
    if abs(log.val_loss - loss) > 5.06e-5:  # both are rounded
        yield f"its final val_loss is {log.val_loss}, its steps say {loss:g}"
    if len(log.train) != log.last_step:
        yield f"has {len(log.train)} of its {log.last_step} steps"
    steps = [header.get("num_iterations"), str(log.last_step), final.get("steps")]
    if len(set(steps)) > 1:
        yield "began as a run of {} steps and has {}, by its results {}".format(*steps)
    planned, given = header.get("planned_tokens"), final.get("tokens")
    if planned not in (None, given):
        yield f"was given {given} tokens; its plan has {planned}"
    rates = re.findall(r"^step:.* tokens_per_s:(\d+)$", log.body, re.M)
    if rates and given and abs(int(rates[-1]) * ms / 1000 / int(given) - 1) > 0.01:
        yield f"was given {given} tokens; its last step says {int(rates[-1]) * ms / 1000:.0f}"
    for name in (*SETTING, "seed", "val_digest"):  # of the process it began in, and it ended in
        began, ended = header.get(name), final.get(name)
        if None not in (began, ended) and began != ended:
            yield f"was resumed where {name} is {ended}; it began with {began}"
    if re.search("^resumed at .*, which another script wrote$", log.body, re.M):
        yield "was resumed by another script than the one that began it"
    if header["device"].startswith("host standing in for"):
        yield f"was made on a {header['device']}, which measures nothing"
    for wanted, words in ((settings_of(record.script, preset), "its preset has"),
                          (RULES[record.ladder][preset], "by the rules it is")):
        for name in sorted(wanted.keys() - FREE):
            allowed = wanted[name] if isinstance(wanted[name], tuple) else (wanted[name],)
            if header.get(name) not in allowed and allowed != (None,):
                yield f"has {name} {header.get(name)}, {words} {' or '.join(allowed)}"


def logs_faults(record: Record, root: Path, seen: dict):
    """Faults of a record's logs, by themselves and beside those of older records, the `seen`."""
    for log in record.logs:
        preset, digest = log.header["preset"], log.header["val_digest"]
        wrong = list(log_faults(log, record))
        if is_foreign(log, record, root):
            reached = history_reaches(log.header.get("commit"), root.parent)
            wrong = [FOREIGN] if reached else []  # else it is a doubt, one of the remarks
        if log.path.name != file_name(log):
            wrong.append(f"is not called {file_name(log)}, which is made from what is in it")
        # Two records may compute the same. Then their times differ.
        other = seen.setdefault(tuple(log.train.items()), log)
        if other is not log:
            wrong.append(f"is a copy of {other.path.parts[-3]}/logs/{other.path.name}")
        first = seen.setdefault((record.ladder, preset), digest)
        if digest != first:
            wrong.append(f"has val_digest {digest}, and older logs have {first}")
        for words in wrong:
            yield f"logs/{log.path.name}: {words}"


def seeds_left_out(record: Record):
    """A line for each setting whose seeds do not count from 0, or lack some of the parent's."""
    for setting, logs in record.runs().items():
        seeds = {log.seed for log in logs}
        wanted = set(range(max(seeds)))
        if record.parent:
            wanted |= {log.seed for log in record.parent.runs().get(setting, [])}
        if missing := sorted(wanted - seeds):
            yield f"{record.folder.name} lacks seeds {missing}: {machine_words(setting)}"


def remarks_on(known: list, root: Path):
    """(why not all is verified, what else a reader of the tables should know): lines of each."""
    doubts, notes, earlier, unknown = [], [], 0, 0
    for record in known:
        notes += seeds_left_out(record)
        if not record.logs:
            doubts.append(f"{record.folder.name} has no logs: its runs are not verified")
        for log in record.logs:
            with contextlib.suppress(*UNREADABLE):  # which is a fault, and told as one
                if is_foreign(log, record, root):
                    unknown += not history_reaches(log.header.get("commit"), root.parent)
                else:
                    earlier += not is_same(log.source or "", record.script)
    if earlier:
        notes.append(f"{earlier} log(s) were written by earlier versions of their scripts")
    if unknown:
        doubts.append(f"{unknown} log(s) are not verified: another version of their script wrote "
                      "them, and git's history here does not reach the commit that they name: git "
                      "fetch --unshallow, or a whole clone, has it")
    return doubts, notes


def verify(folder: Path, only: str | None):
    """(records, faults, doubts, notes) of a folder, or of the one record that is meant."""
    known, faults = find_records(folder), []
    if not known:
        raise LedgerError(f"{folder} has no record.json; give records/ or a record")
    root, seen = folder.parent / "train_gpt.py", {}
    for record in known:
        try:
            found = [*folder_faults(record, root, seen), *logs_faults(record, root, seen)]
        except UNREADABLE as error:
            found = [error]
        faults += [f"{record.folder.name}: {words}" for words in found]
    try:
        for path, parts in pages.blocks(folder, known).items():
            if path.exists() and pages.filled(path, parts) != read_text(path):
                faults.append(f"{path.relative_to(folder.parent)} is not what `list --write` gives")
    except UNREADABLE as error:
        faults.append(f"no page can be compared: {error}")
    if not any(record.path.is_file() and record.script == read_text(root) for record in known):
        faults.append("the root's train_gpt.py has the bytes of no record")
    if only:
        known = [record for record in known if record.folder.name == only]
        faults = [words for words in faults if only in words]
    return known, faults, *remarks_on(known, root)


# ---- Logs are filed ----
def file_name(log: Log) -> str:
    digest = hashlib.sha256(log.body.encode()).hexdigest()
    return f"{log.header['preset']}-seed-{log.seed}-{digest[:8]}.txt"


def file_log(path: Path, folder: Path, known: list) -> str:
    """Copy a log into the folder of its record, and say where it went. Raises LedgerError."""
    log, root = read_run(path), folder.parent / "train_gpt.py"
    names = re.findall(r"^Record: ([\w-]*)", above(log.source or ""), re.M)
    record = next((one for one in known if [one.folder.name] == names), None)
    if record is None or is_foreign(log, record, root):
        raise LedgerError(f"{path}: its source is no record's, now or earlier in the history here; "
                          "make it one (records/README.md)")
    if wrong := list(log_faults(log, record)):
        raise LedgerError(f"{path}: {'; '.join(wrong)}")
    for one in record.logs:
        place = one.path.relative_to(folder)
        if one.train == log.train and (one.seed, one.val_loss) != (log.seed, log.val_loss):
            raise LedgerError(f"{path}: has the steps of {place}, but another seed or val_loss")
        if one.train == log.train:
            return f"{path} is there: {place}"
    target = record.folder / "logs" / file_name(log)
    target.parent.mkdir(exist_ok=True)
    target.write_text(read_text(path).replace("\r\n", "\n"), encoding="utf-8", newline="")
    record.logs.append(read_run(target))
    return f"{path} → {target.relative_to(folder)}"
