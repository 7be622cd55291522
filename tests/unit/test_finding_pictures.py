"""Small pictures: where dots and intervals lie, what is named, what is escaped; and when there is none."""

import re

import pytest

from moe_routing_bench.report.document import Dot
from moe_routing_bench.report.page import WIDTH, picture

TWO = [Dot("a", 20, 15, 25), Dot("b", 30, 25, 35, chosen=True, hollow=True)]


def places(svg, kind, *names):
    return [
        [float(re.search(rf'\b{name}="(.*?)"', mark)[1]) for name in names]
        for mark in re.findall(rf"<{kind} (.*?)/>", svg)
    ]


def test_dots_lie_to_scale_within_the_picture():
    """Differences are kept on a scale of small span, ratios on one of large span; names stand to the left."""
    svg = picture(TWO, "ratio", "x", 25)
    (one,), (two,) = places(svg, "circle", "cx")
    reference, *intervals = places(svg, "line", "x1", "x2")
    assert intervals == [[pytest.approx(2 * one - reference[0], abs=0.2), reference[0]], [reference[0], WIDTH - 8]]
    assert reference[0] == pytest.approx((one + two) / 2, abs=0.1)
    assert "a: 20x [15x, 25x]</title>" in svg and '<g class="chosen hollow">' in svg and ">a</text>" in svg
    outside = picture(TWO, "ratio", "x", 5)
    assert places(outside, "line", "x1")[0][0] < places(outside, "line", "x1")[1][0] and ">5x</text>" in outside
    far = picture([Dot("a", 1, 1, 1), Dot("b", 10, 10, 10), Dot("c", 100, 100, 100)], "us")
    (first,), (second,), (third,) = places(far, "circle", "cx")
    assert second - first == pytest.approx(third - second, abs=0.2)


def test_what_the_picture_says_without_being_seen():
    """Scale, names and values with intervals; a name is text."""
    svg = picture([Dot("<b>", 0.5, 0.4, 0.6), Dot("c", 0.25, 0.2, 0.3)], "share", "%")
    assert (
        'aria-label="share: &lt;b&gt; 50.0 % [40.0 %, 60.0 %]; c 25.0 % [20.0 %, 30.0 %]"' in svg and "<b>" not in svg
    )


def test_many_dots_have_no_names_beside_them_and_few_are_no_picture():
    many = picture([Dot(f"n{i}", i + 1, i, i + 2) for i in range(40)], "us")
    assert (
        many.count("<circle") == 40
        and ">n3</text>" not in many
        and float(re.search(r' height="(.*?)"', many)[1]) <= 130
    )
    assert not picture([*TWO[:1], Dot("n", 1, float("nan"), 2)], "us"), "a dot without an interval is none"
    assert not picture(TWO[:1], "us") and not picture([], "us")
