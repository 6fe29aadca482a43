"""pytest -p host_gpu.plugin: a session whose CUDA device is the host, from before torch is there.

The ordinary session starts one (session.py).
"""

import json
import os

import host_gpu
from host_gpu.session import REPORTS

host_gpu.install("sm_90")


class Reporter:
    """Writes each report for the ordinary session."""

    def __init__(self, path: str, config):
        self.path, self.config = path, config

    def pytest_runtest_logreport(self, report):
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        with open(self.path, "a") as file:
            file.write(json.dumps(data) + "\n")


def pytest_configure(config):
    if path := os.environ.pop(REPORTS, None):
        config.pluginmanager.register(Reporter(path, config))
