"""What can be seen of a cluster from outside: Prometheus pages and lines of log."""
