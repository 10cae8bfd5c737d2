"""Measurements that anybody can repeat: how fast it is, and how close to the full cache."""
