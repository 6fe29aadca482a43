"""The class that docs/optimizers.md shows takes Muon's place in the script that it names."""

import re

import golden
import torch

PAGE = (golden.REPO / "docs/optimizers.md").read_text()


def test_the_optimizer_of_the_page_trains(tmp_path):
    folder = re.search(r"cp (records/optimizers/\S+)/train_gpt.py", PAGE)[1]
    shown = re.search(r"```python\n(.*?)```", PAGE, re.S)[1]
    source = (golden.REPO / folder / "train_gpt.py").read_text()
    changed, count = re.subn(r"^class Muon\(.*?(?=^def )", lambda _: shown + "\n\n", source,
                             flags=re.M | re.S)
    assert count == 1
    (tmp_path / "train_gpt.py").write_text(changed)
    losses = []
    with golden.in_float64():
        for place in (tmp_path, golden.REPO / folder):
            script = golden.load(place)
            run = golden.TinyRun(script, golden.tiny(script, tmp_path))
            run.train()
            losses.append(torch.tensor(run.losses))
    assert losses[0].isfinite().all()
    assert losses[0][:2].equal(losses[1][:2])  # the first step has no mean to agree with
    assert not losses[0][2:].isclose(losses[1][2:], rtol=1e-6).any()
