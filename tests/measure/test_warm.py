"""The warm server is not started without need."""

import subprocess
import sys

from moe_routing_bench.measure import client


def test_a_command_may_do_without_a_server(own_server):
    """With --running none is started."""
    command = [sys.executable, "-I", "-S", client.__file__, "--running", "--module", "moe_routing_bench.cli", "list"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "permute" in done.stdout, done.stderr
    assert [path.name for path in own_server.rglob("*") if path.is_file()] == []
