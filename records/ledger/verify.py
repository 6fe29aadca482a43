"""Verification: each claim of a record is held to its logs, its script, the table and the rules."""

import ast
import re
import symtable
from collections import Counter
from pathlib import Path

from ledger import pages, table
from ledger.diff import BANNER, meaning
from ledger.logs import LedgerError, Log, places, read_log, read_text, seed_files, sha256
from ledger.table import PARENT, TABLE, Record, run_row, setting_of, settings_of

# What a run may have other than its preset says: the seed, and what the script finds out itself.
FREE = {"seed", "device", "run_id", "head_chunks"}
CHANGE = re.compile(r'^Parent: \S+ Change: (.*?)(?:\n\n|""")', re.M | re.S)
NAMED = re.compile(r"^Record: (\w[\w-]*)", re.M)  # in a docstring
# A record may use these modules above its banner, and these parts of `run`.
MODULES = set("""bisect collections dataclasses functools itertools math numpy random re torch
    typing""".split())
OF_RUN = set("""run.first_step run.health.check run.loader.next_step run.log_step run.model
    run.optimizers run.pause run.ranks run.health run.loader""".split())
# It needs none of these: they reach the harness, the clock, files or other code.
BUILTINS = set("""__import__ breakpoint compile delattr eval exec getattr globals input locals open
    setattr vars""".split())
ATTRIBUTES = set("""DataSource builtins cpp_extension ctypes ctypeslib from_file fromfile gc
    genfromtxt hub importlib inspect load load_library loadtxt memmap multiprocessing open
    open_memmap os pickle read_bytes read_text save savetxt savez serialization subprocess sys
    tofile train_files val_files val_tokens write_bytes write_text""".split())
PRIVATE = {"super().__init__", "torch._dynamo", "torch._scaled_mm"}  # but for these
STALE = "the harness is newer than {} folder(s) of logs; `verify --replay N` runs N seeds again"
READS = {"np.load", "find_shards"}  # allowed where record.json says what is read
FILES = {"README.md", "record.json", "train_gpt.py", "logs"}  # of a record's folder


def names_bound(source: str) -> set:
    """Names that a source gives a meaning at its top level, also from within functions."""
    found, tables = set(), [symtable.symtable(source, "train_gpt.py", "exec")]
    for scope in tables:
        for symbol in scope.get_symbols():
            is_bound = symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
            if is_bound and (scope is tables[0] or symbol.is_declared_global()):
                found.add(symbol.get_name())
        tables += scope.get_children()
    return found


def imports_of(nodes: list):
    """(names from the modules that a record may use, other names) that imports give."""
    safe, others = set(), set()
    for node in nodes:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for alias in node.names:
            module = getattr(node, "module", None) or alias.name
            is_safe = module.partition(".")[0] in MODULES and alias.name not in ATTRIBUTES
            names = safe if is_safe else others
            names.add(alias.asname or alias.name.partition(".")[0])
    return safe, others


def reaches(above: str, harness: set):
    """Expressions above the banner that no record needs; `harness`: the names that it defines."""
    nodes = [*ast.walk(ast.parse(above))]
    modules, others = imports_of(nodes)
    foreign = (harness | BUILTINS | others) - {"UserError"}
    found = set()
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in foreign:
            found.add(node.id)
        if not isinstance(node, ast.Attribute):
            continue
        words = ast.unparse(node)
        root = words.partition(".")[0]
        if root == "run":
            is_needed = words in OF_RUN or words.startswith(("run.model.", "run.ranks."))
        else:
            of_module = node.attr.startswith("_") and root in modules
            is_private = node.attr.startswith("__") or of_module
            is_needed = node.attr not in ATTRIBUTES and (not is_private or words in PRIVATE)
        if not isinstance(node.ctx, ast.Load) and root in modules | harness | {"run"}:
            is_needed = words.startswith("torch._dynamo.config.")
            words += " ="
        if not is_needed:
            found.add(words)
    return found


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
    for name in NAMED.findall(ast.get_docstring(ast.parse(above)) or ""):
        if name != record.folder.name:
            found.append(f"train_gpt.py's docstring says `Record: {name}`, which is not its folder")
    if not harness or harness != read_text(root).partition(BANNER)[2]:
        found.append("train_gpt.py is not the root's, byte for byte, from its banner on")
    names = names_bound("#" + harness)  # what is left of the banner is a comment
    for name in sorted(names & names_bound(above)):
        found.append(f"train_gpt.py gives {name}, which the harness defines, another meaning")
    allowed = READS if record.claim.get("reads") else set()
    for reach in sorted(reaches(above, names) - allowed):
        found.append(f"train_gpt.py has `{reach}` above the banner, which no record needs")
    for line in re.findall(r"^(?:import|from) .*;.*", above, re.M):
        found.append(f"train_gpt.py has `{line}`; an import has a line of its own")
    return found


