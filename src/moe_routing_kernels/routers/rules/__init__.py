"""The routers of the zoo: one file per formula, each with a class `Router`. The table of rules is `routers/zoo.py`."""
