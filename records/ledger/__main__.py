"""The ledger of records: measure, list, compare and verify them, and read other people's logs.

    python records/ledger run A B ... --seeds 10 --jobs 2    train in turns, compare, keep the logs
    python records/ledger list [FOLDER] [--write]            the table of records, or of others' logs
    python records/ledger diff A B [--html OUT]              what changed, section by section
    python records/ledger curves A B ... [--png OUT]         loss over steps, tokens and time
    python records/ledger verify [FOLDER] [--replay N]       hold every claim to its logs

A and B are record folders, scripts or logs, of this project or of the public lineage. P-values need
scipy and pictures matplotlib (requirements-dev.txt). Exit status: 1 where a claim or a run fails, 2
where the input cannot be used. records/README.md has the rules.
"""

import argparse
import json
import math
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ledger import diff, pages, public, run, table
from ledger.logs import LedgerError, write_file
from ledger.verify import verify

RECORDS = Path(__file__).resolve().parents[1]


def print_json(value) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def split_folder(name: str | None) -> tuple[Path, str | None]:
    """(a folder of records, the one record in it that is meant, or None for all)."""
    folder = Path(name or RECORDS).resolve()
    if (folder / "record.json").exists() or table.FOLDER_NAME.fullmatch(folder.name):
        return folder.parent, folder.name
    return folder, None


def list_verb(args: argparse.Namespace) -> int:
    folder, only = split_folder(args.folder)
    if args.write:
        rows, troubles = table.logs_to_rows(folder)
        if troubles:
            raise LedgerError(troubles[0])
        table.write_table(folder / table.TABLE, rows)
    records = [one for one in table.find_records(folder) if only in (None, one.folder.name)]
    for record in records:
        for wrong in table.claim_findings(record.claim):
            raise LedgerError(f"{record.folder.name}: {wrong}")
        if args.write:
            pages.write_block(record.folder / "README.md", pages.record_block(record))
    if args.write and not only:
        pages.write_block(folder / "README.md", pages.ladder_block(records, folder))
        pages.draw_ladder(records, str(folder / "ladder.png"))
    if not records:
        return list_others(Path(args.folder or RECORDS), args.json)
    if args.json:
        print_json([{"record": one.folder.name, **one.claim, "runs": one.runs} for one in records])
        return 0
    pages.print_table(pages.LADDER, [pages.ladder_row(record) for record in records])
    print("\n" + pages.LEGEND)
    return 0


def list_others(folder: Path, as_json: bool) -> int:
    rows, previous = [], None
    for groups in public.list_groups(folder):
        for group in groups:
            against = previous if group is groups[0] else None
            rows.append(pages.foreign_row(group, groups[0], against))
        previous = groups[0] if groups[0].logs[0].source else previous
    if as_json:
        print_json(rows)
    elif rows:
        pages.print_table(pages.FOREIGN, [pages.foreign_cells(row) for row in rows])
        print(pages.FOREIGN_LEGEND)
    else:
        print(f"no records in {folder}")
    return 0


def diff_verb(args: argparse.Namespace) -> int:
    a, b = diff.source_of(args.a), diff.source_of(args.b)
    found = diff.diff_sources(a, b)
    if args.html:
        write_file(Path(args.html), diff.diff_html(a, b, (args.a, args.b)))
    if args.json:
        print_json({"a": args.a, "b": args.b, **found})
        return 0
    print(f"{args.a} → {args.b}: +{found['added']} −{found['removed']} lines")
    for field in found["hyperparameters"]:
        print(f"  {field['name']}: {field['a'] or '(none)'} → {field['b'] or '(none)'}")
    for section in found["sections"]:
        print(f"\n--- {section['title']}: +{section['added']} −{section['removed']} ---")
        if not args.stat and not args.html:
            print(*section["lines"], sep="\n")
    return 0


def logs_of(operand: str) -> list:
    """The log at a path, or those of a folder's record; what is left out is said."""
    path = Path(operand)
    if not path.is_dir():
        return [public.read_any(path)]
    if files := table.seed_files(path, "loss"):
        return public.read_logs(files)
    record, *others = public.folder_groups(path)
    for group in others:
        print(f"{path}: {len(group.logs)} log(s) are left out, {group.kind(record)[1]}",
              file=sys.stderr)
    return record.logs