def log_findings(log: Log, settings: dict):
    """What is wrong with one finished log by itself, and against its preset and the rules."""
    found, final, header = [], log.final, log.header
    int(header["seed"])
    loss, ms = log.val[log.last_step]
    final_ms = max(1, float(final["train_time_ms"]))
    # All are rounded. The clock stops after the last step's line: on a busy machine, some ms later.
    for name, shown, slack in (("val_loss", loss, 5.06e-5), ("steps", log.last_step, 0),
                               ("train_time_ms", ms, 1 + final_ms / 1000)):
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


def source_findings(log: Log, script: str, whole: Log | None, notes: list):
    """Where a log's source is not a script's above the banner; a note where it is not below."""
    if not whole:
        return ["has no source, as no other log beside it; the first one is kept whole"]
    found = []
    if log.source_sha256 not in (whole.source_sha256, sha256(script)):
        found.append("was not written by the source that the first seed's log has")
    if log.source and meaning(log.source) != meaning(script):
        found.append("was not written by this train_gpt.py: it differs above the banner")
    elif log is whole and log.source.partition(BANNER)[2] != script.partition(BANNER)[2]:
        notes.append(STALE)
    return found


def place_findings(place: Path, record: Record, seen: dict, notes: list):
    """Findings on a folder of logs, of one setting: each log by itself, and all together."""
    found, logs, headers, seeds = [], [], {}, []
    where = place.relative_to(record.folder).as_posix()
    owner = record.parent if place.name == PARENT else record
    if not owner:
        return [f"{where}/ has runs of a parent, and the record has none"]
    for path in seed_files(place):
        try:
            log = read_log(path)
            run_row("", "", log)  # refuses what is not finished
            script = owner.folder / "train_gpt.py"
            wrong = log_findings(log, settings_of(script, {"preset": log.header["preset"]}))
            seeds.append(int(log.header["seed"]))
        except (LedgerError, ValueError, KeyError) as error:
            found.append(f"{where}/{path.name} cannot be read: {error!r}")
            continue
        logs.append(log)
        losses = str([[loss for loss, _ in steps.values()] for steps in (log.train, log.val)])
        seed, other = seen.setdefault((owner.folder, losses), (seeds[-1], path))
        if seed != seeds[-1]:
            wrong.append(f"has each loss of {other.name}, which is another seed's")
        found += [f"{where}/{path.name}: {text}" for text in wrong]
        for name in log.header.keys() - {"seed", "run_id", "commit"}:
            headers.setdefault(name, set()).add(log.header[name])
        headers.setdefault("jobs", set()).add(log.final.get("jobs", "1"))
    whole = next((log for log in logs if log.source), None)
    for log in logs:
        for text in source_findings(log, owner.script, whole, notes):
            found.append(f"{where}/{log.path.name}: {text}")
    for name, values in headers.items():
        if len(values) > 1:
            found.append(f"{where}/ has runs that differ in {name}; each setting has a folder")
    if sorted(seeds) != [*range(len(seeds))]:
        found.append(f"{where}/ has the seeds {', '.join(map(str, sorted(seeds)))}; by the rules "
                     "they count from 0, each once")
    return found


def runs_findings(record: Record, notes: list):
    """Findings on all logs of a record: each folder by itself, and beside the others."""
    found, seen = [], {}
    for place in places(record.folder):
        found += place_findings(place, record, seen, notes)
    own, beside = record.rows(of_parent=False), record.rows(of_parent=True)
    for runs in own.values():
        folders = sorted({run["folder"] for run in runs})
        if len(folders) > 1:
            found.append(f"{' and '.join(folders)} have runs of one setting; put them together")
    for setting in beside.keys() - own.keys():
        found.append(f"{beside[setting][0]['folder']}/ has runs of a setting in which the record "
                     "itself was not run")
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
    for path in sorted(folder.glob("[!._]*")):
        if path.name not in FILES:  # Python would import a module that lies beside the script
            found.append(f"its folder has {path.name}, which no record needs; delete it")
    if not record.runs:
        notes.append(f"{folder.name}: no runs yet")
    if record.claim.get("reads"):
        notes.append(f"{folder.name}: reads a file above the banner: {record.claim['reads']}")
    settings_of(folder / "train_gpt.py", {"preset": "pocket"})  # raises where it does not run
    found += runs_findings(record, notes)
    if gain and not table.shows_gain(record):
        found.append(f"it claims a gain in {gain} over its parent, and its runs do not show it: "
                     f"that needs {table.SEEDS[gain]} pairs of one setting")
    return found


