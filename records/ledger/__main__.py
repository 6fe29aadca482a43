"""The ledger of records: measure, file, list, compare and verify them, and read others' logs.

A and B are record folders, scripts or logs, of this project or of the public speedrun. P-values
need scipy and pictures matplotlib (requirements-dev.txt). Exit status: 1 where a claim or a run
fails, 2 where the input cannot be used. records/README.md has the rules.
"""

import argparse
import importlib
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "data"))  # has shards.py

from ledger import logs, pages, run, scripts
from ledger.logs import LedgerError
from ledger.records import FOLDER_NAME, find_records
from ledger.verify import file_logs, verify


def split_folder(name: str):
    """(a folder of records, the one record in it that is meant, or None for all)."""
    folder = Path(name).resolve()
    if (folder / "record.json").exists() or FOLDER_NAME.fullmatch(folder.name):
        return folder.parent, folder.name
    return folder, None


def tell(lines: list):
    for line in lines:
        print(f"ledger: {line}", file=sys.stderr)


# ---- Verbs: each returns the exit status ----
def run_verb(args) -> int:
    importlib.import_module("scipy.stats")  # its lack is told before the training
    args.out = Path(args.out).resolve()
    contestants = run.contestants_of(args.operands, args.preset)
    if args.file and not any(one.record for one in contestants):
        raise LedgerError("--file: no operand is a record's folder, without flags")
    run.run_all(contestants, args)
    print(pages.plain(pages.contest(contestants)))
    ours = [one for one in contestants if one.record]
    if ours and args.file:
        paths = [log.path for one in ours for log in one.logs]
        return put_away(ours[0].record.folder.parent, paths)
    if ours:
        tell(["the same command with --file files the records' logs"])
    return 0


def put_away(folder: Path, paths: list) -> int:
    took, refused = file_logs(folder, paths)
    tell(refused)
    print("\n".join(took) or "nothing is filed")
    if took:
        tell(["`python records/ledger list --write` is next"])
    return 2 if refused else 0


def file_verb(args) -> int:
    return put_away(split_folder(args.folder)[0], [Path(operand) for operand in args.operands])


def list_verb(args) -> int:
    folder, only = split_folder(args.folder)
    records, wrong = find_records(folder)
    tell(wrong)
    if args.write:
        if wrong or not records:
            raise LedgerError(f"{folder}: no page is written, as a record is missing or damaged")
        pages.write_pages(folder, records)
    if records or wrong:
        records = [one for one in records if only in (None, one.folder.name)]
        print(pages.plain(pages.overview(records)))
        return 2 if wrong else 0
    folder = Path(args.folder).resolve()
    found, others = logs.read_folder(folder)  # of other people
    words = f"{others} file(s) are no log with a validation; known are {logs.FORMS}"
    if not found:
        raise LedgerError(f"{folder} has no records and no logs: {words}")
    parts = [pages.others(found, folder)]
    if others:
        parts.append(words)
    print(pages.plain(parts))
    return 0


def diff_verb(args) -> int:
    a, b = logs.source_of(args.a), logs.source_of(args.b)
    print(f"{args.a} → {args.b}: {scripts.count_changes(a, b)} lines")
    for title, groups in scripts.diff_sources(a, b).items():
        print(f"\n--- {title}: {scripts.count_lines(groups)} ---")
        print("\n".join(scripts.unified(groups)))
    return 0


def verify_verb(args) -> int:
    records, findings, notes = verify(*split_folder(args.folder))
    tell(notes)
    if args.replay and findings:
        tell(["nothing is run again, as there is something else to mend first"])
    elif args.replay:
        findings = run.replay_all(records, args.replay)
    verified = f"{len(records)} record(s) verified: the logs bear every claim on our own runs"
    print("\n".join(findings) or verified)
    return 1 if findings else 0


def book_verb(args) -> int:
    from ledger import book  # it needs packages that no other verb does

    records, wrong = find_records(Path(args.folder))
    tell(wrong)
    written = book.write_book(records, Path(args.out), args.source)
    print(f"wrote {len(written)} pages; open {args.out}/index.html")
    return 2 if wrong else 0


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

    flag = add("run", run_verb, "train scripts on this machine, in turns, and compare them")
    flag("operands", nargs="+", metavar="A", help="record folder or script, also with flags: "
         "A:name=value,name=value; a folder of records stands for all of them")
    flag("--preset", default="pocket", help="of every run (default: pocket)")
    flag("--seeds", type=count, default=10, metavar="N", help="runs of each (default: 10)")
    flag("--jobs", type=count, default=1, metavar="N", help="runs at once, which share the cores")
    flag("--nproc", type=count, default=1, metavar="N", help="processes of a run (default: 1)")
    flag("--out", default="logs/ledger", help="keeps the runs (default: logs/ledger)")
    flag("--file", action="store_true", help="also file the records' logs")

    records = run.REPO / "records"
    flag = add("file", file_verb, "put finished logs into the folders of the records they are of")
    flag("operands", nargs="+", metavar="LOG", help="logs/RUN/log.txt")
    flag("--folder", default=records, help="of records (default: records/)")

    flag = add("list", list_verb, "the table of records, or of other people's logs")
    flag("folder", nargs="?", default=records, help="default: records/")
    flag("--write", action="store_true", help="also make the READMEs' blocks and ladder.png anew")

    flag = add("diff", diff_verb, "what changed between two sources, section by section")
    flag("a", metavar="A", help="folder, script or log")
    flag("b", metavar="B")

    flag = add("verify", verify_verb, "hold every claim to its logs; exit 1 if one fails")
    flag("folder", nargs="?", default=records, help="default: records/")
    flag("--replay", type=count, metavar="N", help="run N of each record's seeds again")

    flag = add("book", book_verb, "a static site with a page for each record")
    flag("folder", nargs="?", default=records, help="default: records/")
    flag("--out", required=True, metavar="SITE", help="folder to write it to")
    flag("--source", metavar="URL", help="of the repository's files, for links to them")
    return parser


def main(argv: list | None = None) -> int:
    """Run a verb; the exit status."""
    args = make_parser().parse_args(argv)
    try:
        return args.action(args)
    except OSError as error:
        tell([f"{error.filename}: {error.strerror}; give another path"])
    except ImportError as error:
        tell([f"{error}; pip install -r requirements-dev.txt"])
    except LedgerError as error:
        tell([error])
        return error.status
    except ValueError as error:
        tell([error])
    except KeyboardInterrupt:
        tell(["stopped"])
        return 130
    return 2


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # an ASCII terminal has no ±
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `run` stops as by ctrl-C
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `ledger diff A B | head`
    sys.exit(main())
