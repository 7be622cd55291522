"""``python -m moe_routing_bench.cli``: what ``moe-routing-bench`` runs."""

from moe_routing_bench.cli.start import main

main()
