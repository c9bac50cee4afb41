"""Measured and traced costs per layer type and collective, with their time, place and method."""
