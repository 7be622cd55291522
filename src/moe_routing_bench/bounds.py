"""Numbers that a user may set, as types: the bounds are in the annotation. What they mean in words is in `fields`."""

from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Seed = Annotated[int, Ge(0), Le(2**31 - 1)]
Amount = Annotated[float, Gt(0)]
Share = Annotated[float, Gt(0), Lt(1)]
