"""The library of the host GPU lies in a cache that outlives the torch it was built with."""

import os
import subprocess
import sys

import host_gpu
import pytest
from conftest import REPO
from host_gpu import library

pytestmark = pytest.mark.skipif(host_gpu.obstacle() is not None, reason=str(host_gpu.obstacle()))


@pytest.mark.slow
def test_it_is_built_with_one_torch_and_loaded_with_another(tmp_path, monkeypatch):
    moved = tmp_path / "torch"
    moved.symlink_to(library.torch_folder())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(library, "torch_folder", lambda: moved)
        built = library.build()
    moved.unlink()
    code = "from host_gpu import library; print(library.build()); library.load(); import torch"
    loaded = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True,
                            env=os.environ | {"PYTHONPATH": str(REPO / "tests" / "gpu")})
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split() == [str(built)], "no second one is built"
