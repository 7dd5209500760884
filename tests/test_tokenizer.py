"""Tokenizers: WordPiece against Hugging Face's tokens, CLIP's BPE against a literal reference.

The expected tokens were computed once with the original packages and are written into the tests.
The training of a WordPiece vocabulary is compared with a loop that counts all pairs anew.
"""

import gzip
import pickle
import random
import string
from collections import Counter

import pytest

import common

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
TINY = [*SPECIAL, "[MASK]", *"abci019—«»狗犬ßıσᄒ½", *string.punctuation, "##a", "##b", "##σ", "##ς",
        "##ᅡ", "##ᆫ", "##ß", "##ʰ", "##ー", "un", "una", "##able", "ing", "##ing", "cafe", "mask",
        "sep", "h₂o"]
WORDS = """a an the two three red green blue yellow circle square triangle large small left right
           above below of is on banana ananas bandana naan abab ababab aaaa aaaaa mississippi"""


@pytest.fixture(scope="module")
def tiny():
    """A WordPiece tokenizer with the vocabulary TINY."""
    return common.WordPiece(TINY)


# The tokens are those of tokenizers 0.23.3. Its special tokens were removed, so that "[CLS]" in a
# caption is plain text.
@pytest.mark.parametrize("text, tokens", [
    ("", ""), ("\u0301", ""), ("  \t\r\n\u00a0\u2028\u3000", ""),
    ("uning UNING uninging ing", "un ##ing un ##ing un ##ing ##ing ing"),
    ("a\u2028b\u2029una", "a b una"),  # separators of lines and paragraphs
    ("unab una", "una ##b una"),
    ("unable", "[UNK]"),  # greedy: after "una" it does not go back to "un ##able"
    ("unz zun able", "[UNK] [UNK] [UNK]"),
    ("Café CAFE\u0301 c\u0327afé", "cafe cafe cafe"),
    ("a,b!?c'a", "a , b ! ? c ' a"),
    ("a—b «c» $1+0^9`~", "a — b « c » $ 1 + 0 ^ 9 ` ~"),
    # a caption cannot inject a special token
    ("[CLS][SEP][PAD][MASK]", "[ [UNK] ] [ sep ] [ [UNK] ] [ mask ]"),
    ("[MASK] [sep] [\u00adSEP]", "[ mask ] [ sep ] [ sep ]"), ("##ing", "# # ing"),
    ("a狗b犬犬", "a 狗 b 犬 犬"),
    *((f"a{char}b", "a [UNK] b")
      for char in "一鿿㐀䶿豈\U00020000\U0002A6DF\U0002A700\U0002B81F\U0002B920\U0002CEAF"),
    *((f"a{char}b", "[UNK]") for char in "\U0002B820\U0002B91F\U0002CEB0あ"),
    *((f"a{char}b", f"a {char} b") for char in string.punctuation),
    ("aʰー", "a ##ʰ ##ー"), ("İ ı I", "i ı i"), ("ß ẞ aß", "ß ß a ##ß"), ("ΣΣ", "σ ##σ"),
    ("σς", "σ ##ς"), ("한", "ᄒ ##ᅡ ##ᆫ"), ("H₂O ½", "h₂o ½"),
    ("a\u00adb a\u200bb a\0b a\ufffdb \ufeffa\u200f a\x1cb a\ue000b", "a ##b a ##b a ##b a ##b a a ##b a ##b"),
    ("a\U0001F600b", "[UNK]"), ("a\ufdd0b", "[UNK]"),
    ("a" * 100, "a" + " ##a" * 99), ("a" * 101 + " b", "[UNK] b"),
    ("a\u0301" * 100, "a" + " ##a" * 99),
])
def test_wordpiece_gives_the_tokens_of_hugging_face(tiny, text, tokens):
    ids = tiny.encode(text)
    assert [tiny.vocab[i] for i in ids] == ["[CLS]", *tokens.split(), "[SEP]"]


