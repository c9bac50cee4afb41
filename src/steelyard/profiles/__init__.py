"""Measured and traced numbers as data: per layer type and per collective; when, where and how."""
