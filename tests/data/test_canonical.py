"""data/canonical.py: forbidden pairs of small vocabularies against a plain tokenizer, those of
GPT-2 against the published table, and random texts."""

import hashlib
import importlib

import numpy as np
import pytest

canonical = importlib.import_module("canonical")
PUBLISHED = "3bc096d452b0497e12da82158856669bc3bb3735281f3d676d0bf2ac20d95998"
SOUND = "1cb5f242494e30552a6fc38c33d777716acc9018848fe74494f7cace294db222"


def encode(text, tokens):
    """Byte pair encoding: the pair that joins to the token with the lowest id, the first such one,
    again and again."""
    pieces = [text[i : i + 1] for i in range(len(text))]
    while True:
        joined = [a + b for a, b in zip(pieces, pieces[1:]) if a + b in tokens]
        if not joined:
            return pieces
        best = min(joined, key=tokens.index)
        first = next(i for i in range(len(pieces)) if pieces[i] + pieces[i + 1] == best)
        pieces[first : first + 2] = [best]


def some_vocabulary(letters, size, generator):
    """Tokens that are encoded as themselves, of random merges. A single byte's id is the lowest."""
    tokens = [letters[i : i + 1] for i in range(len(letters))]
    for _ in range(20 * size):
        token = b"".join(tokens[i] for i in generator.integers(len(tokens), size=2))
        is_own = token not in tokens and encode(token, [*tokens, token]) == [token]
        if is_own and len(tokens) < size:
            tokens.append(token)
    return tokens


@pytest.mark.parametrize("letters", [b"a", b"ab", b"abc", b"abcd"])
@pytest.mark.parametrize("seed", range(5))
def test_pairs_are_those_that_a_plain_tokenizer_would_merge(letters, seed):
    tokens = some_vocabulary(letters, size=24, generator=np.random.default_rng(seed))
    assert len(tokens) > 9
    found = np.zeros((len(tokens), len(tokens)), int)
    for before, after in canonical.find_pairs(canonical.find_halves(tokens)):
        found[np.ix_(before, after)] += 1
    for i, left in enumerate(tokens):
        for j, right in enumerate(tokens):
            expected = encode(left + right, tokens) != [left, right]
            assert found[i, j] == expected, (left, right)  # not 2: no pair is in two


@pytest.mark.parametrize("text, before, after", [
    (b" the", "L", "S"), (b"1a", "L", "N"), (b"a!", "O", "L"), (b"\n", "S", "S"),
    (b"\x1c", "O", "O"), ("é".encode(), "L", "L"), ("a\N{NO-BREAK SPACE}".encode(), "S", "L"),
    (b"\x91", "?", "?"), ("😑".encode()[:3], "?", "?"), (b" \xf0\x9f", "?", "S")])
def test_a_token_has_the_class_of_its_last_and_first_character(text, before, after):
    assert (canonical.classify(text, -1), canonical.classify(text, 0)) == (before, after)


def bits_of(pairs):
    """The published form of the table, and how many of its bits are set."""
    table, size = np.zeros((50_304, 50_304 // 8), np.uint8), 0
    for before, after in pairs:
        bits = np.zeros(50_304, bool)
        bits[after] = True
        packed = np.packbits(bits, bitorder="little")
        used = packed.nonzero()[0]
        table[np.ix_(before, used)] |= packed[used]
        size += len(before) * len(after)
    return table, size


@pytest.fixture(scope="module")
def gpt2_pairs(gpt2, tmp_path_factory):
    """As the tool writes them: before and after, a list of ids for each."""
    path = tmp_path_factory.mktemp("canonical") / "fineweb10B" / "canonical.npz"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canonical, "PATH", path)
        patch.setattr("sys.argv", ["canonical.py"])
        canonical.main()
    with np.load(path) as file:
        of = (np.split(file[name], file[f"{name}_ends"][:-1]) for name in ("before", "after"))
        return list(zip(*of, strict=True))


@pytest.mark.slow
def test_those_of_gpt2_are_the_published_ones_but_for_eleven(gpt2, gpt2_pairs):
    table, size = bits_of(gpt2_pairs)
    assert (hashlib.sha256(table).hexdigest(), size) == (SOUND, 70_889_690)
    assert not table[50_256:].any() and not table[:, 50_256 // 8 :].any()
    for after in ((" th", "e"), (" ", "The"), ("1", "0"), ("!", "!"), ("in", "g")):
        i, j = map(gpt2.encode_single_token, after)
        assert table[i, j // 8] >> j % 8 & 1, after
    for after in (("'", "s"), ("'s", "he"), ("\n", "\n"), ("there", "fore")):
        i, j = map(gpt2.encode_single_token, after)
        assert not table[i, j // 8] >> j % 8 & 1, after
    # The others: a token that ends in a part of a character, before one of five Chinese letters
    tokens, eleven = canonical.read_vocabulary(), 0
    ends = np.array([canonical.classify(token, -1) for token in tokens if token] + ["-"])
    begins = np.array([canonical.classify(token, 0) for token in tokens if token] + ["?"])
    for before, after in canonical.find_pairs(canonical.find_halves(tokens)):
        for i in before[ends[before] == "?"]:
            for j in after[begins[after] != "?"]:
                if begins[j] == "L":
                    assert tokens[j].decode() in "士黒闘機", (tokens[i], tokens[j])
                    table[i, j // 8] |= 1 << j % 8
                    eleven += 1
    assert (hashlib.sha256(table).hexdigest(), eleven) == (PUBLISHED, 11)
