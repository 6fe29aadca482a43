"""The ordinary test session's side: the tests marked `gpu` run in a session on the host GPU."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

REPORTS = "HOST_GPU_REPORTS"  # names the file that has a line for each report of that session


class HostGpuSession:
    """A plugin of the ordinary session: the tests marked `gpu` are run beside it, in one process.

    They come last, so that the others need not wait for them.
    """

    def __init__(self):
        self.process, self.reports = None, {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        """Start, now that it is known which tests are wanted.

        A worker of pytest-xdist starts at its first such test: all of them go to one worker.
        """
        is_worker = hasattr(session.config, "workerinput")
        wanted = any(map(is_for_gpu, session.items)) and not session.config.option.collectonly
        if wanted and not is_worker:
            self.start(session)

    def start(self, session) -> None:
        nodeids = [item.nodeid for item in session.items if is_for_gpu(item)]
        config = session.config
        self.folder = tempfile.TemporaryDirectory(prefix="host_gpu-")
        folder = Path(self.folder.name)
        (folder / "reports").touch()
        self.lines = (folder / "reports").open()
        self.output = (folder / "output").open("w+")
        tests = Path(__file__).resolve().parent.parent
        path = os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        flags = ["-p", "host_gpu.plugin", "-p", "no:cacheprovider", "-p", "no:logging", "-m", ""]
        of_worker = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT")
        environment = {name: x for name, x in os.environ.items() if name not in of_worker}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *flags, *nodeids], cwd=config.rootpath,
            env={**environment, "PYTHONPATH": path, REPORTS: str(folder / "reports")},
            stdin=subprocess.DEVNULL, stdout=self.output, stderr=subprocess.STDOUT,
        )

    def pytest_runtest_protocol(self, item):
        """Wait for the reports of this test and make them its own."""
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
        ended = False
        while not ended:
            ended = self.process.poll() is not None  # before reading, so that nothing is missed
            for line in iter(self.lines.readline, ""):
                data = json.loads(line)
                report = item.config.hook.pytest_report_from_serializable(
                    config=item.config, data=data
                )
                if isinstance(report.longrepr, list):  # of a skipped test; JSON has no tuples
                    report.longrepr = tuple(report.longrepr)
                self.reports.setdefault(report.nodeid, []).append(report)
            found = self.reports.get(item.nodeid, [])
            if found and found[-1].when == "teardown":
                return found
            if not ended:
                try:
                    self.process.wait(0.2)
                except subprocess.TimeoutExpired:
                    continue
        return []

    def failure(self, item) -> pytest.TestReport:
        self.output.flush()
        said = Path(self.output.name).read_text(errors="replace")[-4000:]
        words = f"the session on the host GPU ended, exit code {self.process.returncode}:\n{said}"
        return pytest.TestReport(
            item.nodeid, item.location, item.keywords, "failed", words, "call"
        )

    def pytest_sessionfinish(self):
        if self.process:
            self.process.kill()
            self.process.wait()
            self.lines.close()
            self.output.close()
            self.folder.cleanup()


def is_for_gpu(item) -> bool:
    return item.get_closest_marker("gpu") is not None
