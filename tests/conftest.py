"""Settings of all tests: a busy machine may take its time, so that no test fails by the clock."""

from hypothesis import HealthCheck, settings

settings.register_profile("steelyard", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steelyard")
