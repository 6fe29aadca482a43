"""The ordinary test session's side: the tests marked `gpu` run in a session on the host GPU."""

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

REPORTS = "HOST_GPU_REPORTS"  # names the file that has a line for each report of that session


class HostGpuSession:
    """A plugin of the ordinary session: the tests marked `gpu` run beside it, in one process."""

    def __init__(self):
        self.process, self.reports = None, None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        """Start, or as a worker of pytest-xdist at its first such test: all go to one worker."""
        wanted = any(map(is_for_gpu, session.items)) and not session.config.option.collectonly
        if wanted and not hasattr(session.config, "workerinput"):
            self.start(session)

    def start(self, session) -> None:
        nodeids = [item.nodeid for item in session.items if is_for_gpu(item)]
        self.folder = tempfile.TemporaryDirectory(prefix="host_gpu-")
        folder = Path(self.folder.name)
        (folder / "reports").touch()
        self.output = (folder / "output").open("w+")
        tests = Path(__file__).resolve().parent.parent
        path = os.pathsep.join(filter(None, [str(tests), os.environ.get("PYTHONPATH")]))
        flags = ["-p", "host_gpu.plugin", "-p", "no:cacheprovider", "-p", "no:logging", "-m", "",
                 f"--maxfail={session.config.option.maxfail or 0}"]
        environment = {k: x for k, x in os.environ.items() if not k.startswith("PYTEST_XDIST_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *flags, *nodeids], cwd=session.config.rootpath,
            env={**environment, "PYTHONPATH": path, REPORTS: str(folder / "reports")},
            stdin=subprocess.DEVNULL, stdout=self.output, stderr=subprocess.STDOUT,
        )

    def pytest_runtest_protocol(self, item):
        """Wait for the other session's end and take over the reports of this test."""
        if not is_for_gpu(item):
            return None
        if self.process is None:
            self.start(item.session)
        ihook = item.ihook
        ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self.reports_of(item) or [self.failure(item)]:
            ihook.pytest_runtest_logreport(report=report)
        ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def reports_of(self, item) -> list[pytest.TestReport]:
        """Those of set-up, call and teardown; none if the other session ended without them."""
        if self.reports is None:
            self.process.wait()
            self.reports = defaultdict(list)
            for line in (Path(self.folder.name) / "reports").read_text().splitlines():
                report = item.config.hook.pytest_report_from_serializable(
                    config=item.config, data=json.loads(line))
                if isinstance(report.longrepr, list):  # of a skipped test; JSON has no tuples
                    report.longrepr = tuple(report.longrepr)
                self.reports[report.nodeid].append(report)
        found = self.reports[item.nodeid]
        return found if found and found[-1].when == "teardown" else []

    def failure(self, item) -> pytest.TestReport:
        self.output.flush()
        said = Path(self.output.name).read_text(errors="replace")[-4000:]
        words = f"the session on the host GPU ended, exit code {self.process.returncode}:\n{said}"
        return pytest.TestReport(item.nodeid, item.location, item.keywords, "failed", words, "call")

    def pytest_sessionfinish(self):
        if self.process:
            self.process.kill()
            self.process.wait()
            self.output.close()
            self.folder.cleanup()


def is_for_gpu(item) -> bool:
    return item.get_closest_marker("gpu") is not None
