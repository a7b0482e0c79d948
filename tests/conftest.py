"""What holds for every test.

Hypothesis: the machine may be busy, so slowness is no failure; and `make test` draws the same examples every time, so
that what failed for one fails for all. The longer targets draw new ones: HYPOTHESIS_PROFILE=search.
"""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.register_profile("search", settings.get_profile("same"), derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
