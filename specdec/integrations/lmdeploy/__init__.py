"""specdec's drafts in LMDeploy's PyTorch engine, without a fork: import this package, and method dspark is there.

Importing installs the plug-in (patches.py has the whole list of what it changes). Processes that LMDeploy starts import
it by themselves, because the configs they are sent are classes of this package. Next: patches.py, then configs.py.
"""

from specdec.integrations.lmdeploy.patches import install, installed

installed_here = install()

if installed_here:
    from specdec.integrations.lmdeploy.configs import SpeculativeConfig as SpeculativeConfig

__all__ = ['SpeculativeConfig', 'install', 'installed']
