"""Predicted time and memory of a plan, term by term; the schedule simulator."""
