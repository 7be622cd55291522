"""An answer in lines of text."""

from collections.abc import Iterator, Mapping
from typing import Any

from moe_routing_bench.answers.around import VARIED
from moe_routing_bench.answers.ask import MEASURED, Answer
from moe_routing_bench.answers.nearest import FAR, away
from moe_routing_bench.answers.pairs import interval
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.quantities import digits, energy, significant, us

_SHOWN = ("T", "H", "I", "E", "k")
_MOST = 12  # implementations that are listed


def lines(answer: Answer) -> list[str]:
    """What the terminal prints of an answer of `ask`."""
    return [*(_measured(answer) if answer["kind"] == MEASURED else _refused(answer))]


def _refused(answer: Answer) -> Iterator[str]:
    yield f"Not measured: {'. '.join(answer['missing'])}."
    if answer["nearest"]:
        yield f"A cell more than {FAR:g} octaves away, or of another format or phase, does not answer."
    if answer.get("able"):
        yield f"Implementations with stored accuracy of such weights: {', '.join(answer['able'])}."
    if answer["command"] is None:
        yield f"Needed: {answer['needs']}; no command measures it yet."
    else:
        yield f"Needed: {answer['needs']}, and"
        yield f"  {answer['command']}"
    if answer["shard"]:
        yield from _modelled(answer["shard"])


def _modelled(shard: Mapping[str, str | None]) -> Iterator[str]:
    if shard["over_ranks"]:
        yield f"{shard['over_ranks']}."
    if shard["command"]:
        yield f"Modelled, not measured: {shard['modelled']}, by"
        yield f"  {shard['command']}"


def _measured(answer: Answer) -> Iterator[str]:
    fastest, place = answer["fastest"], answer["nearest"]
    for text in answer["instead_of"]:
        yield f"Not measured: {text}."
    nearest = "Nearest measured cell: " if place["gaps"] else ""
    yield f"{nearest}{answer['sentence']}: {_time(fastest)}{_marked(fastest)}."
    yield f"  {distance(answer)}"
    if answer["shard"]:
        yield f"  Measured: {answer['shard']['measured']}."
    if own := answer["ours"]:
        yield f"  {_own(answer, own)}"
    for one in answer["compared"]:
        yield f"  {one['implementation']} is {one['text']}."
    for name in answer["lacking"]:
        yield f"  No time of an implementation with {name!r} in its name within {FAR:g} octaves."
    if answer["ignored"]:
        yield f"  {place['bench']} does not depend on {', '.join(answer['ignored'])}."
    if answer["format"]:
        yield f"  {_format(answer['format'])}"
    yield f"  {_numbers(fastest)}"
    if len(answer["implementations"]) > 1:
        yield from _table(answer["implementations"])
    for reason in dict.fromkeys(answer["without_time"].values()):
        names = [name for name, why in answer["without_time"].items() if why == reason]
        yield f"  {', '.join(names)} {'has' if len(names) == 1 else 'have'} no time: {reason}"
    if len(answer["over_tokens"]) > 1:
        yield f"  Fastest over T: {'; '.join(map(_step, answer['over_tokens']))}."
    for name, label in VARIED.items():
        if steps := answer[f"over_{name}"]:
            ratios = [f"{one[name]:g}: {interval(one['ratio'], one['low'], one['high'])}" for one in steps]
            yield f"  Time of {steps[0]['implementation']} at other {label}, over that here: {'; '.join(ratios)}."
    if len(answer["over_formats"]) > 1:
        yield f"  Fastest over formats: {'; '.join(map(_kind, answer['over_formats']))}."
    for one in answer["elsewhere"]:
        yield f"  On {one['platform']}: {one['fastest']} {us(one['median_us'])}."
    yield f"  {_origin(answer['provenance'])}"
    yield f"  Again: {answer['command']}"
    if answer["shard"]:
        yield from (f"  {text}" for text in _modelled(answer["shard"]))


def _time(row: Mapping[str, Any]) -> str:
    ends = (row["ci_low_us"], row["ci_high_us"])
    return us(row["median_us"]) if None in ends else us(row["median_us"], *ends)


def _marked(row: Mapping[str, Any]) -> str:
    return f" ({'; '.join(row['marks'])})" if row["marks"] else ""


