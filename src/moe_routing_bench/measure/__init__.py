"""How a cell is measured: supervisor, worker, timers, calibration, statistics, provenance."""
