"""More machines and other runtimes: collections spread over a cluster, models exported."""
