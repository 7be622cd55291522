"""A part of the jobs of a config, for several machines that measure at once: whole groups of what is compared with each other."""

from collections import Counter
from collections.abc import Iterable

from moe_routing_kernels.errors import bad


def of(share: str | None, jobs: Iterable[str]) -> set[str]:
    """The groups of a share such as ``2/3``, of the jobs whose groups are given; without a share all of them.

    Large groups are dealt out first, each to the share that has the fewest jobs. Raises `UserError` for no such share.
    """
    sizes = Counter(jobs)
    if share is None:
        return set(sizes)
    number, shares = map(int, share.split("/"))
    if number > shares:
        raise bad("config.share", share, f"1/{shares} to {shares}/{shares}")
    dealt = [0] * shares
    mine = set()
    for group, size in sizes.most_common():
        place = dealt.index(min(dealt))
        dealt[place] += size
        if place == number - 1:
            mine.add(group)
    return mine