def verify(folder: Path, only: str | None):
    """(records, findings, notes): those of a folder, or the one that is meant, and their claims."""
    records, findings, notes = table.find_records(folder), [], []
    chosen = [one for one in records if only in (None, one.folder.name)]
    if not chosen:
        raise LedgerError(f"{folder / (only or '')} has no record.json; give records/ or a record")
    for record in chosen:
        try:
            found = record_findings(record, folder.parent / "train_gpt.py", notes)
        except (LedgerError, OSError, SyntaxError, ValueError) as error:
            found = [str(error)]
        findings += [f"{record.folder.name}: {text}" for text in found]
    try:
        for path, text in pages.blocks(folder, records).items():
            if only in (None, path.parent.name) and pages.split_block(path)[1].strip() != text:
                findings.append(f"{path.parent.name}/README.md is not what `list --write` gives")
        if not only:
            findings += folder_findings(folder, records)
    except (LedgerError, OSError, ValueError) as error:
        findings.append(str(error))
    if stale := notes.count(STALE):
        notes = [STALE.format(stale), *(note for note in notes if note != STALE)]
    return chosen, findings, notes


def folder_findings(folder: Path, records: list):
    """What is wrong with what the records share: the root's script, the table."""
    found, root = [], read_text(folder.parent / "train_gpt.py")
    same = [record.folder.name for record in records if record.script == root]
    if len(same) != 1:
        found.append("the root's train_gpt.py has the bytes of "
                     f"{' and '.join(same) or 'no record'}; it has to have those of one")
    said = Counter(read_text(folder / TABLE).splitlines())
    true = Counter(table.table_of(records).splitlines())
    for row in said - true:
        found.append(f"{TABLE} says {row}, which no log does")
    for row in true - said:
        found.append(f"{TABLE} lacks {row}; `list --write` makes it from the logs")
    for path in folder.iterdir():
        if table.FOLDER_NAME.fullmatch(path.name) and not (path / "record.json").exists():
            found.append(f"{path.name}: record.json is missing")
    return found


# ---- Logs are filed ----
def record_of(log: Log, records: list) -> Record:
    """The record whose script wrote a log. Raises LedgerError where it is none, or is not fit."""
    for record in records:
        if log.source_sha256 == sha256(record.script) or (
                log.source and meaning(log.source) == meaning(record.script)):
            script = record.folder / "train_gpt.py"
            if wrong := log_findings(log, settings_of(script, {"preset": log.header["preset"]})):
                raise LedgerError("; ".join(wrong))
            return record
    raise LedgerError("its source is no record's; make it one first (records/README.md)")


def place_of(record: Record, row: dict) -> Path:
    """The folder of a record's logs that has the setting of a row, or a new one named by it."""
    for run in record.rows(of_parent=False).get(setting_of(row), ()):
        return record.folder / run["folder"]
    words = "{preset} {device} {world_size} ranks torch {torch} {threads} threads {jobs} jobs"
    return record.folder / "logs" / "-".join(re.findall(r"[\w.+]+", words.format(**row)))


def file_logs(folder: Path, paths: list):
    """Copy logs into the folders of their records: (where they went, what was refused).

    A parent that was run for its child's sake, without its own parent, goes into the child's.
    """
    records, took, refused, found = table.find_records(folder), [], [], []
    for path in sorted(paths):
        try:
            log = read_log(path)
            row = run_row("", "", log)
            found.append((log, row, record_of(log, records)))
        except (LedgerError, OSError, KeyError, SyntaxError, ValueError) as error:
            refused.append(f"{path}: refused: {error}")
    measured = {(record.folder, setting_of(row)) for _, row, record in found}
    for log, row, record in found:
        place, whose = place_of(record, row), ""
        alone = record.parent and (record.parent.folder, setting_of(row)) not in measured
        for child in records if alone else ():
            if child.parent is record and (child.folder, setting_of(row)) in measured:
                place, whose = place_of(child, row) / PARENT, f", as {record.folder.name}'s"
        target = place / f"seed-{row['seed']}.txt"
        if target.exists() and read_log(target).body != log.body:
            refused.append(f"{log.path}: refused: {target} is another run; delete it first, if "
                           "this one is to stand for it")
            continue
        text = read_text(log.path).replace("\r\n", "\n")
        if any(read_log(one).source for one in seed_files(place) if one != target):
            text = f"source sha256: {log.source_sha256}\n{log.body}"  # one whole log is enough
        place.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8", newline="")
        took.append(f"{log.path} → {target.relative_to(folder)}{whose}")
    return took, refused
