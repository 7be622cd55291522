"""One rule of the zoo a file, each with a class `Router`; the table is `routers/zoo.py`."""
