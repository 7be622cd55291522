"""Where the config.json of a model is, and what can be wrong with it as a file."""

import json
import sys

import pytest
import yaml
from test_huggingface import CONFIGS

from moe_routing_bench.cli import main as cli
from moe_routing_bench.config import config_files, huggingface
from moe_routing_kernels.errors import UserError

TEXT = json.dumps(CONFIGS["qwen3-30b-a3b"])


@pytest.fixture
def printed(monkeypatch, capsys):
    """The presets that the command prints for a path, by name."""

    def call(path):
        monkeypatch.setattr(sys, "argv", ["moe-routing-bench", "preset", str(path)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out = capsys.readouterr().out
        assert not ended.value.code
        return yaml.safe_load(out)

    return call


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "Some-Model"
    path.mkdir()
    (path / "config.json").write_text(TEXT)
    return path


def test_a_folder_stands_for_the_config_in_it(folder, printed):
    assert printed(folder) == printed(folder / "config.json")
    assert printed(folder)["some-model"]["source"] == "config.json of Some-Model, model_type qwen3_moe"


def test_a_file_in_a_cache_of_the_hub_has_the_name_of_its_model(tmp_path, printed):
    """There the file is a link to one that is named by its hash, in a folder that is named by a revision."""
    model = tmp_path / "models--Qwen--Qwen3-30B-A3B"
    revision = model / "snapshots" / "ad44e777bcd18fa416d9da3bd8f70d33ebb85d39"
    (model / "blobs").mkdir(parents=True)
    revision.mkdir(parents=True)
    (model / "blobs" / "5b94d1").write_text(TEXT)
    (revision / "config.json").symlink_to("../../blobs/5b94d1")
    (preset,) = printed(revision).items()
    assert preset[0] == "qwen3-30b-a3b" and "config.json of Qwen3-30B-A3B," in preset[1]["source"]


@pytest.mark.parametrize(
    "parts", [("snapshots", "Model"), ("models--a--b", "other", "Model"), ("models--a--b", "Model")], ids="/".join
)
def test_a_folder_that_only_looks_like_a_cache_has_its_name(parts, tmp_path):
    path = tmp_path.joinpath(*parts)
    path.mkdir(parents=True)
    assert config_files.model_name(path / "config.json") == "Model"


def test_a_link_to_a_folder_has_the_name_of_the_folder(folder, tmp_path):
    (tmp_path / "current").symlink_to(folder)
    assert config_files.model_name(tmp_path / "current" / "config.json") == "Some-Model"


def test_a_mark_of_byte_order_is_no_part_of_the_text(folder):
    expected = huggingface.preset(folder)
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    assert huggingface.preset(folder) == expected


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (TEXT.encode("utf-16"), "save it as UTF-8"),
        (b'{"model_type": "caf\xe9"}', "save it as UTF-8"),
        (TEXT[:-1].encode() + b",}", "line 1"),
        (b"", "line 1"),
        (b"[]", "a JSON object"),
        (TEXT[:-1].encode() + b', "hidden_size": 4096}', "'hidden_size' is there twice"),
        (b'{"a": ' + b" " * 2**23 + b"1}", "at most 8388608 are read"),
    ],
    ids=["UTF-16", "Latin-1", "comma at the end", "empty", "list", "twice", "huge"],
)
def test_a_file_that_is_no_config_is_refused_in_one_line(content, words, folder):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        huggingface.preset(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-30B-A3B", "-", "a" * 5000, "", "some-file/config.json", "\0"], ids=lambda each: repr(each[:30])
)
def test_a_name_without_a_file_is_answered_in_one_line(name, tmp_path, monkeypatch):
    """Such as that of a model of the hub: nothing is downloaded."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some-file").touch()
    with pytest.raises(UserError) as caught:
        huggingface.preset(tmp_path / name if "\0" in name else config_files.Path(name))
    assert "\n" not in str(caught.value) and (
        "nothing is downloaded" in str(caught.value) or len(name) > 100 or "\0" in name
    )
