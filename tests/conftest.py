"""Property tests have no deadline: the machines that run them are often busy with something else."""

from importlib.util import find_spec

if find_spec("hypothesis") is not None:  # not where only the GPU tests run
    from hypothesis import HealthCheck, settings

    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")