def test_a_batch_is_cut_padded_to_its_longest_text_and_masked(tiny):
    """A text that is cut keeps its [SEP]."""
    text = "a b c " * 333 + "a"
    whole = tiny.encode(text)
    assert len(whole) == 1002
    for length in (2, 3, 77, 1001, 1002, 5000):
        assert tiny.encode(text, length) == [*whole[: min(length, 1002) - 1], tiny.sep]
    assert tiny.encode("", 2) == [tiny.cls, tiny.sep]
    tokens, mask = tiny.batch(["a", "", "a b c"], 77)
    pad, cls, sep, a, b, c = (tiny.ids[t] for t in ("[PAD]", "[CLS]", "[SEP]", "a", "b", "c"))
    assert tokens.tolist() == [
        [cls, a, sep, pad, pad], [cls, sep, pad, pad, pad], [cls, a, b, c, sep]]
    assert mask.tolist() == [[True] * 3 + [False] * 2, [True] * 2 + [False] * 3, [True] * 5]
    tokens, mask = tiny.batch(["a b c", "a " * 1000], 4)
    assert tokens.tolist() == [[cls, a, b, sep], [cls, a, a, sep]] and mask.all()


@pytest.mark.parametrize("before, newline, after", [
    ("", "\n", "\n"), ("", "\n", ""), ("", "\n", "\n\n"), ("", "\r\n", "\r\n\r\n"),
    ("\ufeff", "\r\n", "\r\n")])
def test_vocabulary_files_may_have_any_line_ends(tmp_path, before, newline, after):
    file = tmp_path / "vocab.txt"
    file.write_bytes((before + newline.join(TINY) + after).encode())
    assert common.WordPiece(file).vocab == common.WordPiece(str(file)).vocab == TINY
    file.write_text("\n".join([*SPECIAL, "", "a"]) + "\n")  # a blank line inside has an id, too
    assert common.WordPiece(file).encode("a") == [2, 5, 3]


def test_saved_and_pickled_tokenizers_encode_the_same(tmp_path, tiny, bpe):
    for tokenizer in (tiny, bpe):
        tokenizer.save(tmp_path / "vocab.txt")
        again = common.open_tokenizer(tmp_path / "vocab.txt")
        for copy in (again, pickle.loads(pickle.dumps(tokenizer))):
            assert copy.vocab == tokenizer.vocab and copy.hash() == tokenizer.hash()
            assert copy.encode(" ".join(TINY)) == tokenizer.encode(" ".join(TINY))
    assert tiny.hash() != bpe.hash()


def merge(pieces, a, b, merged):
    """Replace each a, b in the list of pieces by `merged`, from the left."""
    i = 0
    while i < len(pieces) - 1:
        if (pieces[i], pieces[i + 1]) == (a, b):
            pieces[i : i + 2] = [merged]
        i += 1


def literal_training(captions, size):
    """WordPiece training that counts every pair anew before every merge. The words are plain
    letters, so str.split finds them."""
    words = Counter(word for caption in captions for word in caption.split())
    pieces = {word: [word[0]] + ["##" + char for char in word[1:]] for word in words}
    vocab = SPECIAL + sorted(set(sum(pieces.values(), [])))
    while len(vocab) < size:
        pairs = Counter()
        for word, p in pieces.items():
            for pair in zip(p, p[1:]):
                pairs[pair] += words[word]
        if not pairs:
            break
        x, y = min(pairs, key=lambda pair: (-pairs[pair], pair))
        vocab.append(x + y[2:])
        for p in pieces.values():
            merge(p, x, y, x + y[2:])
    return vocab