def curves_verb(args: argparse.Namespace) -> int:
    groups, targets = {}, []
    if args.target is not None and not math.isfinite(args.target):
        raise LedgerError(f"--target {args.target}: no loss; give a number")
    for operand in args.operands:
        path = Path(operand).resolve()
        folders = [one.name for one in (path, *path.parents) if public.DATED.fullmatch(one.name)]
        name = public.DATED.fullmatch(folders[0])[2] if folders else path.stem
        logs = logs_of(operand)
        for log in logs:
            log.val = {step: pair for step, pair in log.val.items() if math.isfinite(pair[0])}
            if not log.val:
                raise LedgerError(f"{log.path} has no validation in its {log.last_step} steps; "
                                  "give a longer run")
            for note in log.notes:
                print(f"{log.path}: {note}", file=sys.stderr)
            targets.append(float(log.header.get("target_loss", public.TARGET)))
        groups[operand if name in groups else name] = logs
    target = min(targets) if args.target is None else args.target
    found = pages.time_to_losses(groups, target)
    if args.json:
        print_json(found)
    else:
        pages.print_times(found, target)
    if args.png:
        pages.draw_curves(groups, target, args.png)
    return 0


def run_verb(args: argparse.Namespace) -> int:
    if args.times and args.jobs > 1:
        raise LedgerError(f"--jobs {args.jobs}: --times are of one run alone; leave --jobs out")
    table.scipy_stats()  # it should be missing before hours of training, not after
    contestants = run.contestants_of(args.operands, args.preset)
    kind = "time" if args.times else "loss"
    turns = run.Turns(Path(args.out).resolve(), args.preset, args.seeds, args.nproc, args.jobs, kind)
    turns.run(contestants)
    found = pages.results(contestants, kind)
    if args.json:
        print_json(found)
    else:
        pages.print_results(found)
    run.keep(contestants, turns)
    return 0


def verify_verb(args: argparse.Namespace) -> int:
    folder, only = split_folder(args.folder)
    report = verify(folder, only)
    if args.replay:
        records = [one for one in table.find_records(folder) if only in (None, one.folder.name)]
        findings, notes = run.replay(records, args.replay)
        report.findings += findings
        report.notes += notes
    if args.json:
        print_json(vars(report))
        return 1 if report.findings else 0
    for note in report.notes:
        print(note, file=sys.stderr)
    print("\n".join(report.findings) or f"{report.records} record(s) verified: the logs bear every "
          "claim" * bool(report.records) or f"no records in {args.folder}: nothing to verify")
    return 1 if report.findings else 0


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; --help shows the usage\n")


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 up")
    return int(text)


def build_parser() -> Parser:
    parser = Parser(prog="ledger", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for action, summary in ((run_verb, "measure scripts on this machine, in turns"),
                            (list_verb, "the table of records, or of other people's logs"),
                            (diff_verb, "what changed between two sources, section by section"),
                            (curves_verb, "loss over steps, tokens and time; time to a loss"),
                            (verify_verb, "hold every claim to its logs; exit 1 if one fails")):
        verb = verbs.add_parser(action.__name__[:-5], help=summary, description=summary)
        verb.set_defaults(action=action)
        verb.add_argument("--json", action="store_true", help="JSON in place of a table")
        flag = verb.add_argument
        if action is run_verb:
            flag("operands", nargs="+", metavar="A",
                 help="record folder or script, also with flags: A:name=value,name=value")
            flag("--preset", default="pocket", help="of every run (default: pocket)")
            flag("--seeds", type=count, default=10, help="runs of each (default: 10)")
            flag("--jobs", type=count, default=1, help="runs at once, which share the cores")
            flag("--nproc", type=count, default=1, help="processes of a run (default: 1)")
            flag("--times", action="store_true", help="keep them as the records' times")
            flag("--out", default="logs/ledger", help="keeps the runs (default: logs/ledger)")
        elif action is diff_verb:
            flag("a", metavar="A", help="folder, script or log")
            flag("b", metavar="B", help="folder, script or log")
            flag("--stat", action="store_true", help="the summary without the lines")
            flag("--html", metavar="OUT", help="write a page, both side by side")
        elif action is curves_verb:
            flag("operands", nargs="+", metavar="A", help="folder or log")
            flag("--png", metavar="OUT", help="draw it")
            flag("--target", type=float, metavar="LOSS", help="default: the logs' own target_loss")
        else:
            flag("folder", nargs="?", help="default: records/")
        if action is list_verb:
            flag("--write", action="store_true",
                 help="also make runs.csv, the READMEs' tables and ladder.png anew from the logs")
        if action is verify_verb:
            flag("--replay", type=count, metavar="N", help="run each record's first N seeds again")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a verb; the exit status."""
    args = build_parser().parse_args(argv)
    try:
        return args.action(args)
    except LedgerError as error:
        print(f"ledger: {error}", file=sys.stderr)
        return error.status
    except OSError as error:
        name = str(error.filename).removesuffix(".tmp")
        print(f"ledger: {name}: {error.strerror}; give another path", file=sys.stderr)
        return 2


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # an ASCII terminal has no ±
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `run` stops as by ctrl-C
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `ledger diff A B | head`
    sys.exit(main())
