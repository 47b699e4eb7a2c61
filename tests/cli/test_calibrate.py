"""`specdec calibrate` on the packaged model: the file it writes is what loading reads; what cannot be is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from specdec.cli.calibrate import Recorder
from specdec.cli.main import main
from specdec.engine.build import demo_folder
from specdec.errors import CheckpointError
from specdec.models.checkpoint import CALIBRATION, read_draft


def run(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(['calibrate', *arguments])
    return int(ended.value.code or 0), ''.join(capsys.readouterr())


@pytest.mark.slow
def test_the_demo_draft(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    plot, output = tmp_path / 'plot.png', tmp_path / 'found.json'
    status, text = run(
        capsys, 'demo', 'demo', 'demo', '--temperature', '0', '--output', str(output), '--plot', str(plot),
        '--device', 'cpu',
    )  # fmt: skip
    assert status == 0, text
    assert 'expected calibration error' in text
    found = json.loads(output.read_text())['confidence_temperatures']
    assert len(found) == 7
    assert plot.read_bytes()[:4] == b'\x89PNG'
    committed = read_draft(demo_folder('dspark')).confidence_temperatures
    assert found == pytest.approx(committed, rel=0.3)


def test_refusals(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    status, text = run(capsys, 'demo', 'demo', str(tmp_path / 'none.txt'))
    assert (status, text.count('\n')) == (1, 1)
    assert 'prompts=' in text
    (tmp_path / 'one.txt').write_text('only one\n')
    status, text = run(capsys, 'demo', 'demo', str(tmp_path / 'one.txt'))
    assert status == 1
    assert 'at least two' in text
    status, text = run(capsys, 'demo', str(demo_folder('dflash')), 'demo')
    assert status == 1
    assert 'no confidence head' in text


def test_confidences_are_what_survivals_rise_from() -> None:
    recorder, confidence = Recorder(), torch.tensor([0.9, 0.5, 0.7])
    recorder.observe(confidence.cumprod(0).tolist(), 3, 1)
    blocks = recorder.blocks(3)
    assert blocks.logits.sigmoid()[0].tolist() == pytest.approx(confidence.tolist(), abs=1e-6)
    assert (blocks.verified.tolist(), blocks.accepted.tolist()) == ([3], [1])


@pytest.mark.parametrize(
    ('content', 'words'),
    [
        ('{"confidence_temperatures": [1, 1]}', 'expected 7'),
        ('{"confidence_temperatures": [1, 1, 1, 1, 1, 1, 0]}', 'numbers > 0'),
        ('{"confidence_temperatures": [1, 1, 1, 1, 1, 1, 1], "more": 1}', 'remove it'),
        ('{}', 'confidence_temperatures'),
        ('[', 'not valid JSON'),
    ],
)
def test_damaged_calibrations(tmp_path: Path, content: str, words: str) -> None:
    folder = shutil.copytree(demo_folder('dspark'), tmp_path / 'draft')
    (folder / CALIBRATION).write_text(content)
    with pytest.raises(CheckpointError, match=words):
        read_draft(folder)


def test_a_calibration_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(demo_folder('dflash'), tmp_path / 'draft')
    (folder / CALIBRATION).write_text('{"confidence_temperatures": [1, 1, 1, 1, 1, 1, 1]}')
    with pytest.raises(CheckpointError, match='no confidence head'):
        read_draft(folder)
