"""What a campaign refuses."""

from __future__ import annotations


class CampaignError(ValueError):
    """A value, a measurement or a record that a campaign cannot go on with. The message names it, and what it needs."""
