"""Measured and traced numbers as data: per layer kind and per collective; when, where and how."""
