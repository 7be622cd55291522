"""What publishes the project elsewhere says what is there: the dataset card of stored rows, records of the citation, the workflow of releases."""

import json
import re
import tomllib
from pathlib import Path

import pyarrow.parquet
import yaml

ROOT = Path(__file__).parents[2]
CARD = ROOT / "results/README.md"
PROJECTS = [tomllib.loads((ROOT / path / "pyproject.toml").read_text()) for path in (".", "src/moe_routing_kernels")]


def test_the_dataset_card_lists_the_tables_of_published_runs() -> None:
    _, front, text = CARD.read_text().split("---\n", 2)
    about, listed = yaml.safe_load(front), re.findall(r"^- `(.*)`$", text, re.M)
    stored = [path for run in CARD.parent.glob("*/manifest.yaml") for path in run.parent.glob("*.parquet")]
    assert listed == sorted(str(path.relative_to(CARD.parent)) for path in stored) and len(listed) > 20
    assert about["license"] == "apache-2.0" and about["viewer"] is False, "the viewer of a hub cannot read maps"
    assert all((ROOT / name).is_file() for name in re.findall(r"`(docs/\S+)`", text))
    assert {path.name for path in stored} == set(re.findall(r"`(\w+\.parquet)`", text))
    maps = [
        path for path in stored if any(str(one.type).startswith("map<") for one in pyarrow.parquet.read_schema(path))
    ]
    assert len(maps) > len(stored) / 2


def test_records_of_the_citation_agree() -> None:
    cited, kept = yaml.safe_load((ROOT / "CITATION.cff").read_text()), json.loads((ROOT / ".zenodo.json").read_text())
    assert (kept["title"], kept["keywords"], kept["license"]) == (cited["title"], cited["keywords"], cited["license"])
    assert [one["name"] for one in kept["creators"]] == [one["name"] for one in cited["authors"]]
    assert {cited["version"], *(one["project"]["version"] for one in PROJECTS)} == {cited["version"]}


def test_a_release_is_published_by_a_tag_alone_and_without_a_token() -> None:
    """Both packages, after the build has passed, the kernels first: the benchmark pins them."""
    text = (ROOT / ".github/workflows/release.yml").read_text()
    workflow = yaml.safe_load(text)
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    names = [one["project"]["name"].replace("-", "_") for one in PROJECTS]
    assert publish["needs"] == "build" and publish["if"] == "github.ref_type == 'tag'" and "secrets." not in text
    assert publish["permissions"] == {"id-token": "write"} and workflow["permissions"] == {"contents": "read"}
    assert publish["strategy"]["matrix"]["package"] == names[::-1] and publish["strategy"]["max-parallel"] == 1
    steps = " ".join(step.get("run", "") for step in build["steps"])
    assert "twine check --strict dist/*" in steps and all(
        f"dist/{name}-${{GITHUB_REF_NAME#v}}" in steps for name in names
    )
