"""``steelyard train``"""
