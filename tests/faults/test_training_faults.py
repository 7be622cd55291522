"""A training run that was killed goes on from its checkpoint, or says in one line why it starts afresh."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from moe_routing_bench.grid.run_spec import Run
from moe_routing_bench.quality import loop, run_rows, timing, train
from moe_routing_bench.store import paths
from moe_routing_kernels.errors import UserError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four steps with an evaluation every two."""
    text = tmp_path_factory.mktemp("text")
    for number in range(20):
        (text / f"{number:02}.txt").write_text("a text of few words, again " * 5)
    return Run(
        seed=3,
        experts=4,
        dim=16,
        heads=2,
        layers=1,
        expert_hidden=16,
        corpora={str(text): None},
        sequence=32,
        batch=4,
        steps=4,
        warmup=2,
        eval_every=2,
        lr=1e-2,
        keep_weights=True,
    )


@pytest.fixture(scope="module")
def killed(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run that was killed in its third step."""
    out = tmp_path_factory.mktemp("killed") / "run.parquet"
    with pytest.MonkeyPatch.context() as patch:
        counted(patch, last=2)
        with pytest.raises(KeyboardInterrupt):
            train.train(run, out, "cpu")
    return out.with_suffix(".ckpt")


def counted(patch: pytest.MonkeyPatch, last: int = 99) -> list[int]:
    """The steps that are done from now on; in step `last` the run is killed."""
    done, step = [], loop.Training.step

    def one(self, number):
        if number == last:
            raise KeyboardInterrupt
        done.append(number)
        return step(self, number)

    patch.setattr(loop.Training, "step", one)
    return done


def edited_code(path: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(train, "fingerprint", lambda files: "f" * 64)


def without_code(path: Path, patch: pytest.MonkeyPatch) -> None:
    """As versions before this one wrote it."""
    kept = torch.load(path, weights_only=True)
    del kept["code_fingerprint"]
    torch.save(kept, path)


def other_text(path: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(train, "corpus_hash", lambda corpora: "0" * 16)


def other_spec(path: Path, patch: pytest.MonkeyPatch) -> None:
    torch.save(torch.load(path, weights_only=True) | {"spec": "another"}, path)


def truncated(path: Path, patch: pytest.MonkeyPatch) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def flipped(path: Path, patch: pytest.MonkeyPatch) -> None:
    """One bit in the middle, which is in a tensor: torch alone would load it."""
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 4
    path.write_bytes(whole)


def empty(path: Path, patch: pytest.MonkeyPatch) -> None:
    path.write_bytes(b"")


def something_else(path: Path, patch: pytest.MonkeyPatch) -> None:
    torch.save(["no checkpoint"], path)


FAULTS = {
    edited_code: "another code_fingerprint",
    without_code: "another code_fingerprint",
    other_text: "another corpus_sha256",
    other_spec: "another spec",
    truncated: "damaged",
    flipped: "damaged",
    empty: "damaged",
    something_else: "damaged",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: one.__name__)
@pytest.mark.fault("checkpoint")
def test_a_checkpoint_that_does_not_fit_is_not_used(fault, run, killed, tmp_path, monkeypatch, capsys) -> None:
    out = tmp_path / "run.parquet"
    shutil.copy(killed, out.with_suffix(".ckpt"))
    fault(out.with_suffix(".ckpt"), monkeypatch)
    done = counted(monkeypatch)
    train.train(run, out, "cpu")
    assert done == [0, 1, 2, 3]
    first, *_ = capsys.readouterr().out.splitlines()
    assert str(out.with_suffix(".ckpt")) in first and "starts afresh: it is" in first and FAULTS[fault] in first
    assert len(set(run_rows.read(out)["code_fingerprint"].to_pylist())) == 1


@pytest.mark.fault("killed training")
def test_a_killed_run_goes_on(run, killed, tmp_path, monkeypatch, capsys) -> None:
    out = tmp_path / "run.parquet"
    shutil.copy(killed, out.with_suffix(".ckpt"))
    done = counted(monkeypatch)
    train.train(run, out, "cpu")
    assert done == [2, 3] and "step 2 of 4" in capsys.readouterr().out


@pytest.mark.fault("lost output")
@pytest.mark.parametrize("keep", [True, False])
def test_a_finished_run_whose_files_are_lost_is_not_trained_again(keep, run, tmp_path, monkeypatch) -> None:
    """As when Snakemake removes what it takes for incomplete; rows and weights are those of before."""
    run, out = dataclasses.replace(run, keep_weights=keep), tmp_path / "run.parquet"
    rows = train.train(run, out, "cpu")
    weights = paths.weights_file(out)
    known = loop.saved(weights, "cpu")["model"] if keep else {}
    out.unlink()
    weights.unlink(missing_ok=True)
    done = counted(monkeypatch)
    assert train.train(run, out, "cpu") == rows and run_rows.read(out).num_rows == 2 and done == []
    assert weights.exists() == keep
    if keep:
        assert all(torch.equal(known[name], value) for name, value in loop.saved(weights, "cpu")["model"].items())
        flipped(weights, monkeypatch)
        with pytest.raises(UserError, match=r"saved state: got .*delete it and train again"):
            timing.measure(run, out, tmp_path / "timing.parquet", "cpu")
