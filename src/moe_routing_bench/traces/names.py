"""What the name of a column or an array says of its numbers. A name with any unknown word says nothing."""

import re

_FILLERS = {"id", "ids", "idx", "index", "indices", "no", "number", "moe"}
_ROLES = {  # the words of each role; a name may add fillers
    "layer": {"layer"},
    "token": {"token", "tok", "position", "pos", "row"},
    "slot": {"slot", "choice", "k"},
    "expert": {"expert", "experts", "topk", "top", "selected", "routed", "chosen"},
}
_NO_IDS = {
    "weights": {"weight", "weights", "prob", "probs", "probability", "probabilities", "score", "scores", "logit", "logits"},
    "counts": {"count", "counts", "load", "loads", "freq", "frequency", "tokens", "hits", "histogram", "mask", "map", "total"},
}  # fmt: skip
HINT_COUNTS = "counts per expert do not say the experts of a token"
ROLES = (*_ROLES, "other")


def words(name: str) -> set[str]:
    """The words of a name in lower case, without its numbers."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return set(re.findall(r"[^\W\d_]+", parted.lower()))


def role(name: str) -> str:
    """The role of a column: layer, token, slot, expert, weights, counts, index or numbered; empty: the name does not say."""
    known = words(name)
    for no_ids, marks in _NO_IDS.items():
        if known & marks:
            return no_ids
    if name in ("", "Unnamed: 0", "__index_level_0__"):
        return "index"
    if number(name) is not None and not known:
        return "numbered"
    if known and known <= {"ids", "indices"}:
        return "expert"
    roles = [what for what, marks in _ROLES.items() if known & marks and known <= marks | _FILLERS]
    return roles[0] if len(roles) == 1 else ""


def number(name: str) -> int | None:
    """The number at the end of a name."""
    match = re.search(r"(\d{1,9})\D?$", name)
    return int(match[1]) if match else None


def stem(name: str) -> str:
    """A name without the number at its end."""
    return re.sub(r"\d+\D?$", "", name)
