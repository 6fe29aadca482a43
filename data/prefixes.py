"""Write each GPT-2 token's prefix: the longest other token that its bytes begin with.

Records from #88 on predict the prefix of the next token as well as the token itself.

    python data/prefixes.py
"""

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out
from shards import Parser, alone_in, run, whole_file
from text import END_OF_TEXT, load_tokenizer

PATH = Path(__file__).parent / "fineweb10B" / "prefixes.npy"
NONE = -1  # of a token that no other one begins


def read_vocabulary() -> list[bytes]:
    """Return the bytes of GPT-2's tokens by their ids; end-of-text, the last one, has none.

    Raises: DataError where tiktoken cannot get its files.
    """
    _, bytes_of = load_tokenizer("gpt2")
    return [*map(bytes_of, range(END_OF_TEXT["gpt2"])), b""]


def find_prefixes(vocabulary: list[bytes]) -> np.ndarray:
    """Return the id of each token's longest proper prefix that is a token, or -1, (V,), int32."""
    id_of = {token: index for index, token in enumerate(vocabulary) if token}
    prefixes = np.full(len(vocabulary), NONE, np.int32)
    for index, token in enumerate(vocabulary):
        for length in range(len(token) - 1, 0, -1):
            if token[:length] in id_of:
                prefixes[index] = id_of[token[:length]]
                break
    return prefixes


def main() -> None:
    Parser(__doc__).parse_args()
    prefixes = find_prefixes(read_vocabulary())
    with alone_in(PATH.parent), whole_file(PATH) as file:
        np.save(file, prefixes)
    print(f"{PATH}: {len(prefixes)} tokens, {np.sum(prefixes != NONE)} of them with a prefix")


if __name__ == "__main__":
    run(main)
