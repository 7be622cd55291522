"""`ask`: what the published rows of a platform say to a question about a model, with the distance of the cell that answers, or why none does."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_routing_bench.answers import around, command, nearest, pairs, stored
from moe_routing_bench.answers.nearest import FAR, Found, Gap
from moe_routing_bench.answers.question import PLATFORM, Question, asked
from moe_routing_bench.answers.stored import Cell, Row
from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.quantities import count
from moe_routing_kernels.formats.weights import WEIGHTS

MEASURED, REFUSED = "measured", "refused"
Answer = dict[str, Any]


def ask(
    model: str | None = None,
    *,
    bench: str | None = None,
    platform: str = PLATFORM,
    implementations: Sequence[str] = (),
    models: str | Path | None = None,
    **axes: Any,
) -> Answer:
    """Answer a question from the nearest measured cell of all published runs of a platform; nothing is interpolated.

    Arguments are named as the axes of a grid: ``tokens``, ``weights`` (a format, or a family such as ``int4``), ``phase`` (``prefill``,
    ``decode`` or ``training``), ``skew``, ``top_k`` and so on. One that is not given has its default, or the model's value. Without a bench, whole layers answer, and experts alone where no layer is near. `implementations` are parts of names that
    the cell must have times of. The answer is fit for JSON: `kind` is "measured" or "refused"; a refusal says what is missing and the
    command that measures it. Times are in us, memory in bytes, energy in mJ. Raises `UserError` for an unknown name and a value out of bounds.
    """
    question = asked(model, bench, tuple(implementations), models, axes)
    about = {"model": model, "platform": platform, "bench": bench, **question.given}
    about |= {"implementations": list(implementations)} if implementations else {}
    published = stored.runs()
    if platform not in published:
        there = ", ".join(published)
        return _refused(about, question, [f"no published rows of {platform}, but of {there}"], platform)
    if question.unsupported:
        why = [f"{model}: {question.unsupported}"]
        return _refused(about, question, why, "a bench of such layers", command=None)
    known = stored.cells(published[platform], question.benches)
    best: list[tuple[str, list[Found]]] = []
    for name in question.benches:
        found = nearest.ranked((one for one in known if one.bench == name), question.of(name), model)
        near = [one for one in found if one.octaves <= FAR]
        having = [one for one in near if not _lacking(one.cell, question)]
        if having or (near and question.implementations):
            chosen = (having or near)[0]
            said = _measured(question, chosen, [one.cell for one in found], published, platform)
            passed = [_missing(other, all_found[0] if all_found else None, question) for other, all_found in best]
            return {"kind": MEASURED, "question": about, **said, "instead_of": passed, "shard": question.shard()}
        best.append((name, found))
    return _nothing_near(about, question, best, published[platform])


def _named(row: Row, question: Question) -> bool:
    """Whether a row is of an implementation that was asked for."""
    return any(part.lower() in row["implementation"] for part in question.implementations)


def _lacking(cell: Cell, question: Question) -> list[str]:
    """The implementations asked for that a cell has no time of."""
    names = [row["implementation"] for row in cell.timed]
    return [part for part in question.implementations if not any(part.lower() in name for name in names)]


def _refused(about: Answer, question: Question, missing: list[str], needs: str, **more: Any) -> Answer:
    """A refusal; its command is None where no command measures such cells."""
    bench = question.benches[0]
    run = command.asked(bench, question.to_measure(bench))
    return {
        "kind": REFUSED,
        "question": about,
        "missing": missing,
        "needs": needs,
        "command": run,
        "nearest": None,
        "shard": question.shard(),
        **more,
    }


def _nothing_near(
    about: Answer, question: Question, best: list[tuple[str, list[Found]]], runs: Sequence[str]
) -> Answer:
    """A refusal: in what the nearest cell of each bench differs, and what would be needed."""
    missing = [_missing(name, found[0] if found else None, question) for name, found in best]
    name, found = best[0]
    place = _place(found[0]) if found else None
    if unread := question.unread(name):
        needs = f"a bench `{name}` that takes {', '.join(unread)}"
        return _refused(about, question, missing, needs, nearest=place, command=None)
    kinds = nearest.formats_of(question.given["weights"]) if "weights" in question.given else ()
    rows = [row for row in stored.accuracy(tuple(runs)) if row["weights"] in set(kinds) & set(WEIGHTS)]
    able = sorted({row["implementation"] for row in rows})
    needs = f"{question.given.get('ranks', 1)} x {about['platform']}"
    return _refused(about, question, missing, needs, nearest=place, able=able)


def _missing(bench: str, found: Found | None, question: Question) -> str:
    """Why a bench does not answer."""
    if found is None:
        return f"{bench}: no published row with a time"
    texts = [gap_text(gap) for gap in found.gaps]
    return f"{bench}: the nearest measured cell has {'; '.join(texts) if texts else 'none of ' + ', '.join(question.implementations)}"


def gap_text(gap: Gap) -> str:
    """A difference in words: the measured and the asked value, and the distance."""
    label = (
        AXES[gap.axis].prefix
        if AXES[gap.axis].prefix in ("T", "H", "I", "E", "k")
        else f"{gap.axis.replace('_', ' ')} "
    )
    distance = "" if math.isinf(gap.octaves) else f" ({nearest.away(gap.octaves)})"
    equal = "=" if not label.endswith(" ") else ""
    absent = "1" if nearest.of_ranks(gap.axis) else "none"
    return f"{label}{equal}{_spelt(gap.measured, absent)}, not {_spelt(gap.asked, absent)}{distance}"


def _spelt(value: Any, absent: str) -> str:
    return absent if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _place(found: Found) -> Answer:
    """The cell that answers, and its distance."""
    cell = found.cell
    gaps = [
        {
            "axis": gap.axis,
            "asked": gap.asked,
            "measured": gap.measured,
            "octaves": None if math.isinf(gap.octaves) else gap.octaves,
            "text": gap_text(gap),
        }
        for gap in found.gaps
    ]
    axes = {name: value for name, value in cell.axes.items() if value is not None}
    octaves = found.octaves
    return {
        "run": cell.run,
        "bench": cell.bench,
        "cell": cell.key,
        "axes": axes,
        "gaps": gaps,
        "octaves": None if math.isinf(octaves) else octaves,
    }


def _measured(
    question: Question, found: Found, cells: list[Cell], published: dict[str, list[str]], platform: str
) -> Answer:
    """What the rows of a cell say."""
    cell = found.cell
    name, sentence = pairs.winner(cell)
    own, rival, first = pairs.own(cell), pairs.rival(cell), cell.timed[0]
    against = _pair(own, rival) if own and rival else None
    named = [row for row in cell.timed if _named(row, question)]
    return {
        "nearest": _place(found),
        "fastest": pairs.numbers(first),
        "told_apart": name is not None,
        "sentence": sentence,
        "ours": own and pairs.numbers(own),
        "other": rival and pairs.numbers(rival),
        "against": against,
        "compared": [_pair(one, named[0]) for one in named[1:]],
        "lacking": _lacking(cell, question),
        "implementations": [pairs.numbers(row) for row in cell.timed],
        "without_time": pairs.without_time(cell),
        "format": around.loss(cell.axes.get("weights", ""), cell.axes.get("dtype", ""), published[platform]),
        "over_tokens": list(around.over_tokens(cell, cells, lambda row: not named or _named(row, question))),
        **{f"over_{name}": list(around.over_axis(cell, cells, name)) for name in around.VARIED},
        "over_formats": list(around.over_formats(cell, cells, published[platform])),
        "elsewhere": list(around.elsewhere(cell, published, platform)),
        "ignored": question.ignored,
        "provenance": _provenance(cell, first),
        "command": command.again(first),
    }


def _pair(row: Row, other: Row) -> Answer:
    one = pairs.pair(row, other)
    return {
        "implementation": one.name,
        "other": one.other,
        "ratio": one.ratio,
        "low": one.low,
        "high": one.high,
        "verdict": one.verdict,
        "paired": one.paired,
        "assumed": one.assumed,
        "text": one.text,
    }


def _provenance(cell: Cell, row: Row) -> Answer:
    """Where the rows come from."""
    fingerprint = BENCHES[cell.bench].code_fingerprint()
    older = row["code_fingerprint"] != fingerprint
    commit = row["git_sha"]
    return {
        "run": cell.run,
        "submitted_by": stored.submitter(cell.run),
        "commit": commit,
        "version": commit and stored.version(cell.run, commit),
        "card": row["gpu_name"] or row["cpu_model"],
        "card_id": row["gpu_uuid"],
        "day": cell.day,
        "driver": row["driver"],
        "torch": row["torch_version"],
        "cuda": row["cuda_version"],
        "older_code": f"older code: `{cell.bench}` or its measurement has changed since" if older else None,
        "rows": count(len(cell.rows), "row"),
    }
