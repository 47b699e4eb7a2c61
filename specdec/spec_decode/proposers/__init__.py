"""Drafting methods by name; read where a host is built: engine/build.py, integrations/lmdeploy/proposer.py."""

from specdec.spec_decode.proposers.dflash import DFlashProposer
from specdec.spec_decode.proposers.dspark import DSparkProposer

PROPOSERS = {
    'dflash': DFlashProposer,
    'dspark': DSparkProposer,
}
