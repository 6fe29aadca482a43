"""The ledger of records: measure, list, compare and verify them, and read other people's logs.

    python records/ledger run A B ... --seeds 10 --jobs 2  train in turns and compare
    python records/ledger file LOG ...                     put logs into their records' folders
    python records/ledger list [FOLDER] [--write]          the table of records, or of others' logs
    python records/ledger diff A B                         what changed, section by section
    python records/ledger curves A B ... [--png OUT]       loss over steps, tokens and time
    python records/ledger verify [FOLDER] [--replay N]     hold every claim to its logs
    python records/ledger book [FOLDER] --out SITE         a static site, a page for each record

A and B are record folders, scripts or logs, of this project or of the public lineage. P-values need
scipy and pictures matplotlib (requirements-dev.txt). Exit status: 1 where a claim or a run fails, 2
where the input cannot be used. records/README.md has the rules.
"""

import argparse
import importlib.util
import json
import math
import random
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ledger import diff, pages, public, run, table
from ledger.logs import LedgerError, places, read_log, seed_files
from ledger.verify import file_logs, verify

RECORDS = run.REPO / "records"


def split_folder(name: str):
    """(a folder of records, the one record in it that is meant, or None for all)."""
    folder = Path(name).resolve()
    if (folder / "record.json").exists() or table.FOLDER_NAME.fullmatch(folder.name):
        return folder.parent, folder.name
    return folder, None


def require(*packages):
    """Raise LedgerError for a package that is missing: before hours of training, not after."""
    for package in packages:
        if not importlib.util.find_spec(package):
            raise LedgerError(f"{package} is not installed; pip install -r requirements-dev.txt")


def run_verb(args):
    require("scipy")
    args.out = Path(args.out).resolve()
    contestants = run.contestants_of(args.operands, args.preset)
    run.run_all(contestants, args)
    found = run.results(contestants)
    if filing := run.filing(contestants):
        print(f"to file the records' logs: {filing}", file=sys.stderr)
    return found, pages.text_table(found, *pages.CONTEST)


def file_verb(args):
    paths = [Path(operand) for operand in args.operands]
    took, refused = file_logs(args.folder, paths)
    for line in refused:
        print(f"ledger: {line}", file=sys.stderr)
    args.status = 2 if refused else 0
    if took:
        print("`python records/ledger list --write` is next", file=sys.stderr)
    return {"filed": took, "refused": refused}, "\n".join(took) or "nothing is filed"


def list_verb(args):
    folder, only = split_folder(args.folder)
    require("scipy", *["matplotlib"] * args.write)
    records = table.find_records(folder)
    if args.write and records:
        text = table.table_of(records)
        (folder / table.TABLE).write_text(text, encoding="utf-8", newline="")
        for path, text in pages.blocks(folder, records).items():
            before, _, after = pages.split_block(path)
            path.write_text(f"{before}{text}\n{after}", encoding="utf-8", newline="")
        pages.save(pages.ladder_figure(records), str(folder / "ladder.png"))
    chosen = [one for one in records if only in (None, one.folder.name)]
    if chosen:
        return pages.ladder_rows(chosen), pages.ladder_text(chosen)
    found = []
    for groups in public.list_groups(Path(args.folder)):
        found += [pages.foreign_row(group, groups[0]) for group in groups]
    if not found:
        raise LedgerError(f"{args.folder} has no records and no logs; give a folder that has")
    return found, pages.text_table(found, *pages.FOREIGN)


def diff_verb(args):
    a, b = public.source_of(args.a), public.source_of(args.b)
    found = diff.diff_sources(a, b)
    lines = [f"{args.a} → {args.b}: +{found['added']} −{found['removed']} lines"]
    for section in found["sections"]:
        lines.append("\n--- {title}: +{added} −{removed} ---".format(**section))
        lines += section["lines"]
    return found, "\n".join(lines)


def curves_verb(args):
    require(*["matplotlib"] * bool(args.png))
    groups, targets = {}, []
    for operand in args.operands:
        name, logs = public.logs_of(operand)
        for log in logs:
            for note in log.notes:
                print(f"{log.path}: {note}", file=sys.stderr)
            targets.append(float(log.header.get("target_loss", public.TARGET)))
        groups[operand if name in groups else name] = logs
    target = args.target or min(targets)
    found = [pages.time_to_loss(name, logs, target) for name, logs in groups.items()]
    if args.png:
        curves = {name: [*map(pages.curve_of, logs)] for name, logs in groups.items()}
        pages.save(pages.curves_figure(curves, target), args.png)
    heading, forms, legend = pages.TIMES
    return found, pages.text_table(found, heading, forms, legend.format(target))


