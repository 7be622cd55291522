"""A message is one line of at most 500 letters that any file can hold, whatever it is about."""

import pytest

from moe_routing_kernels.errors import bad, one_line, pick

HUGE = 10**6
VALUES = {
    "text": "x" * HUGE,
    "lines": "a\n" * HUGE,
    "number": 10**4000,
    "list": ["x" * 1000] * 1000,
    "bytes": b"x" * HUGE,
    "mapping": {"x" * HUGE: 1},
    "surrogate": "\udcff" * 1000,
}


@pytest.mark.fault("huge message")
@pytest.mark.parametrize("value", VALUES)
def test_a_message_is_short(value: str) -> None:
    text = str(bad("what", VALUES[value], "this and that", "a hint"))
    assert text.startswith("what: got ") and text.endswith("allowed: this and that; hint: a hint")
    assert "\n" not in text and len(text) <= 500 and text.encode()
    with pytest.raises(ValueError, match="allowed: one, two") as error:
        pick("what", VALUES[value], ["one", "two"])
    assert len(str(error.value)) <= 500


def test_both_ends_stay() -> None:
    assert one_line(" a\tb\n") == "a b" and one_line("x" * 480) == "x" * 480
    long = one_line("a" + "x" * 480 + "z")
    assert long[0] == "a" and long[-1] == "z" and " … " in long and len(long) == 480
