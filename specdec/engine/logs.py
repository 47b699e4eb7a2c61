"""The 'specdec' logger: its level, and a handler where nobody has set one up. Next: whoever logs."""

import logging

from specdec.errors import ConfigError

LOG_LEVELS = ('CRITICAL', 'ERROR', 'WARNING', 'INFO', 'DEBUG')


def set_log_level(level: str) -> None:
    """Sets the level of the 'specdec' logger, and gives it a handler if nobody else has. ConfigError if unknown."""
    name = level.upper() if isinstance(level, str) else level
    if name not in LOG_LEVELS:
        raise ConfigError('log_level', level, 'must be one of ' + ', '.join(LOG_LEVELS))
    logger = logging.getLogger('specdec')
    logger.setLevel(name)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter('%(asctime)s %(name)s %(levelname)s %(message)s'))
        logger.addHandler(handler)
