"""Measures layers, collectives and overlap on real devices, and writes them as a profile."""
