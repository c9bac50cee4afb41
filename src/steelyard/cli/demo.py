"""``steelyard demo``"""
