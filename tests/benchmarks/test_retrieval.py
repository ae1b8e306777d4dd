"""The curves of a run of train.embed are drawn."""

import json

import PIL.Image

from benchmarks.retrieval import main


def test_the_picture(tmp_path, capsys):
    found = {f"validation_{name}": 0.125 for name in ("recall@1", "recall@10", "mrr")}
    lines = [{"step": 0} | found, {"step": 1, "loss": 2.0}, {"step": 2} | dict.fromkeys(found, 0.5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    main(tmp_path, tmp_path / "heads.png")
    assert "recall@1: 0.125 at first, 0.500 at last" in capsys.readouterr().out
    with PIL.Image.open(tmp_path / "heads.png") as picture:
        assert picture.width == 1200
