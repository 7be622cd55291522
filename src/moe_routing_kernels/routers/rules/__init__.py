"""The routers of the zoo: one file per family, one class per rule. The table of rules is `routers/zoo.py`."""