@pytest.mark.parametrize("seed, letters", [(0, "abcdefg"), (1, "ab"), (2, "abcdefg")])
@pytest.mark.parametrize("size", [60, 150, 10_000])
def test_training_equals_a_literal_loop_in_any_order_of_the_captions(seed, letters, size):
    """The captions have plain words, some of which are random letters."""
    rng = random.Random(seed)
    words = WORDS.split() + ["".join(rng.choices(letters, k=rng.randint(1, 9))) for _ in range(60)]
    captions = [" ".join(rng.choices(words, k=rng.randint(1, 12))) for _ in range(60)]
    vocab = common.train_wordpiece(captions, size)
    assert vocab == literal_training(captions, size)
    assert vocab == common.train_wordpiece(captions[::-1], size)
    assert len(vocab) == len(set(vocab)) and (len(vocab) == size or size == 10_000)


def test_training_handles_long_words_and_too_few_captions():
    assert common.train_wordpiece(["ab " + "z" * 101], 100) == [*SPECIAL, "##b", "a", "ab"]
    assert "z" * 100 in common.train_wordpiece(["z" * 100], 1000)
    assert common.train_wordpiece(["ab c"], 7) == [*SPECIAL, "##b", "a", "c"]
    assert common.train_wordpiece([], 4) == common.train_wordpiece(["", " "], 4) == SPECIAL


SENTENCES = ["The dog's 2 puppies aren't here; they've 31 bones, 1/2 of them we'll \"don't\" it.",
             "banana bandana naan abab aaaa aaaaa mississippi café naïve 狗狗 straße <b>!!</b>",
             "o'clock ''tis 'S'T ½x² ٣٤ ⅷ \U0001F600 the then other bother mother \x7f\xad"]
# CLIP's file writes each byte as a printable sign: itself, or from chr(256) on if it is STRANGE.
STRANGE = [byte for byte in range(256) if byte < 33 or 127 <= byte < 161 or byte == 173]
SIGNS = [chr(byte) for byte in range(256) if byte not in STRANGE]
SIGNS += [chr(256 + i) for i in range(len(STRANGE))]


def signs_of(word):
    """Return the signs that CLIP's file has for the bytes of a word.

    The last sign ends with </w>.
    """
    signs = [chr(256 + STRANGE.index(b)) if b in STRANGE else chr(b) for b in word.encode()]
    return [*signs[:-1], signs[-1] + "</w>"]


def literal_bpe(pieces, merges):
    """Apply every merge in turn, wherever it fits."""
    for a, b in merges:
        merge(pieces, a, b, a + b)
    return pieces


@pytest.fixture(scope="module")
def merges():
    """60 pairs. Each is the most frequent pair of SENTENCES when it is merged."""
    words, merges = [signs_of(word) for word in " ".join(SENTENCES).lower().split()], []
    while len(merges) < 60:
        pairs = Counter(pair for word in words for pair in zip(word, word[1:]))
        merges.append(max(pairs, key=lambda pair: (pairs[pair], pair)))
        words = [literal_bpe(word, merges[-1:]) for word in words]
    assert len({a + b for a, b in merges}) == 60
    return merges


