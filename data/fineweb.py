"""Fetch FineWeb-10B as GPT-2 tokens: the validation shard and the first N training shards.

What is whole is not fetched again; what is cut short or damaged is.

    python data/fineweb.py [N]
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from shards import DataError, Parser, read_header, run

REPOSITORY = "kjj0/fineweb10B-gpt2"
REVISION = "889765ea1f903759787add96995d81171b632d0c"
TRAIN_SHARDS = 103
MANIFEST = "hub.json"  # the hub's metadata, kept beside the shards for later calls
ATTEMPTS = 3


class HubError(DataError):
    """The hub cannot be reached, or did not answer as expected."""


class Published(NamedTuple):
    """What the hub says of a file."""

    size: int
    sha256: str


def shard_names(num_train: int) -> list[str]:
    """Return the validation shard's name and those of the first num_train training shards."""
    names = ["fineweb_val_000000.bin"]
    for index in range(1, num_train + 1):
        names.append(f"fineweb_train_{index:06d}.bin")
    return names


def ask_hub(method: str, *args, **kwargs):
    """Return what this method of HfApi answers about the data set at the pinned revision.

    Raises: HubError where it cannot be reached.
    """
    from huggingface_hub import HfApi  # takes a while, and is not needed where all is whole

    try:
        return getattr(HfApi(), method)(REPOSITORY, *args, repo_type="dataset", revision=REVISION,
                                        **kwargs)
    except Exception as error:  # which ones depends on the hub's release and its HTTP library
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise HubError(f"cannot fetch {REPOSITORY} ({reason}); run this again with a network, or "
                       "copy data/fineweb10B from a machine that has it") from error


def read_manifest(folder: Path) -> dict[str, Published]:
    """Return what the hub publishes about each shard, from the folder where it is kept there."""
    path = folder / MANIFEST
    try:
        kept = json.loads(path.read_text())
        if kept["revision"] == REVISION:
            return {name: Published(**kept["files"][name]) for name in shard_names(TRAIN_SHARDS)}
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there or damaged: ask again
    print(f"asking the hub for the sizes and sha256 of {REPOSITORY}", flush=True)
    files = ask_hub("get_paths_info", shard_names(TRAIN_SHARDS))
    published = {file.path: Published(file.size, file.lfs.sha256) for file in files}
    missing = set(shard_names(TRAIN_SHARDS)) - set(published)
    if missing:
        raise HubError(f"{REPOSITORY} has no {min(missing)} at revision {REVISION}")
    kept = {"revision": REVISION, "files": {k: v._asdict() for k, v in published.items()}}
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(kept, indent=1))
    partial.replace(path)
    return published


def find_damage(path: Path, published: Published) -> str | None:
    """Return what is wrong with the file at path, None where it is whole."""
    if not path.is_file():
        return "not there"
    if path.stat().st_size != published.size:
        return f"{path.stat().st_size:,} of {published.size:,} bytes"
    try:
        read_header(path)
    except DataError as error:
        return str(error)
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return None if sha256 == published.sha256 else "sha256 differs from the hub's"


def fetch(path: Path, published: Published) -> None:
    """Download a shard beside its place, and move it there once it is known to be whole."""
    for _ in range(ATTEMPTS):
        with TemporaryDirectory(prefix=".partial-", dir=path.parent) as partial:
            fetched = Path(ask_hub("hf_hub_download", path.name, local_dir=partial))
            damage = find_damage(fetched, published)
            if damage is None:
                os.replace(fetched, path)
                return
    raise HubError(f"{path.name}: fetched {ATTEMPTS} times, each time {damage}")


def main() -> None:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("num_train", metavar="N", type=int, nargs="?", default=8,
                        help=f"training shards, 1 to {TRAIN_SHARDS} (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "fineweb10B",
                        help="folder of the shards (default: %(default)s)")
    args = parser.parse_args()
    if not 1 <= args.num_train <= TRAIN_SHARDS:
        parser.error(f"N is {args.num_train}; the data set has 1 to {TRAIN_SHARDS} training shards")
    args.out.mkdir(parents=True, exist_ok=True)
    paths = [args.out / name for name in shard_names(args.num_train)]

    try:
        published = read_manifest(args.out)
    except HubError as error:
        if not all(path.is_file() for path in paths):
            raise
        num_tokens = sum(map(read_header, paths))
        print(f"{args.out}: {len(paths)} shards, {num_tokens:,} tokens; sizes and headers are "
              f"right, sha256 not checked: {error}")
        return

    with ThreadPoolExecutor() as pool:  # hashing leaves the interpreter lock
        damages = list(pool.map(lambda path: find_damage(path, published[path.name]), paths))
    damaged = {path: damage for path, damage in zip(paths, damages) if damage}
    if damaged:  # without a network this fails at once, where a download would try for long
        ask_hub("get_paths_info", [path.name for path in damaged])
    for number, path in enumerate(damaged, 1):
        print(f"[{number}/{len(damaged)}] {path.name} ({damaged[path]}): fetching "
              f"{published[path.name].size / 1e6:,.0f} MB", flush=True)
        fetch(path, published[path.name])
    print(f"{args.out}: {len(paths)} shards whole, {sum(map(read_header, paths)):,} tokens")


if __name__ == "__main__":
    run(main)
