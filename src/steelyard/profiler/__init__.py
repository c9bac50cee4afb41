"""Measures compute and collectives on real devices and writes profiles."""
