"""Measure layers, collectives and overlap on real devices, and write them as a profile."""
