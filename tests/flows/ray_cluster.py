"""A program: a Ray cluster of two nodes on loopback, which says its address and lives as long as its standard input."""

import logging
import os
import sys

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # loopback only
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


def main(cpus_per_node: int) -> None:
    """Start the nodes, print `HOST:PORT`, and wait."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": cpus_per_node, "object_store_memory": 128 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(**node)
    sys.stdout.write(f"{cluster.address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    main(int(sys.argv[1]))