def distance(answer: Answer) -> str:
    """Which cell answers and how far it is from the question."""
    place, question = answer["nearest"], answer["question"]
    axes = place["axes"]
    sizes = " ".join(f"{AXES[name].prefix}={value}" for name, value in axes.items() if AXES[name].prefix in _SHOWN)
    kinds = ", ".join(
        str(axes[name])
        for name in ("phase", "dtype", "weights")
        if name in axes and (name != "weights" or axes[name] != axes["dtype"])
    )
    asked = (
        f"asked T={question['tokens']}, measured T={axes['tokens']}"
        if "tokens" in question
        else f"measured T={axes['tokens']}"
    )
    gaps = [gap["text"] for gap in place["gaps"] if gap["axis"] != "tokens"]
    near = "measured as asked" if not place["gaps"] else away(place["octaves"])
    said = gaps if len(gaps) == len(place["gaps"]) == 1 else [near, *gaps]  # one alone has the distance itself
    return f"{place['bench']}, {sizes}, {kinds}: {asked} ({'; '.join(said)})."


def _own(answer: Answer, own: Mapping[str, Any]) -> str:
    name, against = own["implementation"], answer["against"]
    time = "" if name == answer["fastest"]["implementation"] else f" ({_time(own)})"
    return f"Ours, {name}{time}: {against['text'] if against else 'no other package has a time here'}."


def _format(loss: Mapping[str, Any]) -> str:
    if loss["output_snr_db"] is None:
        return f"{loss['weights']}: what it loses has no row."
    poor = "" if loss["usable"] else "; of no use, whatever its speed"
    return f"{loss['weights']}: signal-to-noise {loss['weight_snr_db']:.1f} dB of weights, {loss['output_snr_db']:.1f} dB of outputs{poor}."


def _numbers(row: Mapping[str, Any]) -> str:
    found = []
    if row["share_of_limit"] is not None:
        found.append(f"{100 * row['share_of_limit']:.3g} % of the limit ({row['limit']})")
    if row["over_dense"] is not None:
        found.append(f"{significant(row['over_dense'], 3)}x dense GEMMs")
    if row["memory_bytes"] is not None:
        found.append(f"peak memory {_mib(row['memory_bytes'])}")
    if row["energy_mj_per_token"] is not None:
        found.append(f"{energy(row['energy_mj_per_token'])} mJ per token")
    if row["stage_us"]:
        found.append(
            "stages " + ", ".join(f"{name} {digits(time)} µs" for name, time in row["stage_us"] if time is not None)
        )
    return (
        f"{row['implementation']}: {'; '.join(found)}."
        if found
        else f"{row['implementation']}: no other number stored."
    )


def _mib(size: float) -> str:
    return f"{digits(size / 2**20)} MiB"


def _table(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    width = max(len(row["implementation"]) for row in rows[:_MOST])
    for row in rows[:_MOST]:
        memory = "" if row["memory_bytes"] is None else f"  {_mib(row['memory_bytes'])}"
        yield f"    {row['implementation']:<{width}}  {_time(row)}{memory}{_marked(row)}"
    if len(rows) > _MOST:
        yield f"    and {len(rows) - _MOST} more"


def _step(step: Mapping[str, Any]) -> str:
    doubt = " (not told apart)" if step["told_apart"] is False else ""
    return f"{step['tokens']} {step['fastest']} {us(step['median_us'])}{doubt}"


def _kind(one: Mapping[str, Any]) -> str:
    rows = "" if one["packed"] in (None, "bf16", one["weights"]) else f" with rows in {one['packed']}"
    lost = one["loss"] and one["loss"]["output_snr_db"]
    doubt = "" if lost is None else f", {lost:.1f} dB" + (", of no use" if not one["loss"]["usable"] else "")
    return f"{one['weights']}{rows} {one['fastest']} {us(one['median_us'])}{doubt}"


def _origin(origin: Mapping[str, Any]) -> str:
    version = origin["version"] or "version not known"
    stack = ", ".join(
        f"{name} {origin[key]}" for name, key in (("driver", "driver"), ("torch", "torch")) if origin[key]
    )
    older = f"; {origin['older_code']}" if origin["older_code"] else ""
    others = f" of others (submitted by {origin['submitted_by']})" if origin["submitted_by"] else ""
    return f"Run {origin['run']}{others}, {version} ({str(origin['commit'])[:7]}), {origin['card']}, {origin['day']}, {stack}{older}."
