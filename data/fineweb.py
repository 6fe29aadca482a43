"""Fetch FineWeb-10B as GPT-2 tokens: the validation shard and the first N training shards.

A shard that is whole is not fetched again. A download that was cut short goes on.

    python data/fineweb.py [N]
"""

import contextlib
import hashlib
import shutil
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out
from shards import DataError, Parser, alone_in, is_whole, read_header, run

REPOSITORY = "kjj0/fineweb10B-gpt2"
REVISION = "889765ea1f903759787add96995d81171b632d0c"
TRAIN_SHARDS = 103


def is_right(path: Path, published: str = "") -> bool:
    """Whether a shard is whole and has the published sha256, or else that of the note beside it.

    The note also says which file was read, by its inode and time, so that each is read once.
    """
    if not path.is_file():
        return False
    note = path.with_suffix(".sha256")
    noted, _, read = note.read_text().partition(" ") if note.exists() else ("", "", "")
    file = f"{path.stat().st_ino} {path.stat().st_mtime_ns}"
    if read == file:
        return True
    with open(path, "rb") as shard:
        sha256 = hashlib.file_digest(shard, "sha256").hexdigest()
    if not is_whole(path) or sha256 != (published or noted or sha256):
        return False
    print(f"{path.name}: read once, and whole", flush=True)
    with contextlib.suppress(OSError):  # in a folder that can only be read
        note.write_text(f"{sha256} {file}")
    return True


def fetch(names: list[str], folder: Path) -> None:
    """Download these shards; each takes its place once its sha256 is the published one.

    What was fetched stays, for the next call to go on with. Raises: DataError.
    """
    import huggingface_hub as hub  # takes a while, and is not needed where all is whole
    incoming = folder / ".incoming"
    of_data = dict(repo_type="dataset", revision=REVISION)
    try:
        listed = hub.HfApi().get_paths_info(REPOSITORY, names, **of_data)
        hub.snapshot_download(REPOSITORY, allow_patterns=names, local_dir=incoming, **of_data)
    except Exception as error:  # which ones depends on the hub's release and its HTTP library
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"cannot fetch {REPOSITORY} into {incoming} ({reason}); run this again "
                        f"with a network and room on the disk, or copy {folder} from a machine "
                        "that has it") from error
    published = {file.path: file.lfs.sha256 for file in listed if file.lfs}
    for name in names:
        path = incoming / name
        if name not in published:  # as some mirrors answer
            print(f"{name}: {hub.constants.ENDPOINT} gives no sha256 to compare")
        if not is_right(path, published.get(name, "")):
            path.unlink(missing_ok=True)  # else the hub's library would take it for fetched
            raise DataError(f"{path}: {hub.constants.ENDPOINT} did not send it as published; run "
                            "this again, or with another HF_ENDPOINT")
        for file in incoming.glob(f"{path.stem}.*"):  # with its note
            file.replace(folder / file.name)
    # A stopped call for more shards may have left some, whole or in part.
    if not [*incoming.glob("*.bin"), *incoming.rglob("*.incomplete")]:
        shutil.rmtree(incoming)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("num_train", metavar="N", type=int, nargs="?", default=8,
                        help=f"training shards, 1 to {TRAIN_SHARDS} (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "fineweb10B",
                        help="folder of the shards (default: %(default)s)")
    args = parser.parse_args()
    if not 1 <= args.num_train <= TRAIN_SHARDS:
        parser.error(f"N is {args.num_train}; the data set has 1 to {TRAIN_SHARDS} training shards")
    names = [f"fineweb_train_{index:06d}.bin" for index in range(1, args.num_train + 1)]
    names.insert(0, "fineweb_val_000000.bin")
    if not all(is_right(args.out / name) for name in names):
        with alone_in(args.out):  # another process may have fetched some
            missing = [name for name in names if not is_right(args.out / name)]
            for name in missing:
                if (args.out / name).exists():
                    print(f"{args.out / name}: not whole, or not of the published sha256")
            if missing:
                print(f"fetching {len(missing)} of {len(names)} shards, 200 MB each", flush=True)
                fetch(missing, args.out)
    num_tokens = sum(read_header(args.out / name) for name in names)
    print(f"{args.out}: {len(names)} shards whole, {num_tokens:,} tokens")


if __name__ == "__main__":
    run(main)
