"""Predicts training runs that others measured and published, and scores the predictions against them."""
