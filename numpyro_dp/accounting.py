"""Who bounds epsilon, for ``Privacy(accountant=)``."""

from numpyro_dp.privacy.accounting import GDP, PLD, PRV, RDP, Best, UnsupportedEventError
from numpyro_dp.privacy.calibration import CalibrationError
from numpyro_dp.privacy.statement import Statement

__all__ = [
    "GDP",
    "PLD",
    "PRV",
    "RDP",
    "Best",
    "CalibrationError",
    "Statement",
    "UnsupportedEventError",
]
