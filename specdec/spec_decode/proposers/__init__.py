"""Drafting methods by name; engine/build.py alone reads this map."""

from specdec.spec_decode.proposers.dflash import DFlashProposer
from specdec.spec_decode.proposers.dspark import DSparkProposer

PROPOSERS = {
    'dflash': DFlashProposer,
    'dspark': DSparkProposer,
}