def replay_all(records: list, seeds: int):
    """Run some seeds of each setting again that this machine can run: (findings, notes)."""
    findings, notes = [], []
    for record in records:
        for place in places(record.folder):
            logs = seed_files(place)
            header = read_log(logs[0]).header
            on_gpu = not header["device"].startswith("cpu")
            if place.name == table.PARENT:
                continue
            if on_gpu and run.gpus() < int(header["world_size"]):
                notes.append(f"{place} is of {header['world_size']} {header['device']}, which this "
                             "machine has not: not run again")
            else:
                chosen = random.sample(logs, min(seeds, len(logs)))
                wrong, words = run.replay(record, chosen)
                findings += wrong
                notes.append(words)
            print(notes[-1], file=sys.stderr)
    return findings, notes


def verify_verb(args):
    require("scipy")
    folder, only = split_folder(args.folder)
    records, findings, notes = verify(folder, only)
    for note in notes:
        print(note, file=sys.stderr)
    if args.replay and not findings:
        findings, more = replay_all(records, args.replay)
        notes += more
    args.status = int(bool(findings))
    words = "\n".join(findings) or f"{len(records)} record(s) verified: the logs bear every claim"
    return {"records": len(records), "findings": findings, "notes": notes}, words


def book_verb(args):
    from ledger import book  # it needs packages that no other verb does

    found = book.write_book(table.find_records(Path(args.folder)), Path(args.out), args.source)
    return found, f"wrote {len(found)} pages; open {args.out}/index.html"


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; --help shows the usage\n")


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 up")
    return int(text)


def loss(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a loss; give a finite one above 0")
    return value


COUNT = {"type": count, "metavar": "N"}
FOLDER = {"folder": {"nargs": "?", "default": RECORDS, "help": "default: records/"}}
VERBS = {
    run_verb: ("measure scripts on this machine, in turns", {
        "operands": {"nargs": "+", "metavar": "A",
                     "help": "record folder or script, also with flags: A:name=value,name=value"},
        "--preset": {"default": "pocket", "help": "of every run (default: pocket)"},
        "--seeds": {**COUNT, "default": 10, "help": "runs of each (default: 10)"},
        "--jobs": {**COUNT, "default": 1, "help": "runs at once, which share the cores"},
        "--nproc": {**COUNT, "default": 1, "help": "processes of a run (default: 1)"},
        "--out": {"default": "logs/ledger", "help": "keeps the runs (default: logs/ledger)"}}),
    file_verb: ("put finished logs into the folders of the records they are of", {
        "operands": {"nargs": "+", "metavar": "LOG", "help": "logs/RUN/log.txt"},
        "--folder": {"type": Path, "default": RECORDS, "help": "of records (default: records/)"}}),
    list_verb: ("the table of records, or of other people's logs", {
        **FOLDER, "--write": {"action": "store_true", "help": "also make runs.csv, the READMEs' "
                              "blocks and ladder.png anew, from the logs"}}),
    diff_verb: ("what changed between two sources, section by section", {
        "a": {"metavar": "A", "help": "folder, script or log"}, "b": {"metavar": "B"}}),
    curves_verb: ("loss over steps, tokens and time; time to a loss", {
        "operands": {"nargs": "+", "metavar": "A", "help": "folder or log"},
        "--png": {"metavar": "OUT", "help": "draw it"},
        "--target": {"type": loss, "metavar": "LOSS", "help": "default: the logs' target_loss"}}),
    verify_verb: ("hold every claim to its logs; exit 1 if one fails", {
        **FOLDER, "--replay": {**COUNT, "help": "run N of each record's seeds again"}}),
    book_verb: ("a static site with a page for each record", {
        **FOLDER, "--out": {"required": True, "metavar": "SITE", "help": "folder to write it to"},
        "--source": {"metavar": "URL", "help": "of the repository's files, for links to them"}}),
}


def main(argv: list | None = None) -> int:
    """Run a verb; the exit status."""
    parser = Parser(prog="ledger", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for action, (summary, flags) in VERBS.items():
        verb = verbs.add_parser(action.__name__[:-5], help=summary, description=summary)
        verb.set_defaults(action=action, status=0)
        for name, settings in flags.items():
            verb.add_argument(name, **settings)
        verb.add_argument("--json", action="store_true", help="JSON in place of a table")
    args = parser.parse_args(argv)
    try:
        found, words = args.action(args)
    except OSError as error:
        print(f"ledger: {error.filename}: {error.strerror}; give another path", file=sys.stderr)
        return 2
    except (LedgerError, ValueError, ImportError) as error:
        print(f"ledger: {error}", file=sys.stderr)
        return getattr(error, "status", 2)
    if args.json:
        words = json.dumps(found, indent=2, ensure_ascii=False)
    print(words)
    return args.status


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # an ASCII terminal has no ±
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `run` stops as by ctrl-C
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `ledger diff A B | head`
    sys.exit(main())
