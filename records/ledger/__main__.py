"""The ledger of records: measure, file, list, compare and verify them, and read others' logs.

    python records/ledger run A B ... --seeds 10 --jobs 2  train in turns and compare
    python records/ledger file LOG ...                     put logs into their records' folders
    python records/ledger list [FOLDER] [--write]          the table of records, or of others' logs
    python records/ledger diff A B                         what changed, section by section
    python records/ledger verify [FOLDER] [--replay N]     hold every claim to its logs
    python records/ledger book [FOLDER] --out SITE         a static site, a page for each record

A and B are record folders, scripts or logs, of this project or of the public speedrun. P-values
need scipy and pictures matplotlib (requirements-dev.txt). Exit status: 1 where a claim or a run
fails, 2 where the input cannot be used. records/README.md has the rules.
"""

import argparse
import importlib.util
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ledger import logs, pages, run, scripts
from ledger.logs import LedgerError
from ledger.records import FOLDER_NAME, find_records
from ledger.verify import file_logs, verify

RECORDS = run.REPO / "records"
NEXT = "`python records/ledger list --write` is next"


def split_folder(name: str):
    """(a folder of records, the one record in it that is meant, or None for all)."""
    folder = Path(name).resolve()
    if (folder / "record.json").exists() or FOLDER_NAME.fullmatch(folder.name):
        return folder.parent, folder.name
    return folder, None


def require(*packages):
    """Raise LedgerError for a package that is missing: before hours of training, not after."""
    for package in packages:
        if not importlib.util.find_spec(package):
            raise LedgerError(f"{package} is not installed; pip install -r requirements-dev.txt")


def tell(lines: list):
    for line in lines:
        print(f"ledger: {line}", file=sys.stderr)


# ---- Verbs: the words for what each found, and the exit status ----
def run_verb(args):
    require("scipy")
    args.out = Path(args.out).resolve()
    contestants = run.contestants_of(args.operands, args.preset)
    run.run_all(contestants, args)
    status, paths = 0, [log.path for one in contestants if one.record for log in one.logs]
    if args.file and paths:
        folder = next(one.record.folder.parent for one in contestants if one.record)
        _, status = put_away(folder, paths)
    elif paths:
        names = {f"{os.path.relpath(path.parent).rpartition('-')[0]}-*/log.txt" for path in paths}
        tell(["to file the records' logs: python records/ledger file " + " ".join(sorted(names))])
    rows = map(pages.contest_row, run.results(contestants))
    return f"{pages.text_table(pages.CONTEST, rows)}\n\n{pages.CONTEST_LEGEND}", status


def put_away(folder: Path, paths: list):
    took, refused = file_logs(folder, paths)
    tell(refused)
    if took:
        tell(["`python records/ledger list --write` is next"])
    return "\n".join(took) or "nothing is filed", 2 if refused else 0


def file_verb(args):
    return put_away(args.folder, [Path(operand) for operand in args.operands])


def list_verb(args):
    folder, only = split_folder(args.folder)
    require("scipy", *["matplotlib"] * args.write)
    records, wrong = find_records(folder)
    tell(wrong)
    if args.write and records:
        pages.write_pages(folder, records)
    if records or wrong:
        chosen = [one for one in records if only in (None, one.folder.name)]
        return pages.ladder_text(chosen), 2 if wrong else 0
    folder = Path(args.folder).resolve()
    found, others = logs.read_folder(folder)
    words = f"{others} file(s) are no log with a validation; known are {logs.FORMS}"
    if not found:
        raise LedgerError(f"{args.folder} has no records and no logs: {words}")
    rows = [pages.foreign_row(log, folder) for log in found]
    return pages.text_table(pages.FOREIGN, rows) + (f"\n\n{words}" if others else ""), 0


def diff_verb(args):
    found = scripts.diff_sources(logs.source_of(args.a), logs.source_of(args.b))
    lines = [f"{args.a} → {args.b}: +{found['added']} −{found['removed']} lines"]
    for section in found["sections"]:
        lines.append("\n--- {title}: +{added} −{removed} ---".format(**section))
        lines += section["lines"]
    return "\n".join(lines), 0


def verify_verb(args):
    require("scipy")
    records, findings, notes = verify(*split_folder(args.folder))
    tell(notes)
    if args.replay and not findings:
        findings = run.replay_all(records, args.replay)
    verified = f"{len(records)} record(s) verified: the logs bear every claim on our own runs"
    words = "\n".join(findings) or verified
    return words, 1 if findings else 0


def book_verb(args):
    from ledger import book  # it needs packages that no other verb does

    records, wrong = find_records(Path(args.folder))
    tell(wrong)
    pages_of_it = book.write_book(records, Path(args.out), args.source)
    return f"wrote {len(pages_of_it)} pages; open {args.out}/index.html", 2 if wrong else 0


# ---- Command line ----
class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; --help shows the usage\n")


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 up")
    return int(text)


def make_parser() -> Parser:
    parser = Parser(prog="ledger", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def add(name, action, summary):
        verb = verbs.add_parser(name, help=summary, description=summary)
        verb.set_defaults(action=action)
        return verb.add_argument

    flag = add("run", run_verb, "measure scripts on this machine, in turns")
    flag("operands", nargs="+", metavar="A", help="record folder or script, also with flags: "
         "A:name=value,name=value; a folder of records stands for all of them")
    flag("--preset", default="pocket", help="of every run (default: pocket)")
    flag("--seeds", type=count, default=10, metavar="N", help="runs of each (default: 10)")
    flag("--jobs", type=count, default=1, metavar="N", help="runs at once, which share the cores")
    flag("--nproc", type=count, default=1, metavar="N", help="processes of a run (default: 1)")
    flag("--out", default="logs/ledger", help="keeps the runs (default: logs/ledger)")
    flag("--file", action="store_true", help="also file the records' logs")

    flag = add("file", file_verb, "put finished logs into the folders of the records they are of")
    flag("operands", nargs="+", metavar="LOG", help="logs/RUN/log.txt")
    flag("--folder", type=Path, default=RECORDS, help="of records (default: records/)")

    flag = add("list", list_verb, "the table of records, or of other people's logs")
    flag("folder", nargs="?", default=RECORDS, help="default: records/")
    flag("--write", action="store_true",
         help="also make the READMEs' blocks and ladder.png anew, from the logs")

    flag = add("diff", diff_verb, "what changed between two sources, section by section")
    flag("a", metavar="A", help="folder, script or log")
    flag("b", metavar="B")

    flag = add("verify", verify_verb, "hold every claim to its logs; exit 1 if one fails")
    flag("folder", nargs="?", default=RECORDS, help="default: records/")
    flag("--replay", type=count, metavar="N", help="run N of each record's seeds again")

    flag = add("book", book_verb, "a static site with a page for each record")
    flag("folder", nargs="?", default=RECORDS, help="default: records/")
    flag("--out", required=True, metavar="SITE", help="folder to write it to")
    flag("--source", metavar="URL", help="of the repository's files, for links to them")
    return parser


def main(argv: list | None = None) -> int:
    """Run a verb; the exit status."""
    args = make_parser().parse_args(argv)
    try:
        words, status = args.action(args)
    except OSError as error:
        tell([f"{error.filename}: {error.strerror}; give another path"])
        return 2
    except (LedgerError, ValueError, ImportError) as error:
        tell([error])
        return getattr(error, "status", 2)
    print(words)
    return status


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # an ASCII terminal has no ±
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `run` stops as by ctrl-C
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `ledger diff A B | head`
    sys.exit(main())