@pytest.fixture
def bpe(tmp_path, merges):
    """A BPE tokenizer, opened from a file with these merges."""
    lines = ["a file of merges #version: 0.2", *(" ".join(pair) for pair in merges), ""]
    (tmp_path / "merges.txt.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return common.open_tokenizer(tmp_path / "merges.txt.gz")


# The words are those of ftfy 6.3.1 and of the pattern in OpenCLIP 3.3.0.
@pytest.mark.parametrize("text, words", [
    ("It's DON'T we'll they've I'd i'm you're", "it 's don 't we 'll they 've i 'd i 'm you 're"),
    ("'tis \"'s ''s x''s 's's !'re 3's é's", "'t is \"' s '' s x '' s 's 's !' re 3 's é 's"),
    ("rock'n'roll o'clock 'sun'", "rock ' n ' roll o ' clock 's un '"),
    ("½x² ⅷ H₂O ٣٤ 31", "½ x ² ⅷ h ₂ o ٣ ٤ 3 1"),
    ("a_b __ a-b --- 1/2... (I'd)", "a _ b __ a - b --- 1 / 2 ... ( i 'd )"),
    ("Café naïve 狗狗 straße", "café naïve 狗狗 straße"),
    ("Cafe\u0301 e&#769; \u1112\u1161\u11ab \u0958", "café é \ud55c \u0915 \u093c"),  # NFC
    ("\ufeffa\ufeffb \ufeff &#65279;c", "ab c"),
    ("&amp;lt;b&gt; &eacute; a\u3000b\tc\u00a0d\u2028e", "< b > é a b c d e"),
    ("emoji\U0001F600\U0001F600!", "emoji \U0001F600\U0001F600!"),
    ("İstanbul ΣΑΣ", "i \u0307 stanbul σας"), ("", ""), (" \n ", ""),
    ("don’t “say” ‘it’", "don 't \" say \" ' it '"),  # ftfy makes curly quotes straight
])
def test_bpe_splits_texts_into_clips_words(text, words):
    assert common.BPE.split(text) == words.split()


def test_bpe_equals_a_literal_loop_over_all_merges(bpe, merges):
    order = [*SIGNS, *(sign + "</w>" for sign in SIGNS), *("".join(pair) for pair in merges)]
    assert (len(bpe), bpe.cls, bpe.sep, bpe.pad, bpe.unk) == (574, 572, 573, 0, -1)
    rng, merged = random.Random(0), 0
    parts = [text[i : i + 4] for text in SENTENCES for i in range(len(text))]
    made_up = ["".join(rng.choices(parts, k=4)) for _ in range(200)]
    for text in [*SENTENCES, *made_up]:
        expected = []
        for word in common.BPE.split(text):
            expected += [order.index(p) for p in literal_bpe(signs_of(word), merges)]
        assert bpe.encode(text) == [572, *expected, 573]
        merged += sum(i >= 512 for i in expected)
    assert merged > 200


def test_bpes_vocabulary_shows_pieces_as_readable_text(bpe):
    assert [bpe.vocab[i] for i in bpe.encode("The axe?")] == [
        "<start_of_text>", "the", "a##", "x##", "e", "?", "<end_of_text>"]
    assert bpe.ids["the"] == bpe.encode("the")[1] and bpe.special == [572, 573]
    assert len(bpe.ids) == len(bpe.vocab)
    assert bpe.vocab[bpe.encode("\u00fc")[1]] == "\\xc3##"      # the first byte of the letter
    lines = ["#version: 0.2", *(f"{a} {b}</w>" for a in SIGNS for b in SIGNS)]  # 65,536 merges
    assert len(common.BPE(lines)) == 49_408


def test_ascii_texts_are_cleaned_like_other_texts():
    """Printable ASCII has a fast path. An accent in the text leads to the general path. A
    vocabulary without marks drops them, and a heart's colour is no mark of a word."""
    for i in range(128):
        text = f"A{chr(i)}b"
        assert common.clean_text(f"{text}\u00e9") == common.clean_text(text) + "e"
    own = common.WordPiece(common.train_wordpiece(["a cafe"], 500))
    assert own.encode("A café") == own.encode("a cafe")
    assert "\ufe0f" not in "".join(common.train_wordpiece(["a \u2764\ufe0f é"], 500))


# (two words that differ by a mark, which BERT drops)
PAIRS = [("कुल", "कल"), ("パンダ", "ハンタ"), ("เสือ", "เสื้อ"), ("má", "ma"), ("schön", "schon"),
         ("мой", "мои"), ("año", "ano"), ("קָמֵץ", "קמץ")]


@pytest.mark.parametrize("words", PAIRS)
def test_an_own_vocabulary_keeps_the_marks_that_tell_words_apart(tmp_path, words):
    own = common.WordPiece(common.train_wordpiece(words, 500))
    own.save(tmp_path / "vocab.txt")
    for tokenizer in (own, common.open_tokenizer(tmp_path / "vocab.txt")):
        one, other = map(tokenizer.encode, words)
        assert one != other and tokenizer.unk not in one + other
    bert = common.WordPiece([*SPECIAL, "[MASK]", *own.vocab[4:]])
    assert bert.split(words[0]) == bert.split(words[1])
